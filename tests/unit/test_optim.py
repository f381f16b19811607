"""Row optimizers against references: a wrong update trains another model, and no crash test
would notice.
"""

import numpy as np
import pytest
import torch
from torch import nn

import trainingcxl as tcxl
from trainingcxl import _core

ROWS, DIM, BATCH = 50, 9, 16
KINDS = {
    "sgd": lambda lr: tcxl.optim.SGD(lr=lr),
    "adagrad": lambda lr: tcxl.optim.Adagrad(lr=lr),
    "rowwise-adagrad": lambda lr: tcxl.optim.RowWiseAdagrad(lr=lr),
}


def make(bench, optimizer, *, path=None, threads=1, pooling="sum", dim=DIM):
    pool = bench.open(path, threads=threads)
    config = tcxl.EmbeddingBagConfig(
        name="t", num_embeddings=ROWS, embedding_dim=dim, feature_names=["f"], pooling=pooling
    )
    bags = tcxl.EmbeddingBagCollection(pool, tables=[config], optimizer=optimizer)
    return pool, bags, tcxl.FaultTolerantRun(pool, bags)


def batches(count, seed=0, rows=ROWS):
    """Skewed ids, so that rows repeat within a bag, within a batch and from batch to batch."""
    rng = np.random.default_rng(seed)
    for _ in range(count):
        lengths = rng.integers(0, 5, BATCH)
        ids = (rng.random(lengths.sum()) ** 3 * rows).astype(np.int64)
        target = rng.standard_normal((BATCH, DIM)).astype(np.float32)
        yield torch.from_numpy(ids), torch.from_numpy(lengths), torch.from_numpy(target)


