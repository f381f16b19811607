"""EmbeddingBagCollection: several tables and features, in the order that the user wrote."""

import numpy as np
import pytest
import torch
from torch import nn

import trainingcxl as tcxl
from trainingcxl.errors import PoolError

TABLES = (("a", 1000, 8), ("b", 37, 3), ("c", 1, 1), ("d", 5, 32))


def config(name, rows, dim, **options):
    options.setdefault("feature_names", [name])
    return tcxl.EmbeddingBagConfig(name=name, num_embeddings=rows, embedding_dim=dim, **options)


def collection(pool, *configs, **options):
    options.setdefault("optimizer", tcxl.optim.SGD(lr=0.1))
    tables = configs or [config(*table) for table in TABLES]
    return tcxl.EmbeddingBagCollection(pool, tables=tables, **options)


def ragged(names, sizes, batch=6, seed=0):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 4, (len(names) * batch,), generator=generator)
    values = torch.cat(
        [
            torch.randint(
                0, size, (int(lengths[i * batch : (i + 1) * batch].sum()),), generator=generator
            )
            for i, size in enumerate(sizes)
        ]
    )
    return tcxl.SparseFeatures(names, values, lengths=lengths)


def by_table(pool, bags, features):
    """The same with one nn.EmbeddingBag a feature."""
    parts = []
    for table in bags.configs:
        weight = torch.from_numpy(pool.tables[table.name].weight.copy())
        for name in table.feature_names:
            one = features.select([name])
            parts.append(
                nn.functional.embedding_bag(
                    one.values, weight, one.offsets, mode=table.pooling, include_last_offset=True,
                    per_sample_weights=one.weights, padding_idx=table.padding_idx,
                )
            )  # fmt: skip
    return torch.cat(parts, dim=1)


def test_mixed_dimensions_and_one_row_tables(bench):
    """C9: dims 1, 3, 8, 32 and a table of one row in one collection."""
    pool = bench.open()
    bags = collection(pool)
    features = ragged([name for name, *_ in TABLES], [rows for _, rows, _ in TABLES])
    pooled = bags(features)
    assert pooled.shape == (6, 44)
    assert bags.feature_dims == [8, 3, 1, 32]
    torch.testing.assert_close(pooled, by_table(pool, bags, features), rtol=0, atol=1e-6)
    parts = bags.split(pooled)
    assert {name: part.shape[1] for name, part in parts.items()} == {
        "a": 8,
        "b": 3,
        "c": 1,
        "d": 32,
    }


def test_features_sharing_a_table(bench):
    """Two features of one table: both looked up, and one gradient sum per row over both."""
    pool = bench.open()
    bags = collection(
        pool, config("a", 50, 8, feature_names=["x", "y"], pooling="mean"), config("b", 9, 2)
    )
    assert bags.feature_names == ["x", "y", "b"]
    features = ragged(["x", "y", "b"], [50, 50, 9])
    torch.testing.assert_close(bags(features), by_table(pool, bags, features), rtol=0, atol=1e-6)
    run = tcxl.FaultTolerantRun(pool, bags)
    before = pool.tables["a"].weight[7].copy()
    both = tcxl.SparseFeatures(
        ["x", "y", "b"], torch.tensor([7, 7]), lengths=torch.tensor([1, 1, 0])
    )
    run.step(bags(both).sum())
    np.testing.assert_allclose(before - pool.tables["a"].weight[7], 0.2, rtol=1e-5)


def test_order_of_keys_does_not_matter(bench):
    """F7's kind: a batch with other key order, or with more keys, gives the same output."""
    pool = bench.open()
    bags = collection(pool)
    names, sizes = [name for name, *_ in TABLES], [rows for _, rows, _ in TABLES]
    features = ragged([*names, "unused"], [*sizes, 1000])
    expected = bags(features)
    reversed_features = features.select(["unused", *names[::-1]])
    assert reversed_features.keys != features.keys
    assert torch.equal(bags(reversed_features), expected)


