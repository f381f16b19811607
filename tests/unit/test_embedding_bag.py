"""EmbeddingBag against torch.nn.EmbeddingBag: one meaning for every form of input, equal or clearer
errors. A module that differs silently trains another model than the user wrote.
"""

import itertools

import numpy as np
import pytest
import torch
from torch import nn

import trainingcxl as tcxl

ROWS, DIM = 13, 6


def make(bench, *, name="t", rows=ROWS, dim=DIM, optimizer=None, pool=None, **options):
    pool = pool or bench.open()
    optimizer = optimizer or tcxl.optim.SGD(lr=0.1)
    bag = tcxl.EmbeddingBag(pool, rows, dim, name=name, optimizer=optimizer, **options)
    return pool, bag


def dense_twin(pool, bag, **options):
    """torch's module with the same weights."""
    config = bag.configs[0]
    twin = nn.EmbeddingBag(config.num_embeddings, config.embedding_dim, mode=bag.mode, **options)
    with torch.no_grad():
        twin.weight.copy_(torch.from_numpy(pool.tables[config.name].weight.copy()))
    return twin


def train_step(pool, bag, pooled, target):
    """One commit of the bag's rows alone."""
    run = tcxl.FaultTolerantRun(pool, nn.Module())
    run.step((pooled() * target).sum())
    return run


CALLS = {
    "offsets": lambda: (torch.tensor([0, 3, 3, 12, 5, 1]), torch.tensor([0, 2, 2, 5]), None),
    "empty first and last": lambda: (torch.tensor([4, 4, 2]), torch.tensor([0, 0, 2, 3, 3]), None),
    "two dimensions": lambda: (torch.tensor([[1, 2, 3], [4, 4, 4]]), None, None),
    "no indices": lambda: (torch.zeros(0, dtype=torch.int64), torch.tensor([0, 0, 0]), None),
    "no bags": lambda: (torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64), None),
    "strided": lambda: (
        torch.arange(24).reshape(12, 2)[:6, 0],
        torch.arange(12)[::3].clone() // 3,
        None,
    ),
    "weights": lambda: (
        torch.tensor([0, 3, 3, 12, 5]),
        torch.tensor([0, 2, 2, 4]),
        torch.tensor([0.5, -1.0, 2.0, 0.0, 3.0]),
    ),
    "weights in two dimensions": lambda: (
        torch.tensor([[1, 2], [2, 2]]),
        None,
        torch.tensor([[0.5, -1.0], [2.0, 0.25]]),
    ),
}


