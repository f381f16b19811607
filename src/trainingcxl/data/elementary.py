"""Elementary functions with the same bits on every machine.

`numpy.log`, `exp` and `cos` round differently from one processor and library to the next, so
nothing that must come out equal after a resume elsewhere may use them. The functions here are built
from IEEE 754 double operations that are exactly specified (+ - * / sqrt, bit patterns) in a fixed
order. `csrc/synthetic.cc` does the same operations in the same order, and
`tests/data/synthetic_vectors.json` pins the results. Relative errors are below 1e-15.
"""

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = ["Float64", "UInt64", "exp", "floor", "log", "mix", "mix_scalar", "sincos_turn", "unit"]

Float64: TypeAlias = NDArray[np.float64]
UInt64: TypeAlias = NDArray[np.uint64]

_MASK64 = (1 << 64) - 1
_MIX1 = 0xBF58476D1CE4E5B9
_MIX2 = 0x94D049BB133111EB
_LN2_HI = float.fromhex("0x1.62e42fee00000p-1")  # low 21 bits zero: k * _LN2_HI is exact
_LN2_LO = float.fromhex("0x1.a39ef35793c76p-33")
_LOG2_E = float.fromhex("0x1.71547652b82fep+0")
_HALF_PI = float.fromhex("0x1.921fb54442d18p+0")
_SQRT2_BITS = 0x3FF6A09E667F3BCD
_TWO52 = 4503599627370496.0
_ROUND = 6755399441055744.0  # 1.5 * 2^52: adding and subtracting it rounds to nearest even
_LOG_TERMS = tuple(2.0 / (2 * k + 1) for k in range(11, 0, -1))


def _inverse_factorials(degrees: range, alternate: bool) -> tuple[float, ...]:
    terms = []
    for degree in degrees:
        factorial = 1
        for factor in range(2, degree + 1):
            factorial *= factor
        sign = -1.0 if alternate and (degree // 2) % 2 else 1.0
        terms.append(sign / factorial)
    return tuple(terms)


_EXP_TERMS = _inverse_factorials(range(13, 1, -1), alternate=False)
_SIN_TERMS = _inverse_factorials(range(17, 1, -2), alternate=True)
_COS_TERMS = _inverse_factorials(range(16, 1, -2), alternate=True)


def mix_scalar(value: int) -> int:
    """Return the SplitMix64 finaliser of one 64-bit integer."""
    value &= _MASK64
    value = ((value ^ (value >> 30)) * _MIX1) & _MASK64
    value = ((value ^ (value >> 27)) * _MIX2) & _MASK64
    return value ^ (value >> 31)


def mix(value: UInt64) -> UInt64:
    """Return the SplitMix64 finaliser of each element; a bijection of 64-bit integers."""
    value = (value ^ (value >> np.uint64(30))) * np.uint64(_MIX1)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(_MIX2)
    return value ^ (value >> np.uint64(31))


def unit(bits: UInt64) -> Float64:
    """Map 64 random bits to a uniform number in (0, 1], never 0."""
    return ((bits >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53


def _horner(x: Float64, terms: tuple[float, ...]) -> Float64:
    total = np.full_like(x, terms[0])
    for term in terms[1:]:
        total *= x
        total += term
    return total


def floor(x: Float64) -> Float64:
    """Round 0 <= x < 2^51 down, by additions only."""
    nearest = (x + _TWO52) - _TWO52
    return np.where(nearest > x, nearest - 1.0, nearest)


def log(x: Float64) -> Float64:
    """Natural logarithm of finite, normal x > 0."""
    bits = np.ascontiguousarray(x, dtype=np.float64).view(np.int64)
    # Mantissa scaled to [sqrt(1/2), sqrt(2)), so that the series argument s stays below 0.172.
    above = ((bits & 0xFFFFFFFFFFFFF) | 0x3FF0000000000000) >= _SQRT2_BITS
    exponent = ((bits >> 52) - 1023 + above).astype(np.float64)
    mantissa_bits = (bits & 0xFFFFFFFFFFFFF) | np.where(
        above, np.int64(0x3FE0000000000000), np.int64(0x3FF0000000000000)
    )
    mantissa = mantissa_bits.view(np.float64)
    s = (mantissa - 1.0) / (mantissa + 1.0)
    square = s * s
    tail = s * (square * _horner(square, _LOG_TERMS)) + exponent * _LN2_LO
    return exponent * _LN2_HI + ((s + s) + tail)


def exp(x: Float64) -> Float64:
    """Exponential of x; arguments are clamped to [-700, 700]."""
    x = np.minimum(np.maximum(x, -700.0), 700.0)
    power = (x * _LOG2_E + _ROUND) - _ROUND
    rest = (x - power * _LN2_HI) - power * _LN2_LO
    series = (_horner(rest, _EXP_TERMS) * rest) * rest + rest + 1.0
    scale = ((power.astype(np.int64) + 1023) << 52).view(np.float64)
    return series * scale


def sincos_turn(u: Float64) -> tuple[Float64, Float64]:
    """Sine and cosine of 2 * pi * u for 0 <= u <= 1."""
    quarter = u * 4.0
    nearest = (quarter + _ROUND) - _ROUND
    angle = (quarter - nearest) * _HALF_PI
    square = angle * angle
    sine = (_horner(square, _SIN_TERMS) * square) * angle + angle
    cosine = _horner(square, _COS_TERMS) * square + 1.0
    quadrant = nearest.astype(np.int64) & 3
    swap = (quadrant & 1) == 1
    first = np.where(swap, cosine, sine)
    second = np.where(swap, sine, cosine)
    return (
        np.where(quadrant >= 2, -first, first),
        np.where((quadrant == 1) | (quadrant == 2), -second, second),
    )
