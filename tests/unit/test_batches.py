"""Where the data stands: every kind of loader goes on with the batch after the last committed one.

A crash is an image of the pool's files at a commit; the script is then run again from its first
line, as a user would, on the image. Its end must equal that of the run that was never interrupted,
bit for bit.
"""

import random
import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler

import trainingcxl as tcxl
from trainingcxl.batches import BatchFeed

ROWS, SAMPLES, BATCH, EPOCHS = 60, 40, 4, 3  # 10 batches an epoch
PER_EPOCH = SAMPLES // BATCH


class Rows(Dataset):
    """Ids and a label; with noise it draws from a global generator at each access, as
    augmentation does.
    """

    def __init__(self, noise=False):
        self.noise = noise

    def __len__(self):
        return SAMPLES

    def __getitem__(self, i):
        shift = int(torch.randint(0, 3, ())) if self.noise else 0
        return torch.tensor([(i * 7 + shift) % ROWS, (i * 11) % ROWS]), torch.tensor(float(i % 3))


class Seekable:
    """A pure function of (epoch, batch), as trainingcxl.data.BatchLoader."""

    def __init__(self):
        self.seeks = []
        self.place = (0, 0)

    def seek(self, epoch, batch):
        self.seeks.append((epoch, batch))
        self.place = (epoch, batch)

    def __len__(self):
        return PER_EPOCH

    def __iter__(self):
        epoch, begin = self.place
        order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(epoch))
        for b in range(begin, PER_EPOCH):
            yield collate([Rows()[int(i)] for i in order[b * BATCH : (b + 1) * BATCH]])


class Stateful:
    """Knows its epoch and its place in it, as torchdata's StatefulDataLoader does.

    What a state means that was taken when an epoch was over differs from loader to loader: that
    nothing of it is left (`ends_empty`), or that the next one begins.
    """

    def __init__(self, ends_empty):
        self.ends_empty = ends_empty
        self.epoch, self.place, self.is_over, self.is_loaded = 0, 0, False, False
        self.calls = 0

    def state_dict(self):
        self.calls += 1
        return {"epoch": self.epoch, "place": self.place, "over": self.is_over}

    def load_state_dict(self, state):
        self.epoch, self.place, self.is_over = state["epoch"], state["place"], state["over"]
        self.is_loaded = True

    def __iter__(self):
        if self.is_over and not (self.is_loaded and self.ends_empty):
            self.epoch, self.place, self.is_over = self.epoch + 1, 0, False
        self.is_loaded = False
        order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(self.epoch))
        while self.place < PER_EPOCH:
            begin = self.place * BATCH
            self.place += 1
            yield collate([Rows()[int(i)] for i in order[begin : begin + BATCH]])
        self.is_over = True


class Stream(IterableDataset):
    """No length, no shuffling, noise from Python's generator."""

    def __iter__(self):
        for i in range(SAMPLES):
            yield torch.tensor([random.randrange(ROWS), i]), torch.tensor(1.0)


def collate(items):
    return torch.stack([ids for ids, _ in items]), torch.stack([label for _, label in items])


def data_loader(**options):
    options.setdefault("dataset", Rows())
    return DataLoader(options.pop("dataset"), batch_size=BATCH, **options)


LOADERS = {
    "seekable": Seekable,
    "stateful": lambda: Stateful(False),
    "stateful, empty after its end": lambda: Stateful(True),
    "shuffled": lambda: data_loader(shuffle=True),
    "shuffled with noise": lambda: data_loader(dataset=Rows(True), shuffle=True),
    "own generator": lambda: data_loader(shuffle=True, generator=torch.Generator().manual_seed(7)),
    "sampler's generator": lambda: data_loader(
        sampler=RandomSampler(Rows(), generator=torch.Generator().manual_seed(7))
    ),
    "in order": lambda: data_loader(),
    "stream": lambda: data_loader(dataset=Stream()),
    "list": lambda: [collate([Rows()[4 * b + i] for i in range(BATCH)]) for b in range(PER_EPOCH)],
}
SKIPPED = ("shuffled", "own generator", "sampler", "in order", "stream", "list", "workers")


