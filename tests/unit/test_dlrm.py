"""The reference model against its definition, written out sample by sample."""

import math

import pytest
import torch
from torch import Tensor, nn

from trainingcxl.models import DLRM


class PlainEmbeddings(nn.Module):
    """Ordinary tables with one lookup a feature: the interface that the model asks for."""

    def __init__(self, rows: list[int], dim: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.tables = nn.ModuleList(nn.Embedding(num, dim) for num in rows)
        for table in self.tables:
            nn.init.normal_(table.weight, generator=generator)
        self.feature_dims = [dim] * len(rows)

    def forward(self, ids: Tensor) -> Tensor:
        return torch.cat([table(ids[:, i]) for i, table in enumerate(self.tables)], dim=1)


def dense_parameters(model: DLRM) -> list[Tensor]:
    return [*model.bottom.parameters(), *model.top.parameters()]


def test_logits_follow_the_definition() -> None:
    embeddings = PlainEmbeddings([10, 20, 30], dim=4)
    model = DLRM(embeddings, num_dense=5, bottom=[8, 7], top=[6], seed=3)
    generator = torch.Generator().manual_seed(0)
    dense = torch.randn(9, 5, generator=generator)
    ids = torch.randint(10, (9, 3), generator=generator)

    expected = []
    for sample in range(9):
        bottom = model.bottom(dense[sample])
        vectors = [
            bottom,
            *(t.weight[i] for t, i in zip(embeddings.tables, ids[sample], strict=True)),
        ]
        pairs = [vectors[i] @ vectors[j] for i in range(4) for j in range(i)]
        expected.append(model.top(torch.cat([bottom, torch.stack(pairs)])))
    torch.testing.assert_close(model(dense, ids), torch.cat(expected))


def test_bottom_ends_with_the_row_width_and_relu_and_top_with_a_bare_logit() -> None:
    model = DLRM(PlainEmbeddings([10], dim=4), num_dense=5, bottom=[8], top=[6])
    assert isinstance(model.bottom[-1], nn.ReLU)
    assert isinstance(model.top[-1], nn.Linear)
    shapes = [tuple(p.shape) for p in dense_parameters(model) if p.ndim == 2]
    assert shapes == [(8, 5), (4, 8), (6, 4 + 1), (1, 6)]


def test_no_hidden_layers() -> None:
    model = DLRM(PlainEmbeddings([10, 10], dim=4), num_dense=5, bottom=[], top=[])
    assert model(torch.zeros(3, 5), torch.zeros(3, 2, dtype=torch.int64)).shape == (3,)


def test_without_dense_columns_embeddings_still_get_a_weight_of_their_own() -> None:
    model = DLRM(PlainEmbeddings([10, 10], dim=4), num_dense=0, bottom=[8], top=[6])
    ids = torch.tensor([[0, 1], [2, 1]])
    logits = model(torch.empty(2, 0), ids)
    assert logits.shape == (2,)
    logits.sum().backward()
    assert all(p.grad is not None for p in dense_parameters(model))


def test_initial_values_are_a_function_of_the_seed_alone() -> None:
    embeddings = PlainEmbeddings([10], dim=4)

    def build(seed: int) -> list[Tensor]:
        return dense_parameters(DLRM(embeddings, num_dense=5, seed=seed))

    before = torch.get_rng_state()
    first = build(1)
    assert torch.equal(torch.get_rng_state(), before)  # the caller's generator is not drawn from
    torch.manual_seed(99)
    second, other = build(1), build(2)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def test_initial_values_have_the_reference_spread() -> None:
    model = DLRM(PlainEmbeddings([10], dim=16), num_dense=13, bottom=[512, 256], top=[512, 256])
    weight = model.bottom[2].weight
    assert weight.shape == (256, 512)
    assert weight.std().item() == pytest.approx(math.sqrt(2 / (256 + 512)), rel=0.02)
    assert model.top[0].bias.std().item() == pytest.approx(math.sqrt(1 / 512), rel=0.15)


@pytest.mark.parametrize("dims", [[4, 8], []])
def test_features_of_different_width_are_refused(dims: list[int]) -> None:
    embeddings = PlainEmbeddings([10, 10], dim=4)
    embeddings.feature_dims = dims
    with pytest.raises(ValueError, match="features of one width"):
        DLRM(embeddings, num_dense=5)


@pytest.mark.parametrize("shape", [(3, 4), (3,), (3, 5, 1)])
def test_dense_of_another_shape_is_refused(shape: tuple[int, ...]) -> None:
    model = DLRM(PlainEmbeddings([10], dim=4), num_dense=5)
    with pytest.raises(ValueError, match=r"the model takes \(B, 5\)"):
        model(torch.zeros(shape), torch.zeros(3, 1, dtype=torch.int64))
