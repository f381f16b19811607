"""What moves each target: constants one by one, named variants, ablations, the ladder of ideas."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from trainingcxl.sim.calibration import fit_host_lines
from trainingcxl.sim.hardware import Hardware
from trainingcxl.sim.simulate import Result, simulate
from trainingcxl.sim.systems import SYSTEMS, System
from trainingcxl.sim.targets import evaluate_targets
from trainingcxl.sim.trace import zipf_localities
from trainingcxl.sim.workload import Model, model_set

__all__ = [
    "LADDER",
    "Variant",
    "ladder",
    "sensitivity",
    "structural_variants",
    "workload_variants",
]

Values = dict[str, float]
_STEP = 0.2
_UNUSED = ("economics.", "media.optane.", "media.cxl_dram.", "media.cmm_h.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One changed assumption and the targets under it.

    `is_refitted` tells whether the host's outstanding lines were fitted again on T1.
    """

    name: str
    why: str
    values: Values
    is_refitted: bool


def sensitivity(
    hardware: Hardware, models: Sequence[Model], base: Values
) -> dict[str, dict[str, Values]]:
    """Change each number of the machine by -20 % and +20 % and report how the targets move.

    Nothing is fitted again, so T1, T3 and T4 move too. Whole numbers move by at least one. Numbers
    without any effect on a target are left out.

    Returns:
        For each key, "-20 %" and "+20 %", the change of each target in its own unit.
    """
    found = {}
    for key, value in hardware.values().items():
        if isinstance(value, str) or key.startswith(_UNUSED):
            continue
        moves = {}
        for sign, label in ((-1.0, "-20 %"), (1.0, "+20 %")):
            changed = _moved(hardware, key, value, sign)
            if changed is not None:
                values = evaluate_targets(changed, models)
                moves[label] = {name: values[name] - base[name] for name in base}
        if any(abs(d) >= 5e-3 for move in moves.values() for d in move.values()):
            found[key] = moves
    return found


def _moved(hardware: Hardware, key: str, value: float, sign: float) -> Hardware | None:
    step = _STEP * value
    if isinstance(value, int):
        step = max(round(step), 1)
    try:
        return hardware.with_values({key: value + sign * step})
    except ValueError:  # the range of the number ends here
        return None


def _all(models: Sequence[Model], change: Callable[[Model], Model]) -> list[Model]:
    return [change(model) for model in models]


def workload_variants(hardware: Hardware, models: Sequence[Model]) -> list[Variant]:
    """The variants of `hardware-model` section 7: other workloads and media, K fitted again."""

    def with_share(share: float) -> list[Model]:
        return _all(models, lambda m: m.with_locality(replace(m.locality, unique_share=share)))

    def traced(model: Model) -> Model:
        channels = hardware.expander.channels
        found = zipf_localities(model, reuse=0.8, channels=channels, batches=1)
        return model.with_locality(found[0])

    dram = hardware.media["dram"]
    latency_only = {
        "media.pmem.read_gbps": dram.read_gbps,
        "media.pmem.write_gbps": dram.write_gbps,
    }
    raw = hardware.media["pmem"].read_after_write
    optane = {
        f"media.pmem.{name}": getattr(hardware.media["optane"], name)
        for name in ("read_latency_ns", "write_latency_ns", "read_gbps", "write_gbps")
    }
    deep = [*model_set("deeprecinfra"), models[3]]
    return [
        _variant("unique rows 0.10 of lookups", "more row combining", hardware, with_share(0.1)),
        _variant("unique rows 0.50 of lookups", "less reuse in a batch", hardware, with_share(0.5)),
        _variant(
            "batch 256", "smaller batch", hardware, _all(models, lambda m: replace(m, batch=256))
        ),
        _variant("8 channels", "wider expander", hardware, models, {"expander.channels": 8}),
        _variant(
            "optane media",
            "measured modules in place of the paper's ratios",
            hardware,
            models,
            {**optane, "media.pmem.read_after_write": raw},
        ),
        _variant("latency-only media", "PMEM with DRAM bandwidth", hardware, models, latency_only),
        _variant("DeepRecInfra RM1-RM3, our RM4", "another set of shapes", hardware, deep),
        _variant(
            "generated Zipf trace",
            "row ids drawn, 80 % reuse, instead of the two constants",
            hardware,
            _all(models, traced),
        ),
    ]