def train(pool, make_loader, *, epochs=EPOCHS, on_commit=None, dense_every=1):
    """The user's script: seeds, model with dropout, loop. Returns the digest at its end."""
    torch.manual_seed(0)
    random.seed(0)
    loader = make_loader()
    config = tcxl.EmbeddingBagConfig(
        name="t", num_embeddings=ROWS, embedding_dim=4, feature_names=["x", "y"]
    )
    bags = tcxl.EmbeddingBagCollection(
        pool, tables=[config], optimizer=tcxl.optim.RowWiseAdagrad(lr=0.1)
    )
    model = nn.Sequential(bags, nn.Dropout(0.3), nn.Linear(8, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    run = tcxl.FaultTolerantRun(
        pool, model, optimizer, dense_every=dense_every, sparse_of=lambda batch: batch[0]
    )
    for _ in run.epochs(epochs):
        for ids, label in run.batches(loader):
            run.step((model(ids)[:, 0] - label).square().sum())
            if on_commit is not None:
                on_commit(run)
    return pool.digest()


def interrupted(bench, make_loader, places, **options):
    """The digest of an uninterrupted run, and images at the given commits."""
    images = {}

    def on_commit(run):
        if run.committed_batch in places:
            images[run.committed_batch] = bench.image()

    with bench.open() as pool, warnings.catch_warnings():
        warnings.simplefilter("error")
        digest = train(pool, make_loader, on_commit=on_commit, **options)
        assert pool.committed_batch == EPOCHS * PER_EPOCH
    return digest, images


@pytest.mark.parametrize("kind", LOADERS)
def test_resume_goes_on_with_the_next_batch(bench, kind):
    """A1, A2, A5: killed early, in mid-epoch, at the last batch of an epoch, at the first of the
    next, at the end.
    """
    digest, images = interrupted(bench, LOADERS[kind], (1, 9, 10, 11, 17, 30))
    for committed, image in images.items():
        with bench.open(image) as pool, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            at = pool.resume_record["epoch"], pool.resume_record["batch"]
            assert pool.committed_batch in (committed, committed - 1)
            assert train(pool, LOADERS[kind]) == digest, (
                f"killed at batch {committed}, resumed at {at}"
            )
        costs = [str(w.message) for w in caught if "skipped" in str(w.message)]
        assert bool(costs) == (kind.startswith(SKIPPED) and at[1] > 0)
        assert all(f"{at[1]} batches" in text for text in costs)


@pytest.mark.parametrize("kind", ["seekable", "stateful", "shuffled", "own generator"])
def test_kill_at_the_border_of_epochs(bench, kind):
    """A1: the image of the instant between two epochs; 4 epochs are 4 epochs, in the order of
    the reference.
    """
    images = []
    with bench.open() as pool:
        run_end_epoch = tcxl.FaultTolerantRun._end_epoch

        def end_epoch(run):
            run_end_epoch(run)
            images.append(bench.image())

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tcxl.FaultTolerantRun, "_end_epoch", end_epoch)
            digest = train(pool, LOADERS[kind], epochs=4)
    assert len(images) == 4
    for i, image in enumerate(images):
        with bench.open(image) as pool:
            assert (pool.resume_record["epoch"], pool.resume_record["batch"]) == (i + 1, 0)
            assert train(pool, LOADERS[kind], epochs=4) == digest


def test_every_resume_is_resumed_again(bench):
    """A2: crash(5), resume, crash after one more batch, resume, to the end; also a crash before
    the first batch.
    """
    digest, images = interrupted(bench, LOADERS["shuffled"], (5,))
    path = images[5]
    for life in range(4):
        made = []

        def stop(run, made=made, path=path):
            made.append(bench.image(path))
            raise KeyboardInterrupt

        pool = bench.open(path)
        with pytest.warns(UserWarning, match="skipped"), pytest.raises(KeyboardInterrupt):
            train(pool, LOADERS["shuffled"], on_commit=stop)
        assert pool.committed_batch in (5 + life, 6 + life)
        path = made[0]
    with bench.open(path) as pool, pytest.warns(UserWarning, match="skipped"):
        assert train(pool, LOADERS["shuffled"]) == digest


def test_crash_before_the_first_batch(bench):
    """A2: nothing committed but batch 0: the second process is the first again."""
    with bench.open() as pool:
        digest = train(pool, LOADERS["own generator"])
    path = bench.folder / "early.pool"
    pool = bench.open(path)
    loader = LOADERS["own generator"]

    def fail():
        loader()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(pool, fail)
    pool.close()
    with bench.open(path) as pool:
        assert train(pool, loader) == digest


def test_worker_processes(bench):
    """DataLoader with num_workers=2: prefetching workers change nothing about the position."""

    def loader():
        return data_loader(shuffle=True, num_workers=2, multiprocessing_context="fork")

    digest, images = interrupted(bench, loader, (13,))
    with bench.open(images[13]) as pool, pytest.warns(UserWarning, match="skipped"):
        assert train(pool, loader) == digest


@pytest.mark.parametrize("dense_every", [1, 3, 50])
def test_rolled_back_batches_are_fetched_again(bench, dense_every):
    """The position goes back with the dense part: up to 2K batches are trained again, with the
    same bits.
    """
    digest, images = interrupted(bench, Seekable, (17, 26), dense_every=dense_every)
    for committed, image in images.items():
        with bench.open(image) as pool:
            redo = committed - pool.committed_batch
            assert 0 <= redo <= max(2 * dense_every - 1, 1)
            assert pool.recovery.batches_to_redo == redo
            assert train(pool, Seekable, dense_every=dense_every) == digest


def test_our_kind_of_loader_is_only_sought(bench):
    """A4: no state is asked for, one seek an epoch, no batch is fetched twice."""
    loader = Seekable()
    with bench.open() as pool:
        train(pool, lambda: loader, epochs=2)
    assert loader.seeks == [(0, 0), (1, 0)]
    stateful = Stateful(False)
    with bench.open(bench.folder / "stateful.pool") as pool:
        train(pool, lambda: stateful, epochs=2)
    assert stateful.calls == 2 * (PER_EPOCH + 1)  # once a batch, once at the end


def test_finished_runs_are_not_entered_again(bench):
    """A9: the run says that it is complete; nothing changes; more epochs continue it."""
    with bench.open() as pool:
        digest = train(pool, Seekable, epochs=2)
    before = (bench.path / "data").read_bytes()
    for _ in range(2):
        with bench.open() as pool:
            seen = []
            assert train(pool, Seekable, epochs=2, on_commit=seen.append) == digest
            assert seen == []
    assert (bench.path / "data").read_bytes() == before
    with bench.open(bench.folder / "long.pool") as pool:
        longer = train(pool, Seekable, epochs=3)
    with bench.open() as pool:
        assert train(pool, Seekable, epochs=3) == longer


def test_empty_loader(bench):
    """An epoch without batches ends; it does not hang or count."""
    with bench.open() as pool:
        train(pool, lambda: [])
        assert pool.committed_batch == 0


def test_loader_that_shrank(bench):
    """The data lost its end between two processes: the epoch is over, no error, no batch twice."""
    loader = LOADERS["list"]
    _, images = interrupted(bench, loader, (9,))
    with bench.open(images[9]) as pool:
        with pytest.warns(UserWarning, match="skipped"):
            train(pool, lambda: loader()[:5], epochs=1)
        assert pool.committed_batch in (8, 9)


def test_lookahead_never_fetches_more_than_it_says():
    """Fetching ahead is bounded, and a batch is announced before the one before it is used."""
    events = []

    def loader():
        for i in range(6):
            events.append(("fetch", i))
            yield i

    feed = BatchFeed(
        loader(),
        epoch=0,
        consumed=0,
        loader_state=None,
        epoch_rng=None,
        fetch_rng=[],
        is_restored=False,
        announce=lambda batch: events.append(("announce", batch)) or batch + 1,
        lookahead=2,
    )
    for fetched in feed:
        events.append(("use", fetched.batch))
        ahead = sum(kind == "fetch" for kind, _ in events) - fetched.batch - 1
        assert ahead == min(2, 5 - fetched.batch)
        assert fetched.step_id == fetched.batch + 1
        assert ("announce", min(fetched.batch + 1, 5)) in events
    assert [i for kind, i in events if kind == "use"] == list(range(6))
