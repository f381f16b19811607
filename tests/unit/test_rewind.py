"""Going back some batches: what is kept, what is listed, and that training goes on from there as it
did the first time.

Lost would be a training whose loss exploded: to go on from a state that never was.
"""

import json

import pytest
import torch
from click.testing import CliRunner
from small_job import ROWS, Counter, Job

import trainingcxl as tcxl
from trainingcxl.cli.program import main
from trainingcxl.errors import PoolError, RecoveryError
from trainingcxl.pool import inspect, verify

BATCHES = 24


pytestmark = pytest.mark.usefixtures("kept_horizon")


class Data:
    """Batches that are a function of the position; 12 an epoch."""

    def __init__(self, per_epoch=12):
        self.per_epoch = per_epoch
        self.next = 0
        self.epoch = 0

    def seek(self, epoch, batch):
        self.epoch, self.next = epoch, batch

    def __len__(self):
        return self.per_epoch

    def __iter__(self):
        for k in range(self.next, self.per_epoch):
            generator = torch.Generator().manual_seed(1000 * self.epoch + k)
            yield torch.randint(0, ROWS, (6, 2), generator=generator)


def train(pool, until=BATCHES, *, each=lambda job: None, every=1, settled=True):
    """Trains up to a batch; the loss depends on a generator and on a state object."""
    job = Job(pool, state={"count": Counter()}, dense_every=every, sparse_of=lambda ids: ids)
    job.counter = job.run._state["count"]
    for _ in job.run.epochs(-(-BATCHES // 12)):
        for ids in job.run.batches(Data()):
            if job.run.committed_batch >= until:
                return job
            job.counter.count += 1
            job.run.step(job.loss(ids, scale=1 + 0.1 * torch.rand(()).item()))
            if settled:
                pool.core.wait_dense()  # else the clock says which generations there are
            each(job)
    return job


@pytest.fixture
def whole(any_bench):
    """Digest of the training that is left alone."""
    with any_bench.open(any_bench.folder / "whole.pool") as pool:
        train(pool)
        return pool.digest()


def exact(pool):
    return [point.batch for point in pool.rewind_points() if point.is_exact]


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("form", ["background", "fused"])
def test_every_exact_point_leads_to_the_same_end(any_bench, whole, every, form):
    with any_bench.open(undo_log=form) as pool:
        train(pool, 20, every=every)
    with any_bench.open(any_bench.image(), read_only=True) as pool:
        points = pool.rewind_points()
    assert [point.batch for point in points] == list(range(19, -1, -1))
    found = [point for point in points if point.is_exact]
    assert len(found) >= (14 if every == 1 else 5)
    for point in found:
        assert (point.epoch, point.position) in (
            divmod(point.batch, 12),
            (point.batch // 12 - 1, 12),
        )
        path = any_bench.image()
        with any_bench.open(path) as pool:
            report = pool.rewind(to=point.batch)
            assert (report.resumed_batch, pool.committed_batch) == (point.batch, point.batch)
        assert verify(path) == []
        with any_bench.open(path, undo_log=form) as pool:
            train(pool, every=every)
            assert pool.digest() == whole
        assert verify(path) == []


def test_back_again_and_again_across_lives(any_bench, whole):
    """Each rewind begins a life; the points of those before stay, those of a future given up go."""
    path = any_bench.path
    for until, back in ((10, 3), (15, 5), (20, 9), (18, 1)):
        with any_bench.open(path) as pool:
            train(pool, until)
        with any_bench.open(path) as pool:
            before = exact(pool)
            assert max(before) == until - 1
            pool.rewind(batches=back)
            assert pool.committed_batch <= until - back
            left = exact(pool)
            assert left == [batch for batch in before if batch < pool.committed_batch]
    with any_bench.open(path) as pool:
        train(pool)
        assert pool.digest() == whole


def test_points_survive_a_kill(any_bench, whole):
    """What was kept before a kill is there after the recovery."""
    images = []
    with any_bench.open() as pool:
        train(pool, 20, each=lambda job: images.append(any_bench.image()))
    for image in images[3::5]:
        with any_bench.open(image) as pool:
            points = exact(pool)
            assert len(points) >= min(3, pool.committed_batch - 1)
            pool.rewind(to=points[-1])
        with any_bench.open(image) as pool:
            train(pool)
            assert pool.digest() == whole


def test_a_future_that_was_given_up_is_no_point(any_bench):
    with any_bench.open() as pool:
        train(pool, 20)
    with any_bench.open() as pool:
        pool.rewind(to=exact(pool)[5])
        back = pool.committed_batch
    with any_bench.open() as pool:
        train(pool, back + 2)
    with any_bench.open() as pool:
        assert max(exact(pool)) == back + 1
        assert pool.committed_batch == back + 2


@pytest.mark.parametrize("keep", [0, 1, 5])
def test_so_many_are_kept(bench, keep):
    with bench.open(keep_dense=keep) as pool:
        train(pool, 20)
        assert len(exact(pool)) == keep + 1  # the newest is where the pool stands
    with bench.open(keep_dense=keep) as pool:
        assert len(exact(pool)) == keep + 1


def test_the_end_takes_no_point_away(bench):
    """It captures its batch again, which needs a place."""
    with bench.open(keep_dense=1) as pool:
        job = train(pool, 22, every=5)
        before = max(exact(pool))
        job.run.finish()
        assert max(exact(pool)) == before == 17
        points = [point.batch for point in pool.rewind_points()]
    facts = inspect(bench.path)
    assert facts["horizon_batches"] == facts["committed_batch"] - min(points)


def wide_run(pool):
    """A run whose undo frames have tens of kilobytes."""
    config = tcxl.EmbeddingBagConfig(
        name="t", num_embeddings=20_000, embedding_dim=16, feature_names=["x"]
    )
    bags = tcxl.EmbeddingBagCollection(pool, tables=[config], optimizer=tcxl.optim.SGD(lr=0.1))
    torch.manual_seed(0)
    model = torch.nn.Sequential(bags, torch.nn.Linear(16, 1))
    dense = torch.optim.Adam(model.parameters())
    return tcxl.FaultTolerantRun(pool, model, dense, dense_every=1, sparse_of=lambda ids: ids)


def test_the_horizon_gives_way_to_training(bench):
    """A ring for about 50 frames: training never waits, the points are those that it reaches."""
    with bench.open(log_bytes=2 << 20, keep_dense=14) as pool:
        run = wide_run(pool)
        for k in range(200):
            generator = torch.Generator().manual_seed(k)
            ids = torch.randint(0, 20_000, (500, 1), generator=generator)
            run.step(run.model(ids).square().sum())
        pool.core.wait_dense()
        reach = (2 << 20) / (run.stats.log_bytes / 200)
        points = pool.rewind_points()
        assert 0.8 * reach < len(points) <= reach
        found = [point.batches_back for point in points if point.is_exact]
        assert len(found) >= 13
        assert max(found) > len(points) / 2
        assert pool.core.facts()["ring_bytes"] == 2 << 20


def test_the_share_of_the_log(bench):
    """With "auto" the generations kept take at most a tenth of the undo log."""
    with bench.open() as pool:
        train(pool, 20)
        facts = pool.core.facts()
    assert facts["log_bytes"] <= (4 << 20) + (2 << 20) + facts["ring_bytes"]


def test_what_cannot_be_reached(bench):
    with bench.open(keep_dense=0) as pool:
        train(pool, 10)
    with bench.open() as pool:
        before = pool.digest()
        with pytest.raises(RecoveryError, match="batch 5 is no exact point: its tables could be"):
            pool.rewind(to=5)
        with pytest.raises(RecoveryError, match=r"(?s)batch 10 is no exact.*exact points: 9"):
            pool.rewind(to=10)
        with pytest.raises(RecoveryError, match="at least 2 batches before batch 10"):
            pool.rewind(batches=2)
        with pytest.raises(ValueError, match="either a number"):
            pool.rewind()
        assert pool.digest() == before
        train(pool, 11)
        with pytest.raises(PoolError, match=r"run\.rewind"):
            pool.rewind(batches=1)
    with pytest.raises(ValueError, match="keep_dense is 15"):
        bench.open(keep_dense=15)


def call(*arguments):
    result = CliRunner().invoke(main, [str(argument) for argument in arguments])
    return result.exit_code, result.output


def test_command(any_bench, whole):
    path = any_bench.path
    with any_bench.open() as pool:
        train(pool, 20)
    code, output = call("rewind", path, "--list", "--json")
    listed = json.loads(output)
    assert (code, listed["committed_batch"]) == (0, 20)
    assert [point["batch"] for point in listed["points"]] == list(range(19, -1, -1))
    assert {point["kind"] for point in listed["points"]} == {"exact", "tables only"}
    code, output = call("rewind", path, "--list")
    assert code == 0
    assert "tables only" in output
    assert "        19       1       1         7  exact" in output
    code, output = call("rewind", path, "--list", "--exact", "--json")
    exact = [point for point in listed["points"] if point["is_exact"]]
    assert (code, json.loads(output)["points"]) == (0, exact)
    assert call("rewind", path, "--exact", "--to", 3)[0] == 2
    assert call("rewind", path)[0] == 2
    assert call("rewind", path, "--to", 99)[0] == 1
    if any_bench.options:
        return  # the command would look for persistent memory
    code, output = call("rewind", path, "--batches", 5, "--json")
    assert code == 0
    assert json.loads(output)["from_batch"] == 20
    assert json.loads(output)["batch"] <= 15
    at = json.loads(output)["batch"]
    code, output = call("rewind", path, "--to", at, "--json")  # once more: there already
    assert (code, json.loads(output)["from_batch"], json.loads(output)["batch"]) == (0, at, at)
    with any_bench.open() as pool:
        train(pool)
        assert pool.digest() == whole


def train_and_rewind(pool, back_at, batches, *, loader=None, leave="break", until=BATCHES):
    """Trains to the end; at batch `back_at` it goes back once, from inside the loop."""
    job = Job(
        pool,
        state={"count": Counter()},
        dense_every=1,
        sparse_of=lambda ids: ids,
    )
    counter = job.run._state["count"]
    loader = loader or Data()
    went, seen = None, []
    for _ in job.run.epochs(-(-BATCHES // 12)):
        for ids in job.run.batches(loader):
            if job.run.committed_batch == back_at and went is None:
                went = job.run.rewind(batches)
                assert job.run.committed_batch == went <= back_at - batches
                if leave == "break":
                    break
                continue
            counter.count += 1
            seen.append(job.run.committed_batch)
            job.run.step(job.loss(ids, scale=1 + 0.1 * torch.rand(()).item()))
            assert counter.count == job.run.committed_batch
            pool.core.wait_dense()
    return went, seen


@pytest.mark.parametrize("leave", ["break", "continue"])
@pytest.mark.parametrize(("back_at", "batches"), [(9, 1), (20, 5), (20, 12), (13, 1), (12, 3)])
def test_in_a_loop(any_bench, whole, back_at, batches, leave):
    """Within an epoch, back over its start, and at its first batch."""
    with any_bench.open() as pool:
        went, seen = train_and_rewind(pool, back_at, batches, leave=leave)
        assert pool.digest() == whole
    assert seen == [*range(back_at), *range(went, BATCHES)]
    assert verify(any_bench.path) == []


class Stateful:
    """As torchdata's loaders: goes on from the state of the last batch consumed."""

    per_epoch = 12

    def __init__(self):
        self.epoch = self.next = 0

    def state_dict(self):
        return {"epoch": self.epoch, "next": self.next}

    def load_state_dict(self, state):
        self.epoch, self.next = state["epoch"], state["next"]

    def __iter__(self):
        if self.next == self.per_epoch:
            self.epoch, self.next = self.epoch + 1, 0
        while self.next < self.per_epoch:
            generator = torch.Generator().manual_seed(1000 * self.epoch + self.next)
            self.next += 1
            yield torch.randint(0, ROWS, (6, 2), generator=generator)


@pytest.mark.filterwarnings("ignore:this loader has no state_dict")
@pytest.mark.parametrize("kind", ["torch", "torch with a generator"])
@pytest.mark.parametrize(("back_at", "batches"), [(8, 2), (17, 9)])
def test_loaders_that_draw_from_generators(bench, kind, back_at, batches):
    """A torch DataLoader with shuffling is iterated anew and skipped to the place."""

    def loader():
        generator = torch.Generator().manual_seed(5) if "with" in kind else None
        data = torch.arange(144).reshape(72, 2) % ROWS
        return torch.utils.data.DataLoader(data, batch_size=6, shuffle=True, generator=generator)

    with bench.open(bench.folder / "whole.pool") as pool:
        train_and_rewind(pool, -1, 1, loader=loader())
        expected = pool.digest()
    with bench.open() as pool:
        went, _ = train_and_rewind(pool, back_at, batches, loader=loader())
        assert went is not None
        assert pool.digest() == expected


def test_bad_data_is_left_out(bench):
    """The loop of the docstring: back, and the bad batch is skipped when it comes again."""
    with bench.open() as pool:
        job = Job(pool, dense_every=1, sparse_of=lambda ids: ids)
        bad, order = set(), []
        for _ in job.run.epochs(1):
            for ids in job.run.batches(Data()):
                order.append(job.run.batch)
                if (job.run.epoch, job.run.batch) in bad:
                    job.run.skip()
                    continue
                if job.run.batch == 8:
                    bad.add((job.run.epoch, job.run.batch))
                    job.run.rewind(2)
                    break
                job.run.step(job.loss(ids))
                pool.core.wait_dense()
        assert order == [*range(9), *range(6, 12)]
        assert (job.run.committed_batch, job.run.finished) == (12, True)
        digest = pool.digest()
    with bench.open(bench.folder / "other.pool") as pool:
        job = Job(pool, dense_every=1, sparse_of=lambda ids: ids)
        for _ in job.run.epochs(1):
            for ids in job.run.batches(Data()):
                if job.run.batch == 8:
                    job.run.skip()
                else:
                    job.run.step(job.loss(ids))
        assert pool.digest() == digest


def test_a_rewind_that_is_refused_changes_nothing(bench, whole_process):
    with bench.open(keep_dense=0) as pool:
        job = Job(pool, state={"count": Counter()}, dense_every=1, sparse_of=lambda ids: ids)
        counter = job.run._state["count"]
        refused = 0
        for _ in job.run.epochs(2):
            for ids in job.run.batches(Data()):
                if job.run.committed_batch % 5 == 4:
                    with pytest.raises(RecoveryError, match="exact points: "):
                        job.run.rewind(4)
                    refused += 1
                counter.count += 1
                job.run.step(job.loss(ids, scale=1 + 0.1 * torch.rand(()).item()))
        assert refused == 4
        assert pool.digest() == whole_process


@pytest.fixture
def whole_process(bench):
    """As `whole`, of level process."""
    with bench.open(bench.folder / "whole.pool") as pool:
        train(pool)
        return pool.digest()


def test_rewind_while_a_snapshot_is_taken(bench):
    """The snapshot is completed first: it never holds rows of two batches."""
    with bench.open() as pool:
        job = train(pool, 15)
        expected = pool.digest()
        pool.snapshot(bench.folder / "copy", wait=False)
        job.run.rewind(4)
        assert pool.committed_batch <= 11
    with bench.open(bench.folder / "copy", read_only=True) as copy:
        assert copy.digest() == expected


def test_rewind_of_a_stateful_loader(bench):
    with bench.open(bench.folder / "whole.pool") as pool:
        train_and_rewind(pool, -1, 1, loader=Stateful())
        expected = pool.digest()
    with bench.open() as pool:
        train_and_rewind(pool, 17, 8, loader=Stateful())
        assert pool.digest() == expected
