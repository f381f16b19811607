"""EmbeddingBag with the meaning of torch.nn.EmbeddingBag, over a pool.

Shapes: B bags, N lookups, D embedding dim.
"""

from typing import Any, Literal

import torch
from torch import Tensor

from trainingcxl.nn.collection import EmbeddingBagConfig, PooledModule
from trainingcxl.optim import RowOptimizer
from trainingcxl.pool import Pool
from trainingcxl.transaction import GroupInput

__all__ = ["EmbeddingBag"]


class EmbeddingBag(PooledModule):
    """One table in a pool, called like torch.nn.EmbeddingBag.

    Args:
        pool: The pool; the table is created in it or found there.
        num_embeddings: Rows.
        embedding_dim: D.
        name: Name of the table in the pool.
        optimizer: How a commit updates rows. None is enough on a read-only pool.
        mode: "sum" or "mean" (torch's "max" has no sum of gradients and is not available).
        include_last_offset: `offsets` has B + 1 entries, the last is N.
        padding_idx: Row that counts for nothing; negative counts from the end, as in torch.
        init_scale: Initial weights are uniform in [-init_scale, init_scale). Default 1 /
            sqrt(num_embeddings).
        seed: Initial weights are a pure function of (seed, name, row).
    """

    def __init__(
        self,
        pool: Pool,
        num_embeddings: int,
        embedding_dim: int,
        *,
        name: str,
        optimizer: RowOptimizer | None,
        mode: Literal["sum", "mean"] = "mean",
        include_last_offset: bool = False,
        padding_idx: int | None = None,
        init_scale: float | None = None,
        seed: int = 0,
    ) -> None:
        if padding_idx is not None and -num_embeddings <= padding_idx < 0:
            padding_idx += num_embeddings
        config = EmbeddingBagConfig(
            name=name,
            num_embeddings=num_embeddings,
            embedding_dim=embedding_dim,
            feature_names=[name],
            pooling=mode,
            init_scale=init_scale,
            padding_idx=padding_idx,
        )
        super().__init__(pool, [config], optimizer, seed=seed)
        self.mode = mode
        self.include_last_offset = include_last_offset

    def group_input(self, features: Any) -> GroupInput:
        """`features`: what forward takes, as a tensor or as a tuple of its arguments."""
        arguments = features if isinstance(features, tuple) else (features,)
        return self._inputs(*arguments)

    def forward(
        self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None
    ) -> Tensor:
        """Gathers and pools the rows of each bag.

        Args:
            input: Row numbers, int64 or int32: (N,) with `offsets`, or (B, L) for bags of equal
                length.
            offsets: Start of each bag, first is 0, non-decreasing; B entries, or B + 1 with
                include_last_offset.
            per_sample_weights: float32, shape of `input`; mode "sum" only.

        Returns:
            float32, shape (B, D). An empty bag gives zeros.

        Raises:
            IndexError: An index is out of range. The pool is unchanged.
            ValueError: Offsets or weights do not fit.
            TypeError: Wrong dtype.
        """
        inputs = self._inputs(input, offsets, per_sample_weights)
        return self._pool(inputs, per_sample_weights)

    def _inputs(
        self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None
    ) -> GroupInput:
        for what, tensor in (("input", input), ("offsets", offsets)):
            if tensor is not None and tensor.dtype not in (torch.int64, torch.int32):
                raise TypeError(f"{what} is {tensor.dtype}, expected int64 or int32")
        if input.dim() == 2:
            if offsets is not None:
                raise ValueError("offsets must be None when input has two dimensions")
            bags, length = input.shape
            offsets = torch.arange(bags + 1, dtype=torch.int64) * length
        elif input.dim() == 1:
            offsets = self._complete_offsets(input, offsets)
            bags = offsets.numel() - 1
        else:
            raise ValueError(f"input has shape {tuple(input.shape)}, expected (N,) or (B, L)")
        weights = None
        if per_sample_weights is not None:
            if self.mode != "sum":
                raise ValueError(f"per_sample_weights need mode 'sum', the mode is '{self.mode}'")
            if per_sample_weights.dtype != torch.float32 or per_sample_weights.shape != input.shape:
                raise ValueError(
                    f"per_sample_weights are {per_sample_weights.dtype} of shape "
                    f"{tuple(per_sample_weights.shape)}, "
                    f"expected float32 of shape {tuple(input.shape)}"
                )
            weights = per_sample_weights.reshape(-1)
        return self._native_input(bags, input.reshape(-1), offsets, weights)

    def _complete_offsets(self, input: Tensor, offsets: Tensor | None) -> Tensor:
        if offsets is None or offsets.dim() != 1:
            raise ValueError("a one-dimensional input needs one-dimensional offsets")
        offsets = offsets.cpu()
        if not self.include_last_offset:
            offsets = torch.cat([offsets, torch.tensor([input.numel()], dtype=offsets.dtype)])
        if offsets.numel() == 0:
            raise ValueError("offsets are empty, include_last_offset needs at least one entry")
        if offsets.numel() == 1 and input.numel() > 0 and not self.include_last_offset:
            raise ValueError(f"there are no bags, but {input.numel()} indices")
        return offsets

    def extra_repr(self) -> str:
        """What print(model) shows."""
        config, path = self.configs[0], self.pool.path
        shape = f"{config.num_embeddings:,}, {config.embedding_dim}"
        return f"{shape}, mode='{self.mode}', pool '{path}'"
