"""FaultTolerantRun driven by hand: what is in a commit, what is not, and that errors cost
nothing.
"""

import math

import numpy as np
import pytest
import torch
from small_job import DIM, ROWS, Job, batches, data_bytes, dense_twin
from torch import nn

import trainingcxl as tcxl
from trainingcxl.errors import PoolError, PoolFull

# --- nothing before commit ----------------------------------------------------------------------


def test_nothing_changes_before_the_commit(any_bench):
    """Forward, backward and clipping leave every byte of the tables' file as it was."""
    pool = any_bench.open()
    job = Job(pool)
    before = data_bytes(pool)
    loss = job.loss(batches(1)[0])
    loss.backward()
    assert job.run.clip_grad_norm_(0.5) > 0.5
    job.dense.step()
    assert data_bytes(pool) == before
    assert pool.committed_batch == 0
    job.run.commit(step_dense=False)
    assert data_bytes(pool) != before
    assert pool.committed_batch == 1


def test_announced_batches_change_nothing(bench):
    """The undo log of later batches is written ahead; the tables' file is not touched by that."""
    pool = bench.open()
    job = Job(pool, sparse_of=lambda ids: ids)
    before = data_bytes(pool)
    feed = job.run.batches(batches(5))
    next(feed)
    pool.core.drop_announced()
    assert data_bytes(pool) == before
    feed.close()


@pytest.mark.parametrize("where", ["forward", "loss", "backward", "optimizer"])
def test_exception_in_the_middle_of_a_step(bench, where):
    """Whatever raises, the pool stays at the last commit; after skip() training goes on as
    without that batch.
    """
    data = batches(4)

    def train(path, faulty):
        pool = bench.open(path)
        job = Job(pool)
        for i, ids in enumerate(data):
            if i != 2:
                job.run.step(job.loss(ids))
                continue
            if not faulty:
                job.run.skip()
                continue
            before = data_bytes(pool)
            with pytest.raises(RuntimeError, match="planted"):
                step_that_fails(job, ids, where)
            assert data_bytes(pool) == before
            assert job.run.committed_batch == 2
            job.run.skip()
        return pool.digest()

    assert train(bench.folder / "a", False) == train(bench.folder / "b", True)


def step_that_fails(job, ids, where):
    def planted(*_):
        raise RuntimeError("planted")

    if where == "forward":
        handle = job.head.register_forward_hook(planted)
    elif where == "optimizer":
        handle = job.dense.register_step_pre_hook(planted)
    else:
        handle = None
    try:
        loss = job.loss(ids)
        if where == "loss":
            planted()
        if where == "backward":
            loss.register_hook(planted)
        job.run.step(loss)
    finally:
        if handle is not None:
            handle.remove()


def test_exception_without_skip_counts_the_batch_as_consumed(bench):
    """A loop that catches and goes on: the position covers the batch that was left out."""
    job = Job(bench.open(), sparse_of=lambda ids: ids)
    for i, ids in enumerate(job.run.batches(batches(4))):
        if i == 1:
            continue
        job.run.step(job.loss(ids))
    assert job.run.committed_batch == 3
    assert job.run.batch == 4


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_loss_that_is_not_finite(bench, bad):
    """step() refuses it before anything changes; skip() leaves the batch out; the dense part is
    as before.
    """
    job = Job(bench.open(), sparse_of=lambda ids: ids)
    head = job.head.weight.detach().clone()
    for i, ids in enumerate(job.run.batches(batches(3))):
        loss = job.loss(ids, scale=bad if i == 0 else 1.0)
        if i == 0:
            before = data_bytes(job.pool)
            with pytest.raises(ValueError, match=r"loss of batch 1 is .*(nan|inf)[\s\S]*run\.skip"):
                job.run.step(loss)
            job.run.skip()
            assert data_bytes(job.pool) == before
            assert torch.equal(job.head.weight, head)
            continue
        job.run.step(loss)
    assert (job.run.committed_batch, job.run.batch) == (3, 3)


def test_gradient_that_is_not_finite(bench):
    """A finite loss with a NaN gradient: named by feature, sample and column; nothing changes,
    also not the dense part.
    """
    job = Job(bench.open())
    ids = batches(1)[0]
    before, head = data_bytes(job.pool), job.head.weight.detach().clone()
    pooled = job.bags(ids)
    pooled.register_hook(
        lambda grad: grad.index_put((torch.tensor(3), torch.tensor(5)), torch.tensor(math.nan))
    )
    loss = job.head(pooled).sum()
    with pytest.raises(ValueError, match=r"feature 'y' is nan in sample 3 \(column 5\)"):
        job.run.step(loss)
    assert data_bytes(job.pool) == before
    assert torch.equal(job.head.weight, head)
    job.run.skip()
    job.run.step(job.loss(ids))
    assert job.run.committed_batch == 2


