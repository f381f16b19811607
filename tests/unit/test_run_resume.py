"""FaultTolerantRun and its pool: one run a pool, what must fit on resume, what is said and when."""

import io

import pytest
import torch
from small_job import DIM, ROWS, Counter, Job, batches, data_bytes
from torch import nn

import trainingcxl as tcxl
from trainingcxl.errors import ConfigError, PoolError, PoolFull, RecoveryError

# --- one run, one pool --------------------------------------------------------------------------


def test_a_pool_has_one_run(bench):
    """A second run would restore the state of the opening over rows that have moved on."""
    for _ in range(2):
        pool = bench.open()
        job = Job(pool)
        job.run.step(job.loss(batches(1)[0]))
        with pytest.raises(PoolError, match="already has a run"):
            tcxl.FaultTolerantRun(pool, job.model, job.dense)
        pool.close()
    assert bench.open().committed_batch == 2


def test_settings_are_compared_as_they_are_read_back(bench):
    """Tuples and integer keys survive JSON as lists and strings: no false alarm; a change is
    refused with both values.
    """
    settings = {"layers": (8, 4), "sizes": {1: 2}, "lr": 0.1}
    job = Job(bench.open(), settings=settings)
    job.pool.close()
    job = Job(bench.open(), settings=settings)
    job.pool.close()
    with pytest.raises(ConfigError, match=r"lr: the pool has 0\.1, this run has 0\.2"):
        Job(bench.open(), settings={**settings, "lr": 0.2})


def test_resume_with_another_model_is_refused(bench):
    """B11: missing and unused entries are listed; nothing is dropped in silence."""
    job = Job(bench.open(), state={"counter": Counter()})
    job.run.step(job.loss(batches(1)[0]))
    job.pool.close()
    pool = bench.open()
    config = tcxl.EmbeddingBagConfig(
        name="t", num_embeddings=ROWS, embedding_dim=DIM, feature_names=["x", "y"]
    )
    bags = tcxl.EmbeddingBagCollection(
        pool, tables=[config], optimizer=tcxl.optim.RowWiseAdagrad(lr=0.1)
    )
    good = nn.Sequential(bags, nn.Linear(2 * DIM, 1))
    adam = torch.optim.Adam(good.parameters())
    counter = {"counter": Counter()}
    wrong = [
        (nn.Sequential(bags, nn.Linear(2 * DIM, 1, bias=False)), adam, counter, "1.bias"),
        (nn.Sequential(bags, nn.Linear(2 * DIM, 1), nn.Linear(1, 1)), adam, counter, "2.weight"),
        (nn.Sequential(bags, nn.Linear(2 * DIM, 2)), adam, counter, "size mismatch"),
        (good, None, counter, "dense optimizer"),
        (good, adam, {}, "counter"),
        (good, adam, {**counter, "more": Counter()}, "more"),
        (good, torch.optim.Adam([{"params": [p]} for p in good.parameters()]), counter, "not fit"),
    ]
    for model, optimizer, state, word in wrong:
        with pytest.raises(RecoveryError, match=word):
            tcxl.FaultTolerantRun(pool, model, optimizer, state=state)
    assert tcxl.FaultTolerantRun(pool, good, adam, state=counter).committed_batch == 1


def test_restored_before_any_step(bench):
    """B11: state that optimizers create in their first step is there in a process that takes
    none.
    """
    job = Job(bench.open())
    for ids in batches(3):
        job.run.step(job.loss(ids))
    adam = job.dense.state_dict()
    job.pool.close()
    for _ in range(2):  # resumed, no step taken, closed; and again
        job = Job(bench.open(), seed=5)
        restored = job.dense.state_dict()
        assert restored["state"].keys() == adam["state"].keys()
        for i, entry in adam["state"].items():
            for name, tensor in entry.items():
                assert torch.equal(restored["state"][i][name], tensor)
        job.pool.close()


