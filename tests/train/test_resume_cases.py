"""Resume, seen from the user's script: cases that went wrong for users of other systems (A, B, D).

All on the small model that they share: 3 tables of 1000, 37 and 1 rows, dimension 8, batch 16,
40 batches, pooled sum, fixed seed.
"""

import os
import random
import shutil
import signal
import traceback
import warnings

import numpy as np
import pytest
import torch
from torch import nn

import trainingcxl as tcxl
from trainingcxl.pool import Pool, inspect, verify
from trainingcxl.state import decode_blob

ROWS = (1000, 37, 1)
BATCH, PER_EPOCH = 16, 20


class Loader:
    """A pure function of (epoch, batch), as trainingcxl.data.BatchLoader; skewed ids, many of
    them twice.
    """

    def __init__(self):
        self.place = (0, 0)

    def seek(self, epoch, batch):
        self.place = (epoch, batch)

    def __iter__(self):
        epoch, begin = self.place
        for b in range(begin, PER_EPOCH):
            yield make_batch(epoch * PER_EPOCH + b)


class Batch:
    def __init__(self, sparse, label):
        self.sparse, self.label = sparse, label


def make_batch(number):
    rng = np.random.default_rng(number)
    ids = np.stack([(rng.random(BATCH) ** 3 * rows).astype(np.int64) for rows in ROWS], axis=1)
    return Batch(torch.from_numpy(ids), torch.from_numpy(rng.random(BATCH).astype(np.float32)))


class Stopper:
    """Early stopping: patience counted in epochs."""

    def __init__(self, patience):
        self.patience, self.best, self.waited = patience, float("inf"), 0

    def state_dict(self):
        return {"best": self.best, "waited": self.waited}

    def load_state_dict(self, state):
        self.best, self.waited = state["best"], state["waited"]

    def is_over(self, value):
        self.waited = 0 if value < self.best else self.waited + 1
        self.best = min(self.best, value)
        return self.waited >= self.patience


class Script:
    """What a user's script does from its first line to the loop."""

    def __init__(
        self, pool, *, lr=0.1, dense_every=1, rows=tcxl.optim.RowWiseAdagrad, per_batch=False
    ):
        torch.manual_seed(0)  # all three: the digest covers every generator that a resume restores
        random.seed(0)
        np.random.seed(0)
        tables = [
            tcxl.EmbeddingBagConfig(
                name=f"t{rows}", num_embeddings=rows, embedding_dim=8, feature_names=[f"f{rows}"]
            )
            for rows in ROWS
        ]
        self.pool = pool
        self.row_optimizer = rows(lr=lr)
        self.bags = tcxl.EmbeddingBagCollection(pool, tables=tables, optimizer=self.row_optimizer)
        self.model = nn.Sequential(
            self.bags,
            nn.Linear(24, 8),
            nn.BatchNorm1d(8),
            nn.ReLU(),
            nn.Dropout(0.2),
            nn.Linear(8, 1),
        )
        self.dense = torch.optim.Adam(self.model.parameters(), lr=lr / 10)
        self.stopper = Stopper(patience=2)
        self.schedulers = {
            "rows": torch.optim.lr_scheduler.ExponentialLR(self.row_optimizer, 0.9),
            "dense": torch.optim.lr_scheduler.CosineAnnealingLR(self.dense, 50),
        }
        states = {"stopper": self.stopper}
        options = {"every_batch": self.schedulers} if per_batch else {}
        if not per_batch:
            states.update(self.schedulers)
        self.per_batch = per_batch
        self.run = tcxl.FaultTolerantRun(
            pool, self.model, self.dense, state=states, dense_every=dense_every, **options
        )
        self.losses = {}

    def train(self, epochs=2, on_commit=None, stop_early=False):
        for epoch in self.run.epochs(epochs):
            for batch in self.run.batches(Loader()):
                loss = nn.functional.mse_loss(self.model(batch.sparse)[:, 0], batch.label)
                self.run.step(loss)
                self.losses[self.run.committed_batch] = loss.item()
                if on_commit is not None:
                    on_commit(self.run)
            if not self.per_batch:
                for scheduler in self.schedulers.values():
                    scheduler.step()
            if stop_early and self.stopper.is_over([5.0, 4.0, 4.5, 4.2, 1.0][epoch]):
                self.run.finish()
        return self.pool.digest()


class Folder:
    """Pools of one test, and images of them."""

    def __init__(self, path):
        self.path = path
        self.pool_path = path / "ads.pool"
        self._images = 0

    def image(self, pool):
        self._images += 1
        copy = self.path / f"image{self._images}.pool"
        shutil.copytree(pool, copy)
        return copy


