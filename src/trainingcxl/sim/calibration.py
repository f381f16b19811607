"""The honest-calibration rule: which constants are fitted, on what, and that nothing else is.

Exactly one constant per fitted target; hold-out targets are never read here. The frozen file
carries a fingerprint of every input, so that no input can change without a new version of it.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from trainingcxl.sim.closed_form import solve
from trainingcxl.sim.errors import parameter_error
from trainingcxl.sim.hardware import DATA, Hardware, load_hardware
from trainingcxl.sim.parameters import read_toml
from trainingcxl.sim.systems import SYSTEMS, System, build_schedule
from trainingcxl.sim.targets import TARGETS
from trainingcxl.sim.workload import Model, model_set

__all__ = [
    "FITTED_ON",
    "Calibration",
    "check_rule",
    "fit",
    "fit_host_lines",
    "frozen_calibration",
    "inputs_fingerprint",
]

FITTED_ON = {
    "media.pmem.read_after_write": "T3",
    "host.outstanding_lines": "T1",
    "media.ssd.write_latency_ns": "T4",
}
_DIGITS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Fitted constants by key, the target of each, and the inputs they were fitted with."""

    version: int
    constants: Mapping[str, float]
    fitted_on: Mapping[str, str]
    inputs_sha256: str


def frozen_calibration() -> Calibration:
    """Read the calibration that ships with the model."""
    file = read_toml(DATA / "calibration.toml")
    constants = {key: float(entry["value"]) for key, entry in file["constants"].items()}
    fitted_on = {key: str(entry["target"]) for key, entry in file["constants"].items()}
    return Calibration(
        version=file["version"],
        constants=constants,
        fitted_on=fitted_on,
        inputs_sha256=file["inputs_sha256"],
    )


def inputs_fingerprint() -> str:
    """Hash every input of the default model: unfitted hardware, systems, the paper's models."""
    inputs: dict[str, Any] = {
        "hardware": load_hardware(calibrated=False).values(),
        "systems": {name: asdict(system) for name, system in SYSTEMS.items()},
        "models": [asdict(model) for model in model_set("paper")],
    }
    return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()


def check_rule(calibration: Calibration) -> None:
    """Refuse a calibration that breaks the honest-calibration rule.

    Raises:
        ParameterError: A constant is fitted on a hold-out or on a target another one has, there are
            more constants than fitted targets, or an input changed after the freeze.
    """
    where = f"calibration.toml version {calibration.version}"
    fitted = [t.name for t in TARGETS.values() if t.is_fitted]
    targets = list(calibration.fitted_on.values())
    if len(calibration.constants) > len(fitted):
        raise parameter_error(
            f"{len(calibration.constants)} constants for {len(fitted)} fitted targets",
            where=where,
            do="a new constant needs a new target that it leaves unfitted",
        )
    for key, target in calibration.fitted_on.items():
        if target not in fitted or targets.count(target) > 1:
            raise parameter_error(
                f"constant '{key}' is fitted on {target}",
                where=where,
                do=f"one constant for each of {', '.join(fitted)}; the others are hold-outs",
            )
    if calibration.inputs_sha256 != inputs_fingerprint():
        raise parameter_error(
            "an input changed after the freeze: the fingerprints differ",
            where=where,
            do="fit again, raise the version, and say why in docs/simulator.md",
        )


def _time(system: System, hardware: Hardware, model: Model) -> float:
    return solve(build_schedule(system, hardware, model)).seconds_per_batch


def _mean_ratio(pairs: tuple[System, System], hardware: Hardware, models: Sequence[Model]) -> float:
    above, below = pairs
    ratios = [_time(above, hardware, m) / _time(below, hardware, m) for m in models]
    return sum(ratios) / len(ratios)


def _secant(function: Callable[[float], float], low: float, high: float) -> float:
    """Find a root of a smooth monotonic function near [low, high]."""
    at_low, at_high = function(low), function(high)
    for _ in range(40):
        if abs(at_high - at_low) < 1e-14 or abs(at_high) < 1e-10:
            break
        step = high - at_high * (high - low) / (at_high - at_low)
        low, at_low = high, at_high
        high, at_high = max(step, high / 10.0), function(max(step, high / 10.0))
    return high


def fit_host_lines(hardware: Hardware, models: Sequence[Model]) -> float:
    """Fit the host's outstanding lines on T1, everything else as given."""
    key = "host.outstanding_lines"
    fast = [_time(SYSTEMS["CXL"], hardware, m) for m in models]

    def miss(inverse: float) -> float:
        changed = hardware.with_values({key: 1.0 / inverse})
        slow = [_time(SYSTEMS["PMEM"], changed, m) for m in models]
        speedups = [s / f for s, f in zip(slow, fast, strict=True)]
        return sum(speedups) / len(speedups) / TARGETS["T1"].paper - 1.0

    # PMEM's time is affine in 1/K: the host waits for lines, K at a time.
    return 1.0 / _secant(miss, 1.0 / 32.0, 1.0 / 64.0)


def fit(
    hardware: Hardware | None = None, models: Sequence[Model] | None = None
) -> dict[str, float]:
    """Fit the three constants to three digits, in the order T3, T1, T4.

    Args:
        hardware: The machine; its own values of the three constants do not matter.
        models: The paper's four models.

    Returns:
        The fitted constants by key.
    """
    hardware = hardware or load_hardware(calibrated=False)
    models = models or model_set("paper")
    found: dict[str, float] = {}

    def settle(key: str, value: float) -> None:
        nonlocal hardware
        assert hardware is not None
        found[key] = float(f"{value:.{_DIGITS}g}")
        hardware = hardware.with_values({key: found[key]})

    def raw_miss(value: float) -> float:
        changed = hardware.with_values({"media.pmem.read_after_write": value})
        ratio = _mean_ratio((SYSTEMS["CXL"], SYSTEMS["CXL-B"]), changed, models)
        return 100.0 * (ratio - 1.0) / TARGETS["T3"].paper - 1.0

    settle("media.pmem.read_after_write", _secant(raw_miss, 1.2, 2.0))
    settle("host.outstanding_lines", fit_host_lines(hardware, models))
    ssd, pmem = (replace(SYSTEMS[n], has_checkpoint=False) for n in ("SSD", "PMEM"))

    def ssd_miss(value: float) -> float:
        changed = hardware.with_values({"media.ssd.write_latency_ns": value})
        return _mean_ratio((ssd, pmem), changed, models[:2]) / TARGETS["T4"].paper - 1.0

    settle("media.ssd.write_latency_ns", _secant(ssd_miss, 20_000.0, 100_000.0))
    return found