def test_every_form_of_input(bench):
    """A (B, F) tensor, a dict of columns, of pairs, and a KeyedJaggedTensor look-alike mean the
    same.
    """
    pool = bench.open()
    bags = collection(pool, config("a", 50, 4), config("b", 9, 2))
    ids = torch.tensor([[3, 4], [3, 8], [49, 0]])
    expected = bags(ids)

    class Jagged:
        """What TorchRec's KeyedJaggedTensor offers."""

        def keys(self):
            return ["a", "b"]

        def values(self):
            return ids.t().reshape(-1)

        def offsets(self):
            return torch.arange(7)

        def weights_or_none(self):
            return None

    forms = {
        "int32": ids.to(torch.int32),
        "dict of columns": {"b": ids[:, 1], "a": ids[:, 0], "more": ids},
        "dict of matrices": {"a": ids[:, :1], "b": ids[:, 1:]},
        "dict of pairs": {"a": (ids[:, 0], torch.arange(4)), "b": (ids[:, 1], torch.arange(4))},
        "jagged": Jagged(),
        "strided": torch.stack([ids, ids], dim=2)[:, :, 0],
    }
    for name, form in forms.items():
        assert torch.equal(bags(form), expected), name
    for wrong in ("text", 3, [1, 2], None):
        with pytest.raises(TypeError, match="expected SparseFeatures"):
            bags(wrong)


@pytest.mark.parametrize("pooling", ["sum", "mean"])
def test_per_sample_weights_and_padding(bench, pooling):
    """Weighted features with a padding row: the output and the weights' gradient."""
    pool = bench.open()
    bags = collection(pool, config("a", 50, 4, pooling=pooling, padding_idx=0), config("b", 9, 2))
    features = ragged(["a", "b"], [50, 9])
    if pooling == "sum":
        weights = torch.randn(features.values.numel(), generator=torch.Generator().manual_seed(1))
        features = tcxl.SparseFeatures(
            ["a", "b"], features.values, offsets=features.offsets, weights=weights
        )
    torch.testing.assert_close(bags(features), by_table(pool, bags, features), rtol=0, atol=1e-6)


def test_gradient_of_weights_through_the_collection(bench):
    """F11: weights that the model learns, also when the batch's keys are in another order."""
    pool = bench.open()
    bags = collection(pool, config("a", 50, 4), config("b", 9, 2))
    base = ragged(["b", "a"], [9, 50])
    target = torch.randn(6, 6, generator=torch.Generator().manual_seed(1))
    grads = []
    for compute in (bags, lambda features: by_table(pool, bags, features)):
        weights = torch.linspace(-1, 1, base.values.numel()).requires_grad_()
        features = tcxl.SparseFeatures(
            ["b", "a"], base.values, offsets=base.offsets, weights=weights
        )
        (compute(features) * target).sum().backward()
        grads.append(weights.grad)
    torch.testing.assert_close(grads[0], grads[1], rtol=0, atol=1e-6)


@pytest.mark.parametrize("value", [1000, -1, 2**63 - 1, -(2**63)])
@pytest.mark.parametrize("feature", ["a", "b", "c"])
def test_index_error_names_table_feature_sample_and_position(bench, feature, value):
    """F1, F3: in any feature; the batch's other features do not matter, the pool is untouched."""
    pool = bench.open()
    bags = collection(pool, *[config(*t, feature_names=[f"f_{t[0]}"]) for t in TABLES[:3]])
    run = tcxl.FaultTolerantRun(pool, bags)
    digest = pool.digest()
    ids = torch.zeros(4, 3, dtype=torch.int64)
    ids[2, "abc".index(feature)] = value
    with pytest.raises(IndexError) as error:
        run.step(bags(ids).sum())
    text = str(error.value)
    rows = {"a": 1000, "b": 37, "c": 1}[feature]
    for part in (
        f"'f_{feature}'",
        f"'{feature}'",
        f"index {value} ",
        "sample 2 ",
        f"[0, {rows})",
        "do:",
    ):
        assert part in text
    assert pool.digest() == digest
    run.step(bags(torch.zeros(4, 3, dtype=torch.int64)).sum())
    assert run.committed_batch == 1


