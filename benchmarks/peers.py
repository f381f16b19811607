"""The embedding engines that ours is compared with, each with its tables in files of a folder.

Theirs know nothing of files: their tables are mapped so that all candidates read the same kind of
memory, with pages of the same size.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from report import Skipped
from step import Torch

import trainingcxl as tcxl

RATES = {"sgd": 0.01, "rowwise-adagrad": 0.02}
EPS = 1e-8  # of tcxl.optim.RowWiseAdagrad


def mapped(path: Path, count: int) -> torch.Tensor:
    """Floats (count,) in a new file, zero."""
    return torch.from_file(str(path), shared=True, size=max(1, count))[:count]


def mapped_tables(folder: Path, shape: dict[str, Any]) -> list[torch.Tensor]:
    """One tensor (R, D) for each table of a shape, in files of their own."""
    folder.mkdir()
    return [
        mapped(folder / f"t{t}", rows * shape["dim"]).view(rows, shape["dim"])
        for t, rows in enumerate(shape["rows"])
    ]


def fill(tensor: torch.Tensor, scale: float = 1e-2) -> None:
    """Uniform values, the same for every candidate; also gives the file its pages."""
    generator = torch.Generator().manual_seed(0)
    flat = tensor.view(-1)
    for begin in range(0, len(flat), 1 << 22):
        part = flat[begin : begin + (1 << 22)]
        part.uniform_(-scale, scale, generator=generator)


class TorchBags(Torch):
    """nn.EmbeddingBag(sparse=True) and torch.optim.SGD on mapped tables."""

    def __init__(self, folder: Path, shape: dict[str, Any]) -> None:
        self.weights = mapped_tables(folder, shape)
        for weight in self.weights:
            fill(weight)
        super().__init__(shape, self.weights)


class Fbgemm:
    """FBGEMM's fused CPU TBE: lookup, and a backward that updates the rows. No durability."""

    def __init__(self, folder: Path, shape: dict[str, Any], *, optimizer: str) -> None:
        try:
            from fbgemm_gpu.split_embedding_configs import EmbOptimType
            from fbgemm_gpu.split_table_batched_embeddings_ops_common import (
                BoundsCheckMode,
                EmbeddingLocation,
                PoolingMode,
            )
            from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
                ComputeDevice,
                SplitTableBatchedEmbeddingBagsCodegen,
            )
        except (ImportError, OSError) as error:
            raise Skipped(f"FBGEMM is not installed (make bench-peers): {error}") from error
        kinds = {
            "sgd": EmbOptimType.EXACT_SGD,
            "rowwise-adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        }
        self.tbe = SplitTableBatchedEmbeddingBagsCodegen(
            [
                (rows, shape["dim"], EmbeddingLocation.HOST, ComputeDevice.CPU)
                for rows in shape["rows"]
            ],
            optimizer=kinds[optimizer],
            learning_rate=RATES[optimizer],
            eps=EPS,
            pooling_mode=PoolingMode.SUM,
            bounds_check_mode=BoundsCheckMode.NONE,  # its best; ours checks every index
        )
        folder.mkdir()
        for name in ("weights_host", "momentum1_host"):
            place = getattr(self.tbe, name, None)
            if place is not None and place.numel() > 0:
                place.data = mapped(folder / name, place.numel())
        fill(self.tbe.weights_host.data)
        if self.tbe.momentum1_host.numel() > 0:
            self.tbe.momentum1_host.data.fill_(0.0)  # a page that was never written is not there
        self.grad = torch.full((shape["batch"], len(shape["rows"]) * shape["dim"]), 1e-4)

    @property
    def weights(self) -> Sequence[torch.Tensor]:
        """Its tables, each (R, D)."""
        return self.tbe.split_embedding_weights()

    def step(self, batch: tcxl.SparseFeatures, following: tcxl.SparseFeatures) -> None:
        """Lookup, and backward from a fixed gradient with the update in it."""
        del following
        self.tbe(batch.values, batch.offsets).backward(self.grad)


def bytes_of(shape: dict[str, Any]) -> int:
    """Of a shape's tables."""
    return 4 * sum(shape["rows"]) * shape["dim"]