@pytest.mark.parametrize("padding", [None, 3, -1, 0])
@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("call", CALLS)
def test_forward_and_update_equal_torch(bench, call, mode, padding):
    """F5: the output, and the rows after one SGD step, are those of the dense module; empty bags
    give zeros.
    """
    input, offsets, weights = CALLS[call]()
    if weights is not None and mode != "sum":
        with pytest.raises(ValueError, match="mode 'sum'"):
            make(bench, mode=mode)[1](input, offsets, weights)
        return
    pool, bag = make(bench, mode=mode, padding_idx=padding)
    twin = dense_twin(pool, bag, padding_idx=padding)
    expected = twin(input, offsets, weights)
    pooled = bag(input, offsets, weights)
    assert pooled.shape == expected.shape
    torch.testing.assert_close(pooled, expected, rtol=0, atol=1e-6)
    target = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    (expected * target).sum().backward()
    run = train_step(pool, bag, lambda: bag(input, offsets, weights), target)
    assert run.committed_batch == 1
    with torch.no_grad():
        wanted = (
            twin.weight - 0.1 * twin.weight.grad if twin.weight.grad is not None else twin.weight
        )
    np.testing.assert_allclose(pool.tables["t"].weight, wanted.numpy(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_bags_of_length_zero(bench, mode):
    """F5: (B, 0) input, which torch cannot take, is B empty bags."""
    pool, bag = make(bench, mode=mode)
    empty = torch.zeros(3, 0, dtype=torch.int64)
    assert torch.equal(bag(empty), torch.zeros(3, DIM))
    before = pool.tables["t"].weight.copy()
    run = train_step(pool, bag, lambda: bag(empty), torch.ones(3, DIM))
    assert run.committed_batch == 1
    assert run.stats.rows == 0
    assert np.array_equal(pool.tables["t"].weight, before)


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_include_last_offset_equals_torch(bench, mode):
    """The same bags, written with and without the final offset, are the same bags."""
    input = torch.tensor([0, 3, 3, 12, 5, 1])
    pool, bag = make(bench, mode=mode, include_last_offset=True)
    twin = dense_twin(pool, bag, include_last_offset=True)
    for offsets in ([0, 2, 2, 6], [0, 6], [0, 0, 6, 6]):
        with torch.no_grad():
            ours, torchs = bag(input, torch.tensor(offsets)), twin(input, torch.tensor(offsets))
        torch.testing.assert_close(ours, torchs, rtol=0, atol=1e-6)
    with torch.no_grad():
        assert bag(torch.zeros(0, dtype=torch.int64), torch.tensor([0])).shape == (0, DIM)


@pytest.mark.parametrize(
    ("ids", "places"), [*itertools.product([torch.int32, torch.int64], repeat=2)]
)
def test_all_integer_widths_give_the_same(bench, ids, places):
    """F10: int32 and int64 indices and offsets in all four combinations."""
    _, bag = make(bench, mode="sum")
    input, offsets = torch.tensor([0, 3, 3, 12]), torch.tensor([0, 1, 4])
    with torch.no_grad():
        assert torch.equal(bag(input.to(ids), offsets.to(places)), bag(input, offsets))


@pytest.mark.parametrize("dtype", [torch.float32, torch.int16, torch.bool, torch.uint8])
def test_other_index_types_are_refused(bench, dtype):
    """A float index cut to an integer would look up the wrong row."""
    _, bag = make(bench)
    with pytest.raises(TypeError, match="int64 or int32"):
        bag(torch.zeros(2).to(dtype), torch.tensor([0]))
    with pytest.raises(TypeError, match="int64 or int32"):
        bag(torch.tensor([0, 1]), torch.tensor([0.0]).to(dtype))


@pytest.mark.parametrize("value", [ROWS, 100, -1, -(2**63), 2**63 - 1])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_index_beyond_the_table(bench, value, place):
    """F1, F3: below or beyond the table, the error names table, sample, position, value and
    range; nothing changes.
    """
    pool, bag = make(bench, name="ads")
    before = bench.image()
    ids = torch.tensor([0, 2, 5])
    ids[place] = value
    with pytest.raises(IndexError) as error:
        bag(ids, torch.tensor([0, 1]))
    text = str(error.value)
    assert f"index {value} " in text
    assert f"sample {min(place, 1)} " in text
    assert f"position {place} " in text
    assert "'ads'" in text
    assert f"[0, {ROWS})" in text
    assert (before / "data").read_bytes() == (bench.path / "data").read_bytes()
    assert pool.transaction.parts == []


def test_int32_index_beyond_the_table(bench):
    """F3: the 32-bit path checks too."""
    _, bag = make(bench)
    for value in (-1, -(2**31), 2**31 - 1, ROWS):
        with pytest.raises(IndexError, match=f"index {value} "):
            bag(torch.tensor([value], dtype=torch.int32), torch.tensor([0]))


@pytest.mark.parametrize(
    ("offsets", "last"),
    [
        ([1, 2], False),
        ([0, 5, 3], False),
        ([0, 6], False),
        ([-1, 2], False),
        ([0, -1], False),
        ([0, 2**40], False),
        ([2**63 - 1], False),
        ([0, 2], True),
        ([1, 5], True),
        ([0, 9], True),
        ([0, 3, 2, 5], True),
    ],
)
def test_bad_offsets(bench, offsets, last):
    """F4: an error before any read, never a value from elsewhere in memory."""
    _, bag = make(bench, include_last_offset=last)
    for dtype in (torch.int64, torch.int32):
        if max(map(abs, offsets)) >= 2**31 and dtype == torch.int32:
            continue
        with pytest.raises(ValueError, match="offset"):
            bag(torch.arange(5), torch.tensor(offsets, dtype=dtype))


def test_offsets_of_the_wrong_shape(bench):
    """F4: forms of the call that torch refuses as well."""
    _, bag = make(bench)
    ids = torch.arange(4)
    for wrong in (
        (ids, None),
        (ids, torch.zeros(1, 1, dtype=torch.int64)),
        (ids.reshape(2, 2), torch.tensor([0])),
        (ids.reshape(1, 2, 2), None),
        (ids, torch.zeros(0, dtype=torch.int64)),
        (torch.tensor(3), None),
    ):
        with pytest.raises(ValueError, match=r"offsets|shape|bags"):
            bag(*wrong)
    last = tcxl.EmbeddingBag(
        bag.pool, 5, 2, name="last", optimizer=tcxl.optim.SGD(lr=1), include_last_offset=True
    )
    with pytest.raises(ValueError, match="at least one"):
        last(torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64))


def test_weights_of_the_wrong_shape_or_type(bench):
    """A weight for another lookup would scale the wrong row."""
    _, bag = make(bench, mode="sum")
    ids, offsets = torch.arange(4), torch.tensor([0])
    for wrong in (
        torch.ones(3),
        torch.ones(4, dtype=torch.float64),
        torch.ones(4, dtype=torch.int64),
        torch.ones(2, 2),
    ):
        with pytest.raises(ValueError, match="per_sample_weights"):
            bag(ids, offsets, wrong)


def test_gradient_of_per_sample_weights(bench):
    """F11: the weights' gradient is the dense module's, with the rows trained or frozen."""
    input, offsets = torch.tensor([0, 3, 3, 12, 5]), torch.tensor([0, 2, 2, 4])
    pool, bag = make(bench, mode="sum", dim=17)
    twin = dense_twin(pool, bag)
    target = torch.randn(4, 17, generator=torch.Generator().manual_seed(2))
    for frozen in (False, True):
        bag.requires_grad_(not frozen)
        ours = torch.tensor([0.5, -1.0, 2.0, 0.0, 3.0], requires_grad=True)
        theirs = ours.detach().clone().requires_grad_()
        (bag(input, offsets, ours) * target).sum().backward()
        (twin(input, offsets, theirs) * target).sum().backward()
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=1e-6)
        assert len(pool.transaction.parts) == (0 if frozen else 1)
        pool.transaction.clear()