def test_evaluation_from_a_read_only_pool(bench):
    """B6: the dense part is restored too, without optimizer or state objects; the files stay as
    they are.
    """
    job = Job(bench.open(), state={"counter": Counter()})
    for ids in batches(3):
        job.run.step(job.loss(ids))
    with torch.no_grad():
        expected = job.model(batches(1)[0])
    job.pool.close()
    before = data_bytes(job.pool), (job.pool.path / "log").read_bytes()
    with bench.open(read_only=True) as pool:
        config = tcxl.EmbeddingBagConfig(
            name="t", num_embeddings=ROWS, embedding_dim=DIM, feature_names=["x", "y"]
        )
        bags = tcxl.EmbeddingBagCollection(pool, tables=[config], optimizer=None)
        model = nn.Sequential(bags, nn.Linear(2 * DIM, 1))
        run = tcxl.FaultTolerantRun(pool, model)
        with torch.no_grad():
            assert torch.equal(model(batches(1)[0]), expected)
        assert run.committed_batch == 3
    assert (data_bytes(job.pool), (job.pool.path / "log").read_bytes()) == before


def test_a_state_object_too_large_for_the_record(bench):
    """Refused when the run is made, with the limit, and the pool can still be used."""
    large = Counter()
    large.count = "x" * 100_000
    pool = bench.open()
    with pytest.raises(PoolFull, match="65536"):
        Job(pool, state={"large": large})
    pool.close()
    assert Job(bench.open()).run.committed_batch == 0


def test_a_loader_state_too_large_for_the_record(bench):
    """Refused before the first step, not by the commit after it."""

    class Heavy(list):
        def state_dict(self):
            return {"order": list(range(20_000))}

        def load_state_dict(self, state):
            del state

    job = Job(bench.open())
    before = data_bytes(job.pool)

    def train():
        for ids in job.run.batches(Heavy(batches(3))):
            job.run.step(job.loss(ids))

    with pytest.raises(PoolFull, match="loader's state has"):
        train()
    assert job.run.committed_batch == 0
    assert data_bytes(job.pool) == before
    job.pool.close()


def test_state_changed_after_the_commit_is_noticed(bench):
    """A counter that the loop raises after run.step is one behind after a kill: said once, by
    name.
    """
    counter, before = Counter(), Counter()
    job = Job(bench.open(), state={"late": counter, "early": before})
    for ids in job.run.batches(batches(4)):
        before.count += 1
        job.run.step(job.loss(ids))
        counter.count += 1
    late = [text for text in job.run.notices if "after the commit" in text]
    assert len(late) == 1
    assert "'late'" in late[0]


def test_sync_writes_the_dense_part_of_the_commit(bench):
    """After sync() resume has nothing to do again, whatever dense_every says."""
    job = Job(bench.open(), dense_every=50)
    for ids in batches(7):
        job.run.step(job.loss(ids))
    job.run.sync()
    with bench.open(bench.image()) as again:
        assert again.recovery.batches_to_redo == 0
        assert again.committed_batch == 7


def test_half_a_step_is_not_written_by_close(bench):
    """The dense optimizer has stepped, the commit has not come: that dense part is no recovery
    point.
    """
    job = Job(bench.open(), dense_every=50)
    for ids in batches(3):
        job.run.step(job.loss(ids))
    job.loss(batches(1)[0]).backward()
    job.dense.step()
    with pytest.raises(PoolError, match="stepped beyond"):
        job.run.sync()
    with pytest.raises(PoolError, match="no longer be skipped"):
        job.run.skip()
    job.pool.close()
    assert bench.open().recovery.batches_to_redo == 3


@pytest.mark.parametrize("wrong", [0, -1, 1001, 1.5, "often", None])
def test_wrong_dense_every(bench, wrong):
    """Refused with the value and the range."""
    with pytest.raises(ValueError, match=r"dense_every.*1000"):
        Job(bench.open(), dense_every=wrong)


@pytest.mark.parametrize("width", [1, 100_000])
def test_auto_dense_every(bench, width):
    """The cost of the dense part is bounded; training is the same whatever is chosen."""
    job = Job(bench.open())
    job.model.register_buffer("ballast", torch.zeros(width))
    for ids in job.run.batches(batches(12)):
        job.run.step(job.loss(ids))
    assert 1 <= job.run.dense_every <= 1000
    assert job.run.stats.dense_bytes > 0


def test_what_is_said_at_the_start(bench):
    """D12: where and how often training is durable can be read off the run."""
    job = Job(bench.open(), dense_every=3)
    assert job.run.pool.path == bench.path
    assert job.run.dense_every == 3
    out = io.StringIO()
    print(job.pool, file=out)
    assert "process on tmpfs" in out.getvalue()
