"""Sizes of the built-in data set by name, and the text form `synthetic:NAME?key=value&...`."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from trainingcxl.data import elementary
from trainingcxl.data.synthetic import SyntheticGenerator
from trainingcxl.errors import ConfigError

__all__ = ["PRESETS", "SyntheticSpec", "parse_spec", "solve_bias"]

CRITEO_ROWS = (
    1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194,
    27, 14992, 5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572,
)  # fmt: skip
CRITEO_EXPONENTS = (
    2.0, 1.12, 0.99, 1.06, 2.5, 1.9, 0.83, 2.3, 2.5, 1.09, 0.86, 0.99, 0.84,
    1.63, 0.96, 1.02, 1.57, 1.04, 1.69, 0.93, 1.01, 2.5, 1.64, 1.14, 1.83, 1.31,
)  # fmt: skip
MULTI_HOT = (
    3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1,
)  # fmt: skip
CLICK_RATE = 0.25
_BIAS_SAMPLES = 1 << 16
_KAGGLE_SAMPLES = 45_840_617
# Results of `solve_bias` for seed 1, printed by `python -m trainingcxl.data.synthetic_presets`.
_BIASES: dict[str, float] = {
    "tiny": -1.5005,
    "small": -1.545,
    "kaggle": -1.5418,
    "rm1": -1.6738,
    "rm2": -1.6275,
    "rm3": -1.6407,
    "rm4": -1.6407,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class SyntheticSpec:
    """What the generator makes; equal specs give equal data.

    Attributes:
        preset: Name the spec was derived from, for messages.
        seed: 64-bit seed of the data (not of the training).
        num_samples: Samples 0 .. num_samples - 1 make up the data set.
        cardinalities: Rows of each categorical field.
        exponents: Zipf exponent of each categorical field.
        hotness: Lookups a sample makes in each field. Labels depend on the first lookup only.
        rho: Probability that a lookup is drawn from its block's own small set of ids.
        block_samples: Samples that share such a set.
        block_ids: Draws that make up the set of one field.
        bias: Constant term of the teacher, which sets the click rate.
    """

    preset: str
    seed: int = 1
    num_samples: int
    cardinalities: tuple[int, ...]
    exponents: tuple[float, ...]
    hotness: tuple[int, ...]
    rho: float = 0.0
    block_samples: int = 1 << 16
    block_ids: int = 512
    bias: float = 0.0

    def __post_init__(self) -> None:
        """Check ranges and lengths."""
        fields = len(self.cardinalities)
        if not fields == len(self.exponents) == len(self.hotness) or fields == 0:
            raise ConfigError("cardinalities, exponents and hotness need the same, non-zero length")
        checks = (
            ("seed", 0 <= self.seed < 1 << 64, self.seed, "in [0, 2^64)"),
            ("samples", 1 <= self.num_samples < 1 << 62, self.num_samples, "in [1, 2^62)"),
            ("rho", 0.0 <= self.rho <= 1.0, self.rho, "in [0, 1]"),
            ("block_samples", self.block_samples >= 1, self.block_samples, ">= 1"),
            ("block_ids", 1 <= self.block_ids <= 1 << 20, self.block_ids, "in [1, 2^20]"),
            ("cap", min(self.cardinalities) >= 1, min(self.cardinalities), ">= 1"),
            ("hotness", min(self.hotness) >= 1, min(self.hotness), ">= 1"),
            ("hotness", max(self.hotness) <= 1000, max(self.hotness), "<= 1000"),
        )
        for name, is_good, value, valid in checks:
            if not is_good:
                raise ConfigError(f"synthetic data: {name} is {value}, must be {valid}")


def _criteo(name: str, cap: int, num_samples: int) -> SyntheticSpec:
    return SyntheticSpec(
        preset=name,
        num_samples=num_samples,
        cardinalities=tuple(min(rows, cap) for rows in CRITEO_ROWS),
        exponents=CRITEO_EXPONENTS,
        hotness=(1,) * len(CRITEO_ROWS),
    )


def _uniform_tables(name: str, tables: int, lookups: int, exponent: float) -> SyntheticSpec:
    return SyntheticSpec(
        preset=name,
        num_samples=1_000_000,
        cardinalities=(1_000_000,) * tables,
        exponents=(exponent,) * tables,
        hotness=(lookups,) * tables,
    )


PRESETS: dict[str, Callable[[], SyntheticSpec]] = {
    "tiny": partial(_criteo, "tiny", 1_000, 50_000),
    "small": partial(_criteo, "small", 100_000, 1_000_000),
    "kaggle": partial(_criteo, "kaggle", max(CRITEO_ROWS), _KAGGLE_SAMPLES),
    # The evaluation's four models: tables x lookups; exponents give 80 % recurring lookups.
    "rm1": partial(_uniform_tables, "rm1", 10, 80, 1.07),
    "rm2": partial(_uniform_tables, "rm2", 40, 80, 1.07),
    "rm3": partial(_uniform_tables, "rm3", 10, 20, 1.13),
    "rm4": partial(_uniform_tables, "rm4", 10, 20, 1.13),
}


def solve_bias(spec: SyntheticSpec, *, click_rate: float = CLICK_RATE) -> float:
    """Return the teacher's constant that gives `click_rate` on the first 65,536 samples.

    Found by bisection, rounded to four decimals so that it can be written down exactly.
    """
    # Labels depend on first lookups only, so one lookup a field is enough.
    plain = replace(spec, bias=0.0, hotness=(1,) * len(spec.hotness))
    score = SyntheticGenerator(plain).generate(np.arange(_BIAS_SAMPLES)).score
    low, high = -30.0, 30.0
    for _ in range(60):
        middle = (low + high) / 2.0
        # cumsum adds in order; mean() may group differently on another machine.
        probability = 1.0 / (1.0 + elementary.exp(-(score + middle)))
        if float(np.cumsum(probability)[-1]) / score.size < click_rate:
            low = middle
        else:
            high = middle
    return round(high, 4)


_OPTIONS: dict[str, Callable[[str], Any]] = {
    "samples": int, "seed": int, "rho": float, "block_samples": int, "block_ids": int,
    "cap": int, "multi_hot": int,
}  # fmt: skip


def _options(text: str) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for item in filter(None, text.split("&")):
        key, _, value = item.partition("=")
        if key not in _OPTIONS:
            raise ConfigError(
                f"synthetic data: unknown option '{key}'\n  do:    known are {', '.join(_OPTIONS)}"
            )
        try:
            values[key] = _OPTIONS[key](value)
        except ValueError:
            kind = _OPTIONS[key].__name__
            raise ConfigError(f"synthetic data: {key}='{value}' is not of type {kind}") from None
    return values


def parse_spec(text: str) -> SyntheticSpec:
    """Make a spec from `NAME[?key=value&...]`.

    Args:
        text: A preset (tiny, small, kaggle, rm1 .. rm4) and options: samples, seed, rho,
            block_samples, block_ids, cap (most rows of a field), multi_hot (1: several lookups
            a field, in the numbers of the MLPerf DLRM v2 data).

    Raises:
        ConfigError: Unknown preset or option, or a value out of range.
    """
    name, _, query = text.partition("?")
    if name not in PRESETS:
        raise ConfigError(
            f"synthetic data: unknown preset '{name}'\n  do:    known are {', '.join(PRESETS)}"
        )
    options = _options(query)
    default = PRESETS[name]()
    cap = options.pop("cap", max(default.cardinalities))
    multi_hot = options.pop("multi_hot", 0)
    if multi_hot not in (0, 1):
        raise ConfigError(f"synthetic data: multi_hot is {multi_hot}, must be 0 or 1")
    if multi_hot and len(default.hotness) != len(MULTI_HOT):
        raise ConfigError(f"synthetic data: preset '{name}' has no multi_hot variant")
    if "samples" in options:
        options["num_samples"] = options.pop("samples")
    spec = replace(
        default,
        cardinalities=tuple(min(rows, cap) for rows in default.cardinalities),
        hotness=MULTI_HOT if multi_hot else default.hotness,
        **options,
    )
    is_listed = name in _BIASES and (spec.seed, spec.rho) == (default.seed, 0.0)
    if is_listed and spec.cardinalities == default.cardinalities:
        return replace(spec, bias=_BIASES[name])
    return replace(spec, bias=solve_bias(spec))


if __name__ == "__main__":
    for preset_name, make in PRESETS.items():
        print(f'    "{preset_name}": {solve_bias(make())},')