@pytest.mark.parametrize("pooling", ["sum", "mean"])
def test_row_wise_adagrad_equals_numpy(bench, pooling):
    """s += mean(g * g); w -= lr / (sqrt(s) + eps) * g, g summed over the row's lookups."""
    lr, eps = 0.1, 1e-8
    pool, bags, run = make(bench, tcxl.optim.RowWiseAdagrad(lr=lr, eps=eps), pooling=pooling)
    weight, state = pool.tables["t"].weight.astype(np.float64), np.zeros(ROWS)
    for ids, lengths, target in batches(30):
        features = tcxl.SparseFeatures(["f"], ids, lengths=lengths)
        run.step((bags(features) * target).sum())
        grad = np.zeros((ROWS, DIM))
        bag = np.repeat(np.arange(BATCH), lengths)
        scale = 1 / np.maximum(lengths.numpy(), 1) if pooling == "mean" else np.ones(BATCH)
        np.add.at(grad, ids.numpy(), (target.numpy() * scale[:, None])[bag])
        touched = np.unique(ids)
        state[touched] += (grad[touched] ** 2).mean(axis=1)
        weight[touched] -= lr / (np.sqrt(state[touched, None]) + eps) * grad[touched]
    np.testing.assert_allclose(pool.tables["t"].weight, weight, rtol=0, atol=1e-6)
    np.testing.assert_allclose(pool.tables["t"].state[:, 0], state, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("pooling", ["sum", "mean"])
@pytest.mark.parametrize("kind", ["sgd", "adagrad"])
def test_others_equal_the_dense_module_with_torchs_optimizer(bench, kind, pooling):
    """nn.EmbeddingBag + torch.optim.SGD / Adagrad, within 1e-6 after 30 batches."""
    pool, bags, run = make(bench, KINDS[kind](0.05), pooling=pooling)
    twin = nn.EmbeddingBag(ROWS, DIM, mode=pooling, include_last_offset=True)
    with torch.no_grad():
        twin.weight.copy_(torch.from_numpy(pool.tables["t"].weight.copy()))
    theirs = (torch.optim.SGD if kind == "sgd" else torch.optim.Adagrad)(twin.parameters(), lr=0.05)
    for ids, lengths, target in batches(30):
        features = tcxl.SparseFeatures(["f"], ids, lengths=lengths)
        run.step((bags(features) * target).sum())
        theirs.zero_grad()
        (twin(ids, features.offsets) * target).sum().backward()
        theirs.step()
    np.testing.assert_allclose(
        pool.tables["t"].weight, twin.weight.detach().numpy(), rtol=0, atol=1e-6
    )
    if kind == "adagrad":
        state = theirs.state[twin.weight]["sum"].numpy()
        np.testing.assert_allclose(pool.tables["t"].state, state, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_equal_bits_for_any_threads_and_vector_width(bench, kind):
    """A10: two fresh runs with many duplicate ids, on 1, 2 and 3 threads and each vector width."""
    digests = set()
    before = _core.isa()
    try:
        for isa in ("scalar", "avx2", "avx512"):
            if not _core.use_isa(isa):
                continue
            for threads in (1, 2, 3):
                path = bench.folder / f"{isa}{threads}.pool"
                pool, bags, run = make(bench, KINDS[kind](0.1), path=path, threads=threads)
                for ids, lengths, target in batches(15):
                    features = tcxl.SparseFeatures(["f"], ids, lengths=lengths)
                    run.step((bags(features).tanh() * target).sum())
                digests.add(pool.digest())
                pool.close()
    finally:
        _core.use_isa(before)
    assert len(digests) == 1


def test_five_hundred_batches_repeat(bench):
    """A10: two runs of 500 batches with background logging give one digest."""
    digests = set()
    for i, threads in enumerate((1, 2)):
        path = bench.folder / f"{i}.pool"
        pool, bags, run = make(bench, KINDS["rowwise-adagrad"](0.1), path=path, threads=threads)
        data = [
            (tcxl.SparseFeatures(["f"], ids, lengths=lengths), target)
            for ids, lengths, target in batches(500, rows=20)
        ]
        run._sparse_of = lambda batch: batch[0]
        for features, target in run.batches(data):
            run.step((bags(features).tanh() * target).sum())
        assert run.stats.unannounced_batches == 0
        digests.add(pool.digest())
        pool.close()
    assert len(digests) == 1


def test_schedulers_drive_the_learning_rate(bench):
    """Every torch scheduler works on the row optimizer; a changed lr holds from the next commit
    on.
    """
    optimizer = tcxl.optim.SGD(lr=1.0)
    pool, bags, run = make(bench, optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    before = pool.tables["t"].weight[3].copy()
    for _ in range(3):
        run.step(bags(torch.tensor([[3]])).sum())
        scheduler.step()
    np.testing.assert_allclose(before - pool.tables["t"].weight[3], 1.75, rtol=1e-6)


def test_rows_that_are_not_looked_up_keep_their_bits(bench):
    """Weight decay by accident, a stray write: neither touches the other rows or their state."""
    for kind, make_optimizer in KINDS.items():
        pool, bags, run = make(bench, make_optimizer(0.1), path=bench.folder / f"{kind}.pool")
        weight, state = pool.tables["t"].weight.copy(), pool.tables["t"].state.copy()
        run.step(bags(torch.tensor([[7], [7], [30]])).sum())
        changed = (pool.tables["t"].weight != weight).any(axis=1)
        assert np.flatnonzero(changed).tolist() == [7, 30]
        changed = (pool.tables["t"].state != state).any(axis=1) if state.size else np.zeros(ROWS)
        assert np.flatnonzero(changed).tolist() in ([7, 30], [])


def test_zero_learning_rate(bench):
    """lr 0 changes state, never weights; and is no error."""
    pool, bags, run = make(bench, tcxl.optim.RowWiseAdagrad(lr=0.0))
    before = pool.tables["t"].weight.copy()
    run.step(bags(torch.tensor([[7]])).sum())
    assert np.array_equal(pool.tables["t"].weight, before)
    assert pool.tables["t"].state[7, 0] == 1.0


@pytest.mark.parametrize("wrong", [-1.0, float("nan")])
def test_bad_settings(wrong):
    """Refused where they are given."""
    for kind in (tcxl.optim.SGD, tcxl.optim.Adagrad, tcxl.optim.RowWiseAdagrad):
        with pytest.raises(ValueError, match="lr"):
            kind(lr=wrong)
    for kind in (tcxl.optim.Adagrad, tcxl.optim.RowWiseAdagrad):
        with pytest.raises(ValueError, match="eps"):
            kind(lr=0.1, eps=wrong)