@pytest.fixture(autouse=True)
def _one_torch_thread():
    """The models are too small for more, and the bits depend on the number."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def folder(tmpfs_folder):
    return Folder(tmpfs_folder)


def images_at(folder, places, **options):
    """The uninterrupted run: digest, losses, and images at the given commits."""
    images, train = {}, options.pop("train", {})

    def on_commit(run):
        if run.committed_batch in places:
            images[run.committed_batch] = folder.image(folder.pool_path)

    with Pool(folder.pool_path, threads=1) as pool:
        script = Script(pool, **options)
        digest = script.train(on_commit=on_commit, **train)
    return digest, script.losses, images


@pytest.mark.parametrize("dense_every", [1, 3, 50])
def test_exact_resume_at_every_kind_of_place(folder, dense_every):
    """A5: at 20 %, at 40 %, at the last batch of an epoch and the first of the next: equal
    losses, equal end.
    """
    places = (4, 8, 20, 21, 40)
    digest, losses, images = images_at(folder, places, dense_every=dense_every)
    for committed, image in images.items():
        with Pool(image, threads=2) as pool:
            assert pool.recovery.committed_batch == committed
            assert committed - 2 * dense_every <= pool.committed_batch <= committed
            point = pool.committed_batch
            script = Script(pool, dense_every=dense_every)
            assert script.train() == digest
        assert script.losses == {n: loss for n, loss in losses.items() if n > point}
        assert verify(image) == []


@pytest.mark.parametrize("dense_every", [1, 3, 50])
def test_latest_resume_keeps_the_rows(folder, dense_every):
    """Protocol section 5: rows, position and scalars of the commit, the dense part of an earlier
    batch.
    """
    rows = {}
    with Pool(folder.pool_path, threads=1) as pool:
        script = Script(pool, dense_every=dense_every)

        def on_commit(run):
            rows[run.committed_batch] = [t.weight.copy() for t in pool.tables.values()]
            if run.committed_batch in (5, 26):
                rows[f"image {run.committed_batch}"] = folder.image(folder.pool_path)

        script.train(on_commit=on_commit)
    for committed in (5, 26):
        image = rows[f"image {committed}"]
        for _ in range(2):  # recovery is a function of the bytes: again, the same
            with Pool(image, threads=1, resume="latest") as pool:
                assert pool.committed_batch == committed
                assert pool.resume_record["batch"] == (committed - 1) % PER_EPOCH + 1
                for table, weight in zip(pool.tables.values(), rows[committed], strict=True):
                    assert np.array_equal(table.weight, weight)
        with Pool(image, threads=1, resume="latest") as pool:
            script = Script(pool, dense_every=dense_every)
            script.train()
            assert pool.committed_batch == 40
        assert min(script.losses) == committed + 1


def test_latest_then_exact(folder):
    """After a "latest" resume its dense part is the recovery point: a later exact one does not
    go behind it.
    """
    _, _, images = images_at(folder, (26,), dense_every=50)
    with Pool(images[26], threads=1, resume="latest") as pool:
        assert pool.recovery.dense_batch < 26
    with Pool(images[26], threads=1) as pool:
        assert pool.committed_batch == 26
        assert pool.recovery.batches_to_redo == 0


@pytest.mark.parametrize("rows", [tcxl.optim.SGD, tcxl.optim.Adagrad, tcxl.optim.RowWiseAdagrad])
def test_weights_and_optimizer_rows_are_back(folder, rows):
    """B5: after training, closing and opening, every row and its optimizer state are there."""
    with Pool(folder.pool_path, threads=1) as pool:
        Script(pool, rows=rows).train(epochs=1)
        kept = {n: (t.weight.copy(), t.state.copy()) for n, t in pool.tables.items()}
    with Pool(folder.pool_path, threads=1) as pool:
        for name, table in pool.tables.items():
            assert np.array_equal(table.weight, kept[name][0])
            assert np.array_equal(table.state, kept[name][1])
        script = Script(pool, rows=rows)
        assert script.run.committed_batch == 20


def test_learning_rate_in_force_is_resumed(folder):
    """B3: schedulers changed lr before the kill; the new script has another default. The
    recorded one holds, said so.
    """
    digest, _, images = images_at(folder, (30,))
    with Pool(images[30], threads=1) as pool:
        script = Script(pool, lr=0.5)
        assert script.row_optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.9)
        assert script.dense.param_groups[0]["lr"] != 0.05
        said = [text for text in script.run.notices if text.startswith("lr of")]
        assert len(said) == 2
        assert all("0.09" in text or "0.5" in text or "0.05" in text for text in said)
        assert script.train() == digest


@pytest.mark.parametrize("dense_every", [1, 3])
def test_schedulers_that_count_batches(folder, dense_every):
    """B3: with every_batch= the schedulers' steps belong to the commit: killed anywhere, none is
    lost or done twice.
    """
    places = (1, 7, 20, 33)
    digest, _, images = images_at(folder, places, dense_every=dense_every, per_batch=True)
    for image in images.values():
        with Pool(image, threads=1) as pool:
            script = Script(pool, dense_every=dense_every, per_batch=True)
            point = script.run.committed_batch
            assert script.schedulers["rows"].last_epoch == point
            assert script.row_optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.9**point)
            assert script.train() == digest
            assert not any("after the commit" in text for text in script.run.notices)


def test_early_stopping_and_schedulers(folder):
    """A6, A9: killed in epoch 3, stopped at the same place; the finished run stays finished and
    unchanged.
    """
    early = {"epochs": 5, "stop_early": True}
    digest, losses, images = images_at(folder, (50, 60), train=early)
    assert max(losses) == 80  # epoch 2 and 3 were no better than epoch 1
    for image in images.values():
        with Pool(image, threads=1) as pool:
            assert Script(pool).train(**early) == digest
        before = (image / "data").read_bytes()
        with Pool(image, threads=1) as pool:
            script = Script(pool)
            assert script.run.finished
            assert script.train(**early) == digest
            assert script.losses == {}
            assert any("nothing to do" in text for text in script.run.notices)
        assert (image / "data").read_bytes() == before
        assert inspect(image)["finished"]


def test_background_logging_keeps_the_values_of_its_batch(folder):
    """D3: dense part of batch k logged in the background while k + 1 changes it at once: the
    values are those of k.
    """
    dense = {}
    with Pool(folder.pool_path, threads=1) as pool:
        script = Script(pool, dense_every=1)
        script.model.register_buffer("ballast", torch.zeros(300_000))

        def on_commit(run):
            state = {k: v.clone() for k, v in script.model.state_dict().items()}
            dense[run.committed_batch] = state, [t.weight.copy() for t in pool.tables.values()]
            with torch.no_grad():
                script.model.ballast.fill_(float(run.committed_batch))
            if run.committed_batch % 5 == 0:
                dense[f"image {run.committed_batch}"] = folder.image(folder.pool_path)

        script.train(epochs=1, on_commit=on_commit)
    for n in (5, 10, 15, 20):
        with Pool(dense[f"image {n}"], threads=1) as pool:
            point = pool.committed_batch
            model = decode_blob(pool.core.dense_blob())["model"]
            state, weights = dense[point]
            for name, tensor in state.items():
                assert torch.equal(model[name], tensor), (n, point, name)
            for table, weight in zip(pool.tables.values(), weights, strict=True):
                assert np.array_equal(table.weight, weight)


def test_run_without_evaluation_is_resumable_at_any_time(folder):
    """D12: nothing but the loop: the pool is durable from batch 0 on, and says where it is."""
    with Pool(folder.pool_path, threads=1) as pool:
        script = Script(pool)
        assert inspect(folder.pool_path)["committed_batch"] == 0
        assert str(folder.pool_path) in repr(pool)
        seen = []
        script.train(epochs=1, on_commit=lambda run: seen.append(inspect(folder.pool_path)))
    assert [found["committed_batch"] for found in seen] == list(range(1, 21))
    assert [found["position"] for found in seen] == list(range(1, 21))


def life(path, dense_every, kill_after):
    """One life of the trainer, in a child: its digest, None when killed; the rows it rolled back.

    kill_after: seconds after the first commit of this life; None lets it end.
    """
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about threads at a fork: torch is set to one
        child = os.fork()
    if child == 0:
        try:
            with Pool(path, threads=1) as pool:
                recovery = pool.recovery
                os.write(writer, f"{recovery.rows_rolled_back if recovery else 0}\n".encode())
                script = Script(pool, dense_every=dense_every)
                first = []

                def on_commit(run):
                    if kill_after is not None and not first:
                        first.append(run.committed_batch)
                        signal.signal(
                            signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGKILL)
                        )
                        signal.setitimer(signal.ITIMER_REAL, kill_after)

                os.write(writer, f"{script.train(on_commit=on_commit)}\n".encode())
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    os.close(writer)
    with os.fdopen(reader) as lines:
        words = lines.read().split()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, -signal.SIGKILL)
    assert len(words) == (2 if status == 0 else 1)
    return (words[1] if status == 0 else None), int(words[0])


def test_killed_again_and_again(folder):
    """D1, short form: kill -9 at random moments of eight lives: always opens, is sound, ends as
    the reference.
    """
    expected, _ = life(folder.path / "reference.pool", 3, None)
    rng = random.Random(4)
    kills = rolled_back = 0
    for _ in range(8):
        digest, rows = life(folder.pool_path, 3, 0.001 + rng.expovariate(20))
        rolled_back += rows > 0
        assert verify(folder.pool_path) == []
        if digest is not None:
            assert digest == expected
            break
        kills += 1
    assert kills > 0
    assert rolled_back > 0 or kills < 3
    assert life(folder.pool_path, 3, None)[0] == expected
