"""Shuffling without a table: a keyed permutation of 0 .. n-1, evaluated where it is needed."""

import numpy as np
from numpy.typing import NDArray

from trainingcxl.data.elementary import UInt64, mix, mix_scalar

__all__ = ["Permutation"]

_ROUNDS = 6


class Permutation:
    """A pseudo-random permutation of range(length), a pure function of (length, key).

    An unbalanced Feistel network over the smallest power of two that holds `length` values; values
    outside the range are sent through it again until they fall inside (cycle walking), which takes
    fewer than two evaluations on average. Needs no memory, whatever the length.
    """

    def __init__(self, length: int, key: int) -> None:
        """Prepare the round keys.

        Args:
            length: Number of values, in [1, 2^62).
            key: Any integer; equal keys give equal permutations.
        """
        if not 1 <= length < 1 << 62:
            raise ValueError(f"length is {length}, must be in [1, 2^62)")
        self.length = length
        bits = max(2, (length - 1).bit_length())
        self._low_bits, self._high_bits = bits // 2, bits - bits // 2
        self._keys = [mix_scalar(mix_scalar(key) + r * 0x9E3779B97F4A7C15) for r in range(_ROUNDS)]

    def _once(self, value: UInt64) -> UInt64:
        low_bits, high_bits = self._low_bits, self._high_bits
        for key in self._keys:
            low = value & np.uint64((1 << low_bits) - 1)
            high = value >> np.uint64(low_bits)
            high = (high ^ mix(low ^ np.uint64(key))) & np.uint64((1 << high_bits) - 1)
            # Halves change places, so the next round changes what this one kept.
            value = (low << np.uint64(high_bits)) | high
            low_bits, high_bits = high_bits, low_bits
        return value

    def __call__(self, index: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return where each index goes.

        Args:
            index: int64, any shape, each in [0, length).

        Returns:
            int64, the same shape; the images of different indices differ.

        Raises:
            IndexError: An index is out of range.
        """
        if index.size and not 0 <= index.min() <= index.max() < self.length:
            raise IndexError(f"index outside [0, {self.length}): {index.min()} .. {index.max()}")
        value = self._once(index.astype(np.uint64))
        outside = value >= np.uint64(self.length)
        while outside.any():
            value[outside] = self._once(value[outside])
            outside = value >= np.uint64(self.length)
        return value.astype(np.int64)
