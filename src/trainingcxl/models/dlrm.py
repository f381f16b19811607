"""DLRM, the reference model: bottom MLP, pooled embeddings, dot interaction, top MLP.

The model of Naumov et al., "Deep Learning Recommendation Model for Personalization and
Recommendation Systems" (2019), and the one that the paper trains as RM1..RM4.

Letters after an underscore name the axes of a tensor:

    B  samples of the batch        I  dense inputs of a sample
    F  sparse features             D  width of an embedding row, the same for every feature
    V  vectors that interact: the bottom MLP's output and the F pooled embeddings, V = F + 1
    P  pairs of distinct vectors, P = V * (V - 1) / 2
"""

from collections.abc import Sequence
from itertools import pairwise
from math import sqrt
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from trainingcxl.models.linear import Linear

__all__ = ["DLRM", "Embeddings"]


class Embeddings(Protocol):
    """What the model asks of its embedding module; `EmbeddingBagCollection` of `nn` has it."""

    @property
    def feature_dims(self) -> list[int]:
        """Width of the rows of each feature, in feature order."""

    def __call__(self, features: Any) -> Tensor:
        """Return the pooled rows, float32, shape (B, sum of `feature_dims`), in feature order."""


class DLRM(nn.Module):
    """Predict a click from dense values and sparse features; one logit a sample.

    Where the embedding rows live is the embedding module's own business: in a pool, or in ordinary
    `nn.EmbeddingBag`s. Everything else is a dense parameter of this model.
    """

    def __init__(
        self,
        embeddings: Embeddings,
        *,
        num_dense: int,
        bottom: Sequence[int] = (512, 256),
        top: Sequence[int] = (512, 256),
        seed: int = 0,
    ) -> None:
        """Build the two MLPs around `embeddings`.

        Args:
            embeddings: Module that pools the sparse features; all features of the same width D.
            num_dense: Dense inputs of a sample (I). With 0 the bottom MLP sees a constant 1, which
                gives every embedding a learned vector to be weighed by.
            bottom: Widths of the hidden layers of the bottom MLP; a last layer of width D is added.
            top: Widths of the hidden layers of the top MLP; a last layer of width 1 is added.
            seed: Seed of the initial values of the dense parameters. No global generator is used.

        Raises:
            ValueError: The features differ in width, or there is none.
        """
        super().__init__()
        widths = sorted(set(embeddings.feature_dims))
        if len(widths) != 1:
            raise ValueError(
                f"DLRM needs features of one width to form dot products, got widths {widths}\n"
                "  do:    give every table the same embedding_dim"
            )
        self.embeddings = embeddings
        self.num_dense = num_dense
        self.embedding_dim = widths[0]
        num_vectors = len(embeddings.feature_dims) + 1
        num_pairs = num_vectors * (num_vectors - 1) // 2
        generator = torch.Generator().manual_seed(seed)
        self.bottom = _mlp([max(num_dense, 1), *bottom, self.embedding_dim], generator)
        self.bottom.append(nn.ReLU())
        self.top = _mlp([self.embedding_dim + num_pairs, *top, 1], generator)
        # Positions of the pairs (i, j), j < i, in a flattened V x V matrix.
        rows, columns = torch.tril_indices(num_vectors, num_vectors, offset=-1)
        self.register_buffer("pair_positions", rows * num_vectors + columns, persistent=False)
        self.pair_positions: Tensor

    def forward(self, dense: Tensor, sparse: Any) -> Tensor:
        """Return the logits.

        Args:
            dense: Dense inputs, float32, shape (B, I).
            sparse: Whatever the embedding module takes, for the same B samples.

        Returns:
            Logits, float32, shape (B,). The click probability is their sigmoid.

        Raises:
            ValueError: `dense` has another number of columns than the model.
        """
        if dense.ndim != 2 or dense.shape[1] != self.num_dense:
            raise ValueError(
                f"dense has shape {tuple(dense.shape)}, the model takes (B, {self.num_dense})\n"
                "  do:    build the model with the number of dense columns that the data has"
            )
        dense_BI = dense if self.num_dense else dense.new_ones(dense.shape[0], 1)
        bottom_BD = self.bottom(dense_BI)
        pooled_BFD = self.embeddings(sparse).reshape(dense.shape[0], -1, self.embedding_dim)
        vectors_BVD = torch.cat([bottom_BD.unsqueeze(1), pooled_BFD], dim=1)
        pairs_BP = self.interact(vectors_BVD)
        logits_B1: Tensor = self.top(torch.cat([bottom_BD, pairs_BP], dim=1))
        return logits_B1.squeeze(1)

    def interact(self, vectors_BVD: Tensor) -> Tensor:
        """Return the dot products of all pairs of distinct vectors, shape (B, P)."""
        products_BVV = torch.bmm(vectors_BVD, vectors_BVD.transpose(1, 2))
        return products_BVV.flatten(1).index_select(1, self.pair_positions)


def _mlp(widths: Sequence[int], generator: torch.Generator) -> nn.Sequential:
    """Stack linear layers with ReLU between them, initialised as in the DLRM paper's reference.

    Weights are normal with variance 2 / (in + out), biases normal with variance 1 / out.
    """
    layers: list[nn.Module] = []
    for num_in, num_out in pairwise(widths):
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            linear = Linear(num_in, num_out)  # draws values of its own, replaced at once
            linear.weight.normal_(0.0, sqrt(2.0 / (num_in + num_out)), generator=generator)
            linear.bias.normal_(0.0, sqrt(1.0 / num_out), generator=generator)
        layers += [linear, nn.ReLU()]
    return nn.Sequential(*layers[:-1])