# --- steps by hand ------------------------------------------------------------------------------


def test_step_by_hand_equals_step(bench):
    """backward, commit, zero_grad in the user's loop give the bits of run.step."""
    digests = []
    for by_hand in (False, True):
        job = Job(bench.open(bench.folder / str(by_hand)))
        for ids in batches(5):
            if by_hand:
                job.dense.zero_grad()
                job.loss(ids).backward()
                job.run.commit()
                job.dense.zero_grad()
            else:
                job.run.step(job.loss(ids))
        digests.append(job.pool.digest())
    assert digests[0] == digests[1]


@pytest.mark.parametrize("max_norm", [0.05, 1e6])
def test_clipping_equals_a_dense_reference(bench, max_norm):
    """The norm is over summed row gradients and the dense part together, as torch computes it
    for a dense table.
    """
    job = Job(bench.open(), optimizer=tcxl.optim.SGD(lr=0.1), dense=False)
    table, head = dense_twin(job)
    job.run.dense_optimizer = torch.optim.SGD(job.head.parameters(), lr=0.1)
    theirs = torch.optim.SGD([*table.parameters(), *head.parameters()], lr=0.1)
    for ids in batches(5):
        job.loss(ids).backward()
        ours = job.run.clip_grad_norm_(max_norm)
        job.run.commit()
        job.head.zero_grad()
        theirs.zero_grad()
        (head(table(ids).flatten(1)) - 1.0).square().sum().backward()
        norm = nn.utils.clip_grad_norm_([*table.parameters(), *head.parameters()], max_norm)
        theirs.step()
        assert ours == pytest.approx(float(norm), rel=1e-5)
    np.testing.assert_allclose(job.weight, table.weight.detach().numpy(), rtol=0, atol=1e-6)
    torch.testing.assert_close(job.head.weight, head.weight, rtol=0, atol=1e-6)


def test_clipping_of_announced_batches(bench):
    """With the log written ahead the result is that of the same batches unannounced."""
    digests = []
    for announced in (False, True):
        options = {"sparse_of": lambda ids: ids} if announced else {}
        job = Job(bench.open(bench.folder / str(announced)), **options)
        for ids in job.run.batches(batches(6)):
            job.loss(ids).backward()
            job.run.clip_grad_norm_(0.1)
            job.run.commit()
            job.dense.zero_grad()
        assert (job.run.stats.unannounced_batches == 0) == announced
        digests.append(job.pool.digest())
    assert digests[0] == digests[1]


@pytest.mark.parametrize("announced", [False, True])
def test_accumulation_equals_one_big_batch(bench, announced):
    """k batches, one commit: rows equal those of the k batches in one, bit for bit; one commit
    counts k batches.
    """
    data = batches(6, size=4)
    one = Job(bench.open(bench.folder / "one"), dense=False)
    for i in (0, 3):
        one.run.step(one.loss(torch.cat(data[i : i + 3])))
    options = {"sparse_of": lambda ids: ids} if announced else {}
    many = Job(bench.open(bench.folder / "many"), dense=False, **options)
    for i, ids in enumerate(many.run.batches(data)):
        many.loss(ids).backward()
        if i % 3 == 2:
            many.run.commit()
            many.head.zero_grad()
            assert many.run.batch == i + 1
    assert many.run.committed_batch == 2
    np.testing.assert_array_equal(many.weight, one.weight)
    np.testing.assert_array_equal(many.pool.tables["t"].state, one.pool.tables["t"].state)


def test_left_over_gradients_at_the_end_of_an_epoch(bench):
    """7 batches, accumulated by 3: the last one must not slip into the next epoch's first
    commit.
    """
    job = Job(bench.open())

    def train():
        for _ in job.run.epochs(2):
            for i, ids in enumerate(job.run.batches(batches(7))):
                job.loss(ids).backward()
                if i % 3 == 2:
                    job.run.commit()
                    job.head.zero_grad()

    with pytest.raises(PoolError, match="in no commit"):
        train()
    assert job.run.committed_batch == 2
    job.run.commit()
    job.run._end_epoch()
    assert (job.run.epoch, job.run.batch) == (1, 0)


def test_gradients_shared_with_a_leaf_are_not_changed_later(bench):
    """Autograd may hand one buffer to the pooled rows and to a parameter that goes on
    accumulating.
    """
    job = Job(bench.open(), optimizer=tcxl.optim.SGD(lr=1.0), dense=False)
    before = job.weight.copy()
    bias = nn.Parameter(torch.zeros(1, 2 * DIM))
    ids = torch.tensor([[1, 2]])
    (job.bags(ids) + bias).sum().backward()
    bias.grad.mul_(100.0)
    (bias * 5.0).sum().backward()
    job.run.commit()
    np.testing.assert_allclose((before - job.weight)[1:3], 1.0, rtol=1e-6)


