"""The built-in data set: click data in the shape of Criteo's, computed instead of stored.

Every value is a pure function of (seed, sample number), so any batch can be made again after a
crash and nothing about the data has to be saved. `docs/data.md` has the recipe. `csrc/synthetic.cc`
is the same recipe in C++ and gives the same bits; `tests/data/synthetic_vectors.json` pins them.

Shape legend: n samples, K dense fields, J categorical fields, L lookups of one sample.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from trainingcxl.data import elementary
from trainingcxl.data.elementary import Float64, UInt64

if TYPE_CHECKING:
    from trainingcxl.data.synthetic_presets import SyntheticSpec

__all__ = ["DENSE_FIELDS", "DenseField", "SyntheticGenerator", "SyntheticRows"]

_K1 = 0x9E3779B97F4A7C15
_K2 = 0xD1B54A32D192ED03
# Streams: independent sources of uniforms. Lookup h of a bag uses LOOKUP + h and so on.
_DENSE_MISSING, _DENSE_A, _DENSE_B = 1, 2, 3
_WEIGHT_A, _WEIGHT_B, _EFFECT_A, _EFFECT_B, _FACTOR_A, _FACTOR_B = 4, 5, 6, 7, 8, 9
_LABEL, _MULTIPLIER, _OFFSET, _BLOCK_SET = 10, 11, 12, 13
_LOOKUP, _LOCAL, _LOCAL_SLOT = 0x1000, 0x2000, 0x3000
_CHUNK = 8192  # samples; keeps the temporaries of the NumPy path in the cache
_PAIRS = 8
_ROW_LIMIT = 1 << 31


@dataclass(frozen=True, slots=True)
class DenseField:
    """One dense field: `missing` is a share, the rest floor(exp(normal)) + `shift`."""

    missing: float
    mean: float
    deviation: float
    shift: int = 0


_MISSING = (0.43, 0.0, 0.19, 0.21, 0.05, 0.24, 0.04, 0.0, 0.04, 0.43, 0.04, 0.78, 0.21)
_MEAN = (1.2, 1.5, 2.2, 1.6, 7.5, 3.5, 1.6, 2.2, 3.8, 0.4, 0.8, 0.2, 1.7)
_DEVIATION = (1.2, 1.5, 1.4, 1.0, 2.2, 1.6, 1.3, 1.0, 1.4, 0.5, 0.7, 0.6, 1.1)
DENSE_FIELDS = tuple(
    DenseField(missing, mean, deviation, -1 if k == 1 else 0)
    for k, (missing, mean, deviation) in enumerate(zip(_MISSING, _MEAN, _DEVIATION, strict=True))
)
DENSE_MISSING = np.iinfo(np.int64).min  # stands for a missing value in `raw_dense`


@dataclass(frozen=True, slots=True)
class SyntheticRows:
    """Generated samples.

    Attributes:
        dense: log1p of the dense values, missing and negative as 0; float32, shape (n, K).
        ids: Row numbers, field after field, hotness[j] lookups each; int64, shape (n, L).
        label: 0.0 or 1.0; float32, shape (n,).
        score: The teacher's logit; float64, shape (n,). `sigmoid(score)` is the true click rate.
    """

    dense: NDArray[np.float32]
    ids: NDArray[np.int64]
    label: NDArray[np.float32]
    score: Float64


def _prefix(seed: int, stream: int, field: int) -> int:
    """Return the part of the counter hash that does not depend on the sample number."""
    inner = elementary.mix_scalar(seed ^ (stream * _K1))
    return elementary.mix_scalar(inner ^ (field * _K2))


def _uniform(seed: int, stream: int, field: int, counter: UInt64) -> Float64:
    prefix = np.uint64(_prefix(seed, stream, field))
    return elementary.unit(elementary.mix(prefix ^ counter))


def _normal_pair(seed: int, stream: int, field: int, counter: UInt64) -> tuple[Float64, Float64]:
    """Return two independent standard normals (Box-Muller of `stream` and `stream` + 1)."""
    radius = np.sqrt(elementary.log(_uniform(seed, stream, field, counter)) * -2.0)
    sine, cosine = elementary.sincos_turn(_uniform(seed, stream + 1, field, counter))
    return radius * cosine, radius * sine


@dataclass(frozen=True, slots=True)
class _FieldConstants:
    """Per-field constants of the rank and row formulas, arrays of shape (J,)."""

    cardinality: NDArray[np.int64]
    span: Float64
    inverse: Float64
    multiplier: NDArray[np.int64]
    offset: NDArray[np.int64]
    hotness: NDArray[np.int64]

    @classmethod
    def of(cls, spec: "SyntheticSpec") -> "_FieldConstants":
        rows = np.array(spec.cardinalities, dtype=np.int64)
        # 1 - a in decimal: 1 - 1.02 is not the double nearest to -0.02.
        power = np.array([round(1.0 - a, 9) for a in spec.exponents], dtype=np.float64)
        log_rows = elementary.log(rows.astype(np.float64) + 1.0)
        is_one = power == 0.0
        span = np.where(is_one, log_rows, elementary.exp(power * log_rows) - 1.0)
        inverse = np.where(is_one, 0.0, 1.0 / np.where(is_one, 1.0, power))
        multiplier, offset = [], []
        for j, count in enumerate(spec.cardinalities):
            factor = (elementary.mix_scalar(_prefix(spec.seed, _MULTIPLIER, j)) % count) | 1
            while math.gcd(factor, count) != 1:
                factor += 2
            multiplier.append(factor)
            offset.append(elementary.mix_scalar(_prefix(spec.seed, _OFFSET, j)) % count)
        return cls(
            cardinality=rows,
            span=span,
            inverse=inverse,
            multiplier=np.array(multiplier, dtype=np.int64),
            offset=np.array(offset, dtype=np.int64),
            hotness=np.array(spec.hotness, dtype=np.int64),
        )


def field_pairs(num_fields: int) -> list[tuple[int, int]]:
    """Return the pairs of fields whose product enters the teacher."""
    pairs = [((3 * p + 1) % num_fields, (7 * p + 4) % num_fields) for p in range(_PAIRS)]
    return [(a, b) for a, b in pairs if a != b]


class SyntheticGenerator:
    """Computes samples of one `SyntheticSpec`, in C++ where the native core is built.

    Safe to use from several threads at once. Draws from no global random generator.
    """

    def __init__(self, spec: "SyntheticSpec", *, native: bool | None = None) -> None:
        """Prepare the constants of `spec`.

        Args:
            spec: What to generate.
            native: True: C++ or an `ImportError`; False: NumPy; None: C++ if there is one.
        """
        if max(spec.cardinalities) >= _ROW_LIMIT:
            raise ValueError(
                f"synthetic data has a field of {max(spec.cardinalities)} rows, "
                f"the limit is {_ROW_LIMIT - 1}\n  do:    lower the cap"
            )
        self.spec = spec
        self._fields = _FieldConstants.of(spec)
        one = np.zeros(1, dtype=np.uint64)
        self._weights = np.array(
            [_normal_pair(spec.seed, _WEIGHT_A, k, one)[0][0] for k in range(len(DENSE_FIELDS))]
        )
        self._pairs = field_pairs(len(spec.cardinalities))
        self._native = self._make_native(native)

    @property
    def is_native(self) -> bool:
        """Whether samples are computed by the native core."""
        return self._native is not None

    def _make_native(self, native: bool | None) -> Callable[..., None] | None:
        if native is False:
            return None
        try:
            from trainingcxl import _core

            make: Any = _core.SyntheticGenerator
        except (ImportError, AttributeError) as error:
            if native:
                raise ImportError(
                    "the native core is not built, or older than this module\n"
                    "  do:    'pip install .' in the source tree builds it; native=False uses NumPy"
                ) from error
            return None
        spec, fields = self.spec, self._fields
        generator = make(
            seed=spec.seed,
            bias=spec.bias,
            rho=spec.rho,
            block_samples=spec.block_samples,
            block_ids=spec.block_ids,
            dense=np.array([(f.missing, f.mean, f.deviation, f.shift) for f in DENSE_FIELDS]),
            weights=self._weights,
            cardinality=fields.cardinality,
            span=fields.span,
            inverse=fields.inverse,
            multiplier=fields.multiplier,
            offset=fields.offset,
            hotness=fields.hotness,
            pairs=np.array(self._pairs, dtype=np.int64).reshape(-1, 2),
        )
        batch: Callable[..., None] = generator.batch
        return batch

    def generate(self, samples: NDArray[np.int64]) -> SyntheticRows:
        """Compute the given samples, in the given order.

        Args:
            samples: Sample numbers, int64, shape (n,), each >= 0; repeats are allowed.

        Returns:
            The samples; see `SyntheticRows` for shapes and types.

        Raises:
            IndexError: A sample number is negative.
        """
        samples = np.ascontiguousarray(samples, dtype=np.int64)
        if samples.ndim != 1:
            raise ValueError(f"sample numbers have shape {samples.shape}, expected (n,)")
        if samples.size and samples.min() < 0:
            raise IndexError(f"sample number {samples.min()} is negative")
        count = samples.size
        rows = SyntheticRows(
            dense=np.empty((count, len(DENSE_FIELDS)), dtype=np.float32),
            ids=np.empty((count, sum(self.spec.hotness)), dtype=np.int64),
            label=np.empty(count, dtype=np.float32),
            score=np.empty(count, dtype=np.float64),
        )
        if self._native is not None:
            self._native(samples, rows.dense, rows.ids, rows.label, rows.score)
            return rows
        for start in range(0, count, _CHUNK):
            part = slice(start, min(start + _CHUNK, count))
            self._generate_numpy(samples[part].astype(np.uint64), rows, part)
        return rows

    def _generate_numpy(self, counter: UInt64, rows: SyntheticRows, part: slice) -> None:
        spec = self.spec
        dense_sum = np.zeros(counter.size)
        for k, field in enumerate(DENSE_FIELDS):
            value, is_missing = self._dense(k, counter)
            logarithm = elementary.log(1.0 + np.maximum(value, 0.0))
            logarithm[is_missing] = 0.0
            rows.dense[part, k] = logarithm
            term = self._weights[k] * (logarithm - field.mean)
            dense_sum = dense_sum + np.where(is_missing, 0.0, term)
        ranks = self._lookups(counter, rows.ids[part])
        effect_sum = np.zeros(counter.size)
        for j, rank in enumerate(ranks):
            effect_sum = effect_sum + _normal_pair(spec.seed, _EFFECT_A, j, rank)[0]
        pair_sum = np.zeros(counter.size)
        factors = {
            j: _normal_pair(spec.seed, _FACTOR_A, j, ranks[j]) for pair in self._pairs for j in pair
        }
        for a, b in self._pairs:
            product = factors[a][0] * factors[b][0] + factors[a][1] * factors[b][1]
            pair_sum = pair_sum + product
        score = (spec.bias + dense_sum / math.sqrt(13.0)) + 0.3 * effect_sum
        score = score + 0.25 * pair_sum
        rows.score[part] = score
        clicked = _uniform(spec.seed, _LABEL, 0, counter) < 1.0 / (1.0 + elementary.exp(-score))
        rows.label[part] = clicked

    def _dense(self, k: int, counter: UInt64) -> tuple[Float64, NDArray[np.bool_]]:
        field, seed = DENSE_FIELDS[k], self.spec.seed
        normal = _normal_pair(seed, _DENSE_A, k, counter)[0]
        value = elementary.floor(elementary.exp(field.mean + field.deviation * normal))
        return value + field.shift, _uniform(seed, _DENSE_MISSING, k, counter) < field.missing

    def raw_dense(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the dense values before log1p, as a Criteo file has them.

        Args:
            samples: Sample numbers, int64, shape (n,).

        Returns:
            Integers, shape (n, K); a missing value is -2^63.
        """
        raw = np.empty((samples.size, len(DENSE_FIELDS)), dtype=np.int64)
        counter = samples.astype(np.uint64)
        for k in range(len(DENSE_FIELDS)):
            value, is_missing = self._dense(k, counter)
            raw[:, k] = np.where(is_missing, np.int64(DENSE_MISSING), value.astype(np.int64))
        return raw

    def _lookups(self, counter: UInt64, ids: NDArray[np.int64]) -> list[UInt64]:
        """Fill `ids`, shape (n, L), and return the ranks of each field's first lookup."""
        fields, first, column = self._fields, [], 0
        for j, hotness in enumerate(self.spec.hotness):
            for h in range(hotness):
                rank = self._rank(j, self._rank_uniform(j, h, counter))
                row = rank * fields.multiplier[j] + fields.offset[j]
                ids[:, column] = row % fields.cardinality[j]
                column += 1
                if h == 0:
                    first.append(rank.astype(np.uint64))
        return first

    def _rank_uniform(self, j: int, h: int, counter: UInt64) -> Float64:
        spec = self.spec
        free = _uniform(spec.seed, _LOOKUP + h, j, counter)
        if spec.rho == 0.0:
            return free
        slot = _uniform(spec.seed, _LOCAL_SLOT + h, j, counter) * float(spec.block_ids)
        slot = elementary.floor(np.minimum(slot, spec.block_ids - 1.0))
        block = counter // np.uint64(spec.block_samples)
        place = block * np.uint64(spec.block_ids) + slot.astype(np.uint64)
        shared = _uniform(spec.seed, _BLOCK_SET, j, place)
        is_local = _uniform(spec.seed, _LOCAL + h, j, counter) <= spec.rho
        return np.where(is_local, shared, free)

    def _rank(self, j: int, u: Float64) -> NDArray[np.int64]:
        """Return the rank by inverting the cumulative Zipf law, 0 = most frequent."""
        scaled = u * self._fields.span[j]
        inverse = self._fields.inverse[j]
        if inverse != 0.0:
            scaled = elementary.log(1.0 + scaled) * inverse
        rank = np.minimum(elementary.exp(scaled) - 1.0, self._fields.cardinality[j] - 1.0)
        return elementary.floor(np.maximum(rank, 0.0)).astype(np.int64)