def test_ids_changed_after_forward(bench):
    """F11: the ids of the forward pass are the ones whose rows change."""
    pool, bag = make(bench)
    run = tcxl.FaultTolerantRun(pool, nn.Module())
    before = pool.tables["t"].weight.copy()
    ids, offsets = torch.tensor([1, 2]), torch.tensor([0, 1])
    pooled = bag(ids, offsets)
    ids.fill_(7)
    offsets.fill_(0)
    run.step(pooled.sum())
    changed = np.flatnonzero((pool.tables["t"].weight != before).any(axis=1))
    assert changed.tolist() == [1, 2]


def test_frozen_rows_do_not_change(bench):
    """F11: a frozen module looks up as before; commits leave its rows alone and still advance."""
    pool, bag = make(bench)
    bag.requires_grad_(False)
    head = nn.Linear(DIM, 1)
    run = tcxl.FaultTolerantRun(pool, head, torch.optim.SGD(head.parameters(), lr=0.1))
    before, dense = pool.tables["t"].weight.copy(), head.weight.detach().clone()
    pooled = bag(torch.tensor([1, 2]), torch.tensor([0, 1]))
    assert not pooled.requires_grad
    run.step(head(pooled).sum())
    assert run.committed_batch == 1
    assert np.array_equal(pool.tables["t"].weight, before)
    assert not torch.equal(head.weight, dense)


@pytest.mark.parametrize("dim", [1, 3, 7, 16, 1024])
def test_any_dimension(bench, dim):
    """C9: dimension 1 (wide models), odd ones and large ones."""
    pool, bag = make(
        bench, dim=dim, rows=5, mode="sum", optimizer=tcxl.optim.RowWiseAdagrad(lr=0.1)
    )
    twin = dense_twin(pool, bag)
    ids, offsets = torch.tensor([0, 4, 4, 2]), torch.tensor([0, 3])
    torch.testing.assert_close(bag(ids, offsets), twin(ids, offsets), rtol=0, atol=1e-6)
    train_step(pool, bag, lambda: bag(ids, offsets), torch.ones(2, dim))
    assert pool.tables["t"].weight.shape == (5, dim)
    assert np.isfinite(pool.tables["t"].weight).all()


def test_one_row(bench):
    """A table of one row is a table."""
    pool, bag = make(bench, rows=1, mode="mean")
    train_step(
        pool,
        bag,
        lambda: bag(torch.zeros(4, dtype=torch.int64), torch.tensor([0, 2])),
        torch.ones(2, DIM),
    )
    assert pool.committed_batch == 1


def test_arguments_are_checked(bench):
    """What can't work is refused when the module is made, not at batch 1000."""
    pool = bench.open()
    for wrong in ({"mode": "max"}, {"padding_idx": ROWS}, {"padding_idx": -ROWS - 1}):
        with pytest.raises(ValueError, match=r"pooling|padding_idx"):
            make(bench, pool=pool, **wrong)
    for rows, dim in ((0, 4), (-1, 4), (4, 0)):
        with pytest.raises(ValueError, match="1 or more"):
            make(bench, pool=pool, rows=rows, dim=dim)
    with pytest.raises(TypeError, match=r"trainingcxl\.optim"):
        make(bench, pool=pool, optimizer=torch.optim.SGD([torch.zeros(1)], lr=0.1))
    assert pool.tables == {}


def test_pooled_rows_need_no_gradient_in_evaluation(bench):
    """B6: no_grad and eval forward leave nothing in the transaction."""
    pool, bag = make(bench)
    with torch.no_grad():
        assert not bag(torch.tensor([1]), torch.tensor([0])).requires_grad
    assert not pool.transaction.has_forward


def test_float_settings_of_the_caller_do_not_matter(bench):
    """Same bits: flush-to-zero switched on by the caller neither changes rows nor is changed by
    the pool.
    """
    pool, bag = make(bench, mode="sum")
    tiny = torch.full((2, DIM), 1e-40)
    run = tcxl.FaultTolerantRun(pool, nn.Module())
    supported = torch.set_flush_denormal(True)
    try:
        if supported:
            assert float(torch.tensor(1e-40) * 1.0) == 0.0
        run.step((bag(torch.tensor([1, 2]), torch.tensor([0, 1])) * tiny).sum())
        if supported:
            assert float(torch.tensor(1e-40) * 1.0) == 0.0
    finally:
        torch.set_flush_denormal(False)
    assert run.committed_batch == 1