def test_other_batch_than_announced(bench):
    """The batch is changed after it was announced: logged at the commit, counted, said once, and
    right.
    """
    plain = Job(bench.open(bench.folder / "plain"))
    other = Job(bench.open(bench.folder / "other"), sparse_of=lambda ids: ids)
    data, used = (
        batches(6),
        [(ids + 1) % ROWS if i % 2 else ids for i, ids in enumerate(batches(6))],
    )
    for ids in used:
        plain.run.step(plain.loss(ids))
    for i, _ in enumerate(other.run.batches(data)):
        other.run.step(other.loss(used[i]))
    assert other.run.stats.unannounced_batches == 3
    assert sum("announced" in text for text in other.run.notices) == 1
    assert np.array_equal(plain.weight, other.weight)


def test_forward_of_the_next_batch_before_the_step(bench):
    """Lookups of a later announced batch in the step of an earlier one do not confuse the log."""
    job = Job(bench.open(), sparse_of=lambda ids: ids)
    data = batches(5)
    with torch.no_grad():
        for i, ids in enumerate(job.run.batches(data)):
            with torch.enable_grad():
                loss = job.loss(ids)
            if i + 1 < len(data):
                job.model(data[i + 1])
            with torch.enable_grad():
                job.run.step(loss)
    twin = Job(bench.open(bench.folder / "twin"))
    for ids in data:
        twin.run.step(twin.loss(ids))
    assert np.array_equal(job.weight, twin.weight)
    assert job.run.stats.unannounced_batches == 0


def test_batches_announced_with_a_bad_index(bench):
    """F1: the error comes where the batch is used, not one batch early."""
    job = Job(bench.open(), sparse_of=lambda ids: ids)
    data = batches(4)
    data[2] = data[2].clone()
    data[2][1, 0] = ROWS
    seen = 0
    for ids in job.run.batches(data):
        if seen == 2:
            with pytest.raises(IndexError, match=f"index {ROWS} "):
                job.run.step(job.loss(ids))
            job.run.skip()
        else:
            job.run.step(job.loss(ids))
        seen += 1
    assert (seen, job.run.committed_batch) == (4, 4)


def test_leaving_the_loop_early(bench):
    """break with batches announced ahead, then another loop: nothing of the dropped ones is
    applied.
    """
    job = Job(bench.open(), sparse_of=lambda ids: ids)
    data = batches(8)
    for i, ids in enumerate(job.run.batches(data)):
        job.run.step(job.loss(ids))
        if i == 2:
            break
    assert job.run.batch == 3
    twin = Job(bench.open(bench.folder / "twin"))
    for ids in data[:3]:
        twin.run.step(twin.loss(ids))
    assert np.array_equal(job.weight, twin.weight)


def test_pool_closed_inside_the_loop(bench):
    """An exception that closes the pool while a batch is in use is the only thing that is
    raised.
    """

    def job_that_fails():
        with bench.open() as pool:
            job = Job(pool, sparse_of=lambda ids: ids)
            for ids in job.run.batches(batches(4)):
                job.run.step(job.loss(ids))
                if pool.committed_batch == 2:
                    raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        job_that_fails()
    with bench.open() as pool:
        assert pool.committed_batch == 2


def test_limits_on_a_batch(bench):
    """Contract 3: larger than rows_per_batch_max or than the log: refused before anything, dense
    part included.
    """
    for i, options in enumerate(({"rows_per_batch_max": 3}, {"log_bytes": 4096})):
        job = Job(bench.open(bench.folder / str(i), **options))
        small, large = torch.tensor([[1, 2]]), torch.arange(2 * ROWS).reshape(-1, 2) % ROWS
        job.run.step(job.loss(small))
        before, head = data_bytes(job.pool), job.head.weight.detach().clone()
        with pytest.raises(PoolFull, match="do:"):
            job.run.step(job.loss(large))
        assert data_bytes(job.pool) == before
        assert torch.equal(job.head.weight, head)
        job.run.skip()
        job.run.step(job.loss(small))
        assert job.run.committed_batch == 3


def test_growing_batches_grow_the_log(bench):
    """Without limits the log follows the batches; frames in the old ring still roll back."""
    pool = bench.open()
    job = Job(pool, dense_every=50)
    tables = {}
    for i in range(1, 30):
        job.run.step(job.loss(torch.arange(2 * i).reshape(-1, 2) % ROWS))
        tables[i] = job.weight.copy()
    with bench.open(bench.image()) as again:
        assert np.array_equal(
            again.tables["t"].weight, tables.get(again.committed_batch, tables[1])
        ) or (again.committed_batch == 0)
        assert again.recovery.committed_batch == 29
