"""Sparse features of a batch, feature-major like TorchRec's KeyedJaggedTensor.

Shapes: B bags (samples), F features, N lookups.
"""

from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor

__all__ = ["SparseFeatures"]


class SparseFeatures:
    """Lookups of F features for B samples: all bags of the first feature, then of the second, ...

    Args:
        keys: Feature names, F of them.
        values: Row numbers, int64 or int32, shape (N,).
        lengths: Lookups of each bag, int64 or int32, shape (F * B,). Give this or `offsets`.
        offsets: Start of each bag in `values`, shape (F * B + 1,); the last entry is N.
        weights: Per-sample weights, float32, shape (N,).

    Raises:
        ValueError: Lengths or offsets do not fit keys and values; names keys, B and sums.
        TypeError: A tensor has the wrong dtype.
    """

    def __init__(
        self,
        keys: Sequence[str],
        values: Tensor,
        *,
        lengths: Tensor | None = None,
        offsets: Tensor | None = None,
        weights: Tensor | None = None,
    ) -> None:
        if (lengths is None) == (offsets is None):
            raise ValueError("give either lengths or offsets")
        if not keys:
            raise ValueError("keys are empty")
        _check_integers("values", values)
        self.keys = list(keys)
        self.values = values
        self.weights = weights
        if offsets is None:
            assert lengths is not None
            _check_integers("lengths", lengths)
            offsets = torch.zeros(lengths.numel() + 1, dtype=torch.int64)
            torch.cumsum(lengths, 0, out=offsets[1:])
        _check_integers("offsets", offsets)
        self.offsets = offsets
        num_bags = offsets.numel() - 1
        if num_bags < 0 or num_bags % len(self.keys) != 0:
            raise ValueError(
                f"{num_bags} lengths do not divide by {len(self.keys)} keys {self.keys}; "
                "there must be one length per key and sample (their sum is "
                f"{int(offsets[-1]) if num_bags >= 0 else 0})"
            )
        self.batch_size = num_bags // len(self.keys)
        if int(offsets[-1]) != values.numel():
            raise ValueError(
                f"the bags of keys {self.keys} with batch size {self.batch_size} add up to "
                f"{int(offsets[-1])} "
                f"lookups, there are {values.numel()} values"
            )
        if weights is not None and (
            weights.dtype != torch.float32 or weights.shape != values.shape
        ):
            raise ValueError(
                f"weights are {weights.dtype} of shape {tuple(weights.shape)}, "
                f"expected float32 of shape {tuple(values.shape)}"
            )

    @classmethod
    def from_dense(cls, keys: Sequence[str], ids: Tensor) -> Self:
        """One lookup per sample and feature from `ids`, integer, shape (B, F)."""
        if ids.dim() != 2 or ids.shape[1] != len(keys):
            raise ValueError(
                f"ids have shape {tuple(ids.shape)}, expected (B, {len(keys)}) for keys "
                f"{list(keys)}"
            )
        values = ids.t().reshape(-1)
        return cls(keys, values, offsets=torch.arange(values.numel() + 1, dtype=torch.int64))

    @classmethod
    def from_any(cls, features: Any, names: Sequence[str]) -> "SparseFeatures":
        """From what training loops pass: SparseFeatures, a (B, F) tensor, a dict, TorchRec's
        KeyedJaggedTensor.

        A dict maps feature names to a (B,) or (B, L) tensor, or to a pair (values, offsets with B +
        1 entries).
        """
        if isinstance(features, SparseFeatures):
            return features
        if isinstance(features, Tensor):
            return cls.from_dense(names, features)
        if isinstance(features, dict):
            return cls._from_dict(features, names)
        if all(
            hasattr(features, name) for name in ("keys", "values", "offsets", "weights_or_none")
        ):
            return cls(
                features.keys(),
                features.values(),
                offsets=features.offsets(),
                weights=features.weights_or_none(),
            )
        raise TypeError(
            f"features are a {type(features).__name__}; expected SparseFeatures, a (B, F) "
            "integer tensor, "
            "a dict of tensors or a KeyedJaggedTensor"
        )

    @classmethod
    def _from_dict(cls, features: dict[str, Any], names: Sequence[str]) -> "SparseFeatures":
        missing = [name for name in names if name not in features]
        if missing:
            raise ValueError(f"features {missing} are missing; the batch has {sorted(features)}")
        values, lengths, sizes = [], [], {}
        for name in names:
            entry = features[name]
            if isinstance(entry, Tensor):
                rows = entry if entry.dim() == 2 else entry.reshape(-1, 1)
                values.append(rows.reshape(-1))
                lengths.append(torch.full((rows.shape[0],), rows.shape[1], dtype=torch.int64))
            else:
                ids, offsets = entry
                values.append(ids)
                lengths.append(offsets[1:] - offsets[:-1])
            sizes[name] = lengths[-1].numel()
        if len(set(sizes.values())) > 1:
            raise ValueError(f"features have different batch sizes: {sizes}")
        return cls(names, torch.cat(values), lengths=torch.cat(lengths))

    def select(self, names: Sequence[str]) -> "SparseFeatures":
        """The named features, in that order.

        Raises:
            ValueError: A name is not among the keys.
        """
        if list(names) == self.keys:
            return self
        where = {key: i for i, key in enumerate(self.keys)}
        missing = [name for name in names if name not in where]
        if missing:
            raise ValueError(f"features {missing} are missing; the batch has {self.keys}")
        values, lengths, weights = [], [], []
        size = self.batch_size
        all_lengths = self.offsets[1:] - self.offsets[:-1]
        for name in names:
            first = where[name] * size
            begin, end = int(self.offsets[first]), int(self.offsets[first + size])
            values.append(self.values[begin:end])
            lengths.append(all_lengths[first : first + size])
            if self.weights is not None:
                weights.append(self.weights[begin:end])
        return SparseFeatures(
            names,
            torch.cat(values),
            lengths=torch.cat(lengths),
            weights=torch.cat(weights) if weights else None,
        )

    def __repr__(self) -> str:
        shape = f"{len(self.keys)} keys, batch size {self.batch_size}"
        return f"SparseFeatures({shape}, {self.values.numel()} lookups)"


def _check_integers(name: str, tensor: Tensor) -> None:
    if tensor.dtype not in (torch.int64, torch.int32) or tensor.dim() != 1:
        raise TypeError(
            f"{name} are {tensor.dtype} of shape {tuple(tensor.shape)}, expected int64 or int32 "
            "of shape (N,)"
        )