@pytest.mark.parametrize("batch", [0, 1, 5])
def test_empty_batches(bench, batch):
    """F5: B = 0 and batches of empty bags: zeros, nothing logged, and the commit still advances."""
    pool = bench.open()
    bags = collection(pool)
    run = tcxl.FaultTolerantRun(pool, bags)
    before = {name: table.weight.copy() for name, table in pool.tables.items()}
    features = tcxl.SparseFeatures(
        bags.feature_names, torch.zeros(0, dtype=torch.int64),
        lengths=torch.zeros(4 * batch, dtype=torch.int64),
    )  # fmt: skip
    pooled = bags(features)
    assert torch.equal(pooled, torch.zeros(batch, 44))
    run.step(pooled.sum())
    assert run.committed_batch == 1
    assert run.stats.rows == 0
    assert run.stats.log_bytes <= 64  # the flag alone
    for name, table in pool.tables.items():
        assert np.array_equal(table.weight, before[name])
    assert torch.equal(bags(torch.zeros(0, 4, dtype=torch.int64)), torch.zeros(0, 44))


def test_several_modules_on_one_pool(bench):
    """Two collections and an EmbeddingBag: one commit updates all of them, each with its own
    optimizer.
    """
    pool = bench.open()
    first = collection(pool, config("a", 50, 4))
    second = collection(
        pool, config("b", 9, 2), optimizer=tcxl.optim.RowWiseAdagrad(lr=0.5, eps=0.0)
    )
    third = tcxl.EmbeddingBag(pool, 7, 3, name="c", optimizer=tcxl.optim.SGD(lr=1.0), mode="sum")
    run = tcxl.FaultTolerantRun(pool, nn.ModuleList([first, second, third]))
    before = {name: table.weight.copy() for name, table in pool.tables.items()}
    ids = torch.tensor([[1], [2]])
    run.step(first(ids).sum() + second(ids).sum() + third(ids).sum())
    for name, step in (("a", 0.1), ("b", 0.5), ("c", 1.0)):
        moved = before[name] - pool.tables[name].weight
        np.testing.assert_allclose(moved[1:3], step, rtol=1e-5)
        assert not moved[3:].any()
    run.step(second(ids).sum())  # a batch that uses one of them only
    assert run.committed_batch == 2


def test_several_modules_are_announced_together(bench):
    """One batch, two modules: sparse_of gives each its features; the rows are those of a run
    that announces nothing.
    """
    weights = []
    for announced in (False, True):
        pool = bench.open(bench.folder / str(announced))
        first = collection(pool, config("a", 50, 4))
        second = collection(pool, config("b", 9, 2), optimizer=tcxl.optim.Adagrad(lr=0.5))
        options = {}
        if announced:
            options["sparse_of"] = lambda ids, a=first, b=second: {a: ids, b: ids % 9}
        run = tcxl.FaultTolerantRun(pool, nn.ModuleList([first, second]), **options)
        generator = torch.Generator().manual_seed(2)
        batches = [torch.randint(0, 50, (8, 1), generator=generator) for _ in range(8)]
        for ids in run.batches(batches):
            run.step(first(ids).square().sum() + second(ids % 9).square().sum())
        assert (run.stats.unannounced_batches == 0) == announced
        weights.append([table.weight.copy() for table in pool.tables.values()])
    for plain, ahead in zip(*weights, strict=True):
        assert np.array_equal(plain, ahead)