def _variant(
    name: str,
    why: str,
    hardware: Hardware,
    models: Sequence[Model],
    changes: Mapping[str, Any] | None = None,
    *,
    systems: Mapping[str, System] = SYSTEMS,
    is_refitted: bool = True,
) -> Variant:
    changed = hardware.with_values(changes or {})
    if is_refitted:
        lines = fit_host_lines(changed, models)
        changed = changed.with_values({"host.outstanding_lines": lines})
    values = evaluate_targets(changed, models, systems=systems)
    return Variant(name=name, why=why, values=values, is_refitted=is_refitted)


def _systems(**switches: Any) -> dict[str, System]:
    return {name: replace(system, **switches) for name, system in SYSTEMS.items()}


def structural_variants(hardware: Hardware, models: Sequence[Model]) -> list[Variant]:
    """Ablations of the structural assumptions, and ideas that would explain misses better."""
    pmem = hardware.media["pmem"]
    free_calls = {"software.sync_us": 0, "software.copy_us": 0}

    def ablation(
        name: str,
        why: str,
        changes: Mapping[str, Any] | None = None,
        systems: Mapping[str, System] = SYSTEMS,
    ) -> Variant:
        return _variant(name, why, hardware, models, changes, systems=systems, is_refitted=False)

    found = [
        ablation(
            "no host-bounced log in PCIe",
            "post hoc assumption that carries T2",
            systems=_systems(host_bounced_log=False),
        ),
        ablation("driver calls cost nothing", "T2 is not from call overhead", free_calls),
        ablation(
            "MLP parameters logged every batch",
            "half of T3 comes from spreading them",
            systems=_systems(relaxed_dense_log=False),
        ),
        ablation("correction costs nothing", "X/2 is our choice", systems=_systems(correction=0.0)),
        ablation("correction costs X", "X/2 is our choice", systems=_systems(correction=1.0)),
        ablation(
            "lighter writes by row combining",
            "half the write time of PMEM; would let CXL-B help RM1 and RM2",
            {"media.pmem.write_gbps": 2.0 * pmem.write_gbps},
        ),
    ]
    found += [
        ablation(
            f"GPU efficiency {share}",
            "T6 suggests that the GPU's share of RM4 is larger",
            {"gpu.efficiency": share},
        )
        for share in (0.35, 0.25)
    ]
    found += [
        ablation(
            f"DRAM pool of {modules} DIMMs",
            "T7 needs a larger pool than 2 TB",
            {"media.dram.modules": modules},
        )
        for modules in (128, 192, 256)
    ]
    return found


LADDER: tuple[tuple[str, dict[str, Any]], ...] = (
    ("PMEM", {}),
    ("+ near-memory compute", {"near_memory": True}),
    ("+ hardware movement", {"hardware_movement": True}),
    ("+ batch-aware log", {"batch_aware_log": True}),
    ("+ relaxed lookup", {"relaxed_lookup": True}),
    ("+ relaxed dense log", {"relaxed_dense_log": True}),
)


def ladder(hardware: Hardware, models: Sequence[Model]) -> dict[str, dict[str, dict[str, float]]]:
    """Add the ideas one by one to PMEM, and take each one alone out of CXL.

    Returns:
        "added" and "removed": seconds a batch by idea and model.
    """

    def times(system: System) -> dict[str, float]:
        results: dict[str, Result] = {m.name: simulate(system, hardware, m) for m in models}
        return {name: result.seconds_per_batch for name, result in results.items()}

    added, removed = {}, {}
    system = SYSTEMS["PMEM"]
    for label, switch in LADDER:
        system = replace(system, **switch)
        added[label] = times(system)
    for label, switch in LADDER[1:]:
        off: dict[str, Any] = dict.fromkeys(switch, False)
        removed[label.replace("+", "without")] = times(replace(SYSTEMS["CXL"], **off))
    return {"added": added, "removed": removed}