def test_weighted_mean(bench):
    """Weights with pooling "mean": the weighted sum over the number of lookups, as FBGEMM has
    it.
    """
    pool = bench.open()
    bags = collection(pool, config("a", 50, 4, pooling="mean"))
    ids, weights = torch.tensor([3, 4, 3]), torch.tensor([0.5, -1.0, 2.0])
    features = tcxl.SparseFeatures(
        ["a"], ids, lengths=torch.tensor([2, 0, 1]), weights=weights.clone().requires_grad_()
    )
    rows = torch.from_numpy(pool.tables["a"].weight.copy())[ids]
    pooled = bags(features)
    expected = torch.stack(
        [(rows[:2] * weights[:2, None]).sum(0) / 2, torch.zeros(4), rows[2] * weights[2]]
    )
    torch.testing.assert_close(pooled, expected, rtol=0, atol=1e-6)
    pooled.sum().backward()
    expected = rows.sum(1) / torch.tensor([2.0, 2.0, 1.0])
    torch.testing.assert_close(features.weights.grad, expected, rtol=0, atol=1e-6)


def test_one_module_called_twice(bench):
    """Two lookups by one module in a step (two towers): both gradients count."""
    pool = bench.open()
    bags = collection(pool, config("a", 50, 4))
    run = tcxl.FaultTolerantRun(pool, bags)
    before = pool.tables["a"].weight.copy()
    run.step(bags(torch.tensor([[1], [2]])).sum() + 2 * bags(torch.tensor([[2]])).sum())
    moved = before - pool.tables["a"].weight
    np.testing.assert_allclose(moved[1], 0.1, rtol=1e-5)
    np.testing.assert_allclose(moved[2], 0.3, rtol=1e-5)


def test_a_table_belongs_to_one_module(bench):
    """Two modules with one table would each believe to have its gradient sum."""
    pool = bench.open()
    collection(pool, config("a", 50, 4))
    with pytest.raises(PoolError, match="'a' is already used"):
        collection(pool, config("a", 50, 4))


def test_repeated_names_are_refused(bench):
    """A feature that occurs twice would be looked up under either meaning."""
    pool = bench.open()
    for wrong in (
        (config("a", 5, 4), config("a", 5, 4, feature_names=["other"])),
        (config("a", 5, 4, feature_names=["f"]), config("b", 5, 4, feature_names=["f"])),
        (config("a", 5, 4, feature_names=["f", "f"]),),
    ):
        with pytest.raises(ValueError, match="occurs twice"):
            collection(pool, *wrong)
    for names in ([], "text"):
        with pytest.raises(ValueError, match="feature_names"):
            config("a", 5, 4, feature_names=names)


def test_frozen_collection(bench):
    """requires_grad_(False) keeps rows; True trains them again."""
    pool = bench.open()
    bags = collection(pool, config("a", 50, 4))
    head = nn.Linear(4, 1)
    run = tcxl.FaultTolerantRun(
        pool, nn.Sequential(bags, head), torch.optim.SGD(head.parameters(), lr=0.1)
    )
    before = pool.tables["a"].weight.copy()
    ids = torch.tensor([[1], [2]])
    bags.requires_grad_(False)
    run.step(head(bags(ids)).sum())
    assert np.array_equal(pool.tables["a"].weight, before)
    bags.requires_grad_()
    run.step(head(bags(ids)).sum())
    assert not np.array_equal(pool.tables["a"].weight, before)


def test_model_state_holds_no_table(bench):
    """state_dict, parameters and copies of a model never carry the tables along."""
    pool = bench.open()
    model = nn.Sequential(collection(pool), nn.Linear(44, 1))
    assert set(model.state_dict()) == {"1.weight", "1.bias"}
    assert sum(p.numel() for p in model.parameters()) == 45
    assert "1,043 rows" in repr(model)
    model.train().eval().float()
    assert model(torch.zeros(2, 4, dtype=torch.int64)).shape == (2, 1)
