"""The machine: media, expander, link, GPU, host and software as frozen dataclasses.

Every number lives in `data/hardware.toml` with a tag and a source, or in `data/calibration.toml`
when it is fitted. A user's file and `--set` options override single keys.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

from trainingcxl.sim.errors import parameter_error
from trainingcxl.sim.parameters import (
    Note,
    build,
    nearest,
    number,
    read_toml,
    text,
    unpack,
    whole,
)

__all__ = [
    "DATA",
    "Economics",
    "Expander",
    "Gpu",
    "Hardware",
    "Host",
    "Link",
    "Medium",
    "Software",
    "load_hardware",
    "parse_assignment",
]

DATA = Path(__file__).parent / "data"


@dataclass(frozen=True, slots=True, kw_only=True)
class Medium:
    """One kind of memory or storage module. Bandwidths are per channel (one module a channel)."""

    read_latency_ns: float = number(0, 1e9, "ns", above=True)
    write_latency_ns: float = number(0, 1e9, "ns", above=True)
    read_gbps: float = number(0, 1e5, "GB/s", above=True)
    write_gbps: float = number(0, 1e5, "GB/s", above=True)
    access_bytes: int = whole(1, 1 << 20, "bytes")
    read_after_write: float = number(1, 100, "x")
    read_pj_per_bit: float = number(0, 1e6, "pJ/bit")
    write_pj_per_bit: float = number(0, 1e6, "pJ/bit")
    module_w: float = number(0, 1e4, "W")
    active_w: float = number(0, 1e4, "W")
    modules: int = whole(1, 1 << 20, "modules")
    module_gb: float = number(0, 1e6, "GB", above=True)

    @property
    def capacity_bytes(self) -> float:
        """Bytes of all modules of the pool together."""
        return self.modules * self.module_gb * 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Economics:
    """Price and endurance of a medium. Price is relative to DRAM; see the note for its date."""

    price_ratio: float = number(0, 1e4, "x DRAM per GB")
    rated_writes: float = number(0, 1e18, "full writes of the module", above=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Expander:
    """CXL-MEM: channels of one medium, computing logic and checkpointing logic beside them."""

    medium: str = text()
    channels: int = whole(1, 1024, "channels")
    logic_gbps: float = number(0, 1e5, "GB/s per channel", above=True)
    logic_w: float = number(0, 1e4, "W")


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One x16 link, each direction at full bandwidth; `kind` names the preset it started from."""

    kind: str = text()
    bandwidth_gbps: float = number(0, 1e5, "GB/s", above=True)
    flush_ns: float = number(0, 1e9, "ns")
    hop_ns: float = number(0, 1e9, "ns")
    switch_hops: int = whole(0, 16, "hops")
    pj_per_bit: float = number(0, 1e6, "pJ/bit")

    @property
    def start_s(self) -> float:
        """Seconds before the first line of a flushed transfer arrives."""
        return (self.flush_ns + self.switch_hops * self.hop_ns) * 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Software:
    """What a call of the driver costs the host."""

    sync_us: float = number(0, 1e6, "us")
    copy_us: float = number(0, 1e6, "us")

    @property
    def call_s(self) -> float:
        """Seconds of one synchronisation and one copy submission."""
        return (self.sync_us + self.copy_us) * 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """The device that runs the MLPs."""

    peak_tflops: float = number(0, 1e5, "TFLOP/s", above=True)
    efficiency: float = number(0, 1, "share of peak", above=True)
    memory_gbps: float = number(0, 1e6, "GB/s", above=True)
    memory_efficiency: float = number(0, 1, "share of peak", above=True)
    processors: int = whole(1, 100000, "SMs")
    tile: int = whole(1, 4096, "rows and columns")
    launches: int = whole(1, 1000, "kernels per layer")
    launch_us: float = number(0, 1e6, "us")
    backward_launches: float = number(1, 10, "x forward")
    interaction_passes: float = number(0, 100, "passes, forward and backward together")
    active_w: float = number(0, 1e5, "W")
    idle_w: float = number(0, 1e5, "W")


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """The CPU: how many lines it keeps in flight, and how fast it coalesces gradients in DRAM."""

    outstanding_lines: float = number(0, 1e6, "lines", above=True)
    line_bytes: int = whole(1, 4096, "bytes")
    expand_gbps: float = number(0, 1e5, "GB/s", above=True)
    expand_passes: float = number(0, 100, "passes")
    active_w: float = number(0, 1e5, "W")
    idle_w: float = number(0, 1e5, "W")
    dram_w: float = number(0, 1e5, "W")


_SINGLE: dict[str, type[Any]] = {
    "expander": Expander,
    "link": Link,
    "gpu": Gpu,
    "host": Host,
    "software": Software,
}
_MANY: dict[str, type[Any]] = {"media": Medium, "economics": Economics}


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """A complete machine and, per dotted key, where each number comes from."""

    media: Mapping[str, Medium]
    economics: Mapping[str, Economics]
    expander: Expander
    link: Link
    gpu: Gpu
    host: Host
    software: Software
    notes: Mapping[str, Note]

    @property
    def pool(self) -> Medium:
        """The medium behind the expander's channels."""
        return self.media[self.expander.medium]

    def values(self) -> dict[str, Any]:
        """Return every number by dotted key, in file order."""
        found: dict[str, Any] = {}
        for section in _MANY:
            for name, part in getattr(self, section).items():
                found |= {f"{section}.{name}.{f.name}": getattr(part, f.name) for f in fields(part)}
        for section in _SINGLE:
            part = getattr(self, section)
            found |= {f"{section}.{f.name}": getattr(part, f.name) for f in fields(part)}
        return found

    def with_values(self, changes: Mapping[str, Any], *, where: str = "argument") -> "Hardware":
        """Return a machine with some dotted keys replaced; bad keys or values are refused."""
        tree = _Tree(self.values(), dict(self.notes), {})
        for key, value in changes.items():
            tree.assign(key, value, where=where, note=Note("U", where))
        return tree.freeze()


@cache
def _shipped() -> dict[str, Any]:
    return read_toml(DATA / "hardware.toml")


class _Tree:
    """Dotted keys being merged from several files before they are checked and frozen."""

    def __init__(
        self, values: dict[str, Any], notes: dict[str, Note], places: dict[str, str]
    ) -> None:
        self.values = values
        self.notes = notes
        self.places = places
        self.is_sealed = bool(values)
        self.presets: dict[str, Any] = _shipped()["links"]

    def assign(self, key: str, value: Any, *, where: str, note: Note) -> None:
        if self.is_sealed and key not in self.values and not self._is_new_medium(key):
            raise parameter_error(
                f"key '{key}' is unknown (value {value!r})", where=where, do=self._advice(key)
            )
        self.values[key], self.places[key], self.notes[key] = value, where, note
        if key == "link.kind" and self.is_sealed:
            self._apply_preset(value, where)

    def _is_new_medium(self, key: str) -> bool:
        head = key.split(".")
        return len(head) == 3 and head[0] in _MANY and f"{head[0]}.dram.{head[2]}" in self.values

    def _advice(self, key: str) -> str:
        prefix, _, last = key.rpartition(".")
        inside = {k.rpartition(".")[2] for k in self.values if k.rpartition(".")[0] == prefix}
        if inside:
            return nearest(last, inside)
        return nearest(prefix or key, {k.rpartition(".")[0] for k in self.values})

    def _apply_preset(self, kind: Any, where: str) -> None:
        if kind not in self.presets:
            raise parameter_error(
                f"key 'link.kind' is {kind!r}", where=where, do=f"one of {', '.join(self.presets)}"
            )
        for name, raw in self.presets[kind].items():
            value, note = unpack(
                raw, key=f"links.{kind}.{name}", where=where, default=Note("C", "")
            )
            self.values[f"link.{name}"], self.notes[f"link.{name}"] = value, note

    def merge(
        self, tree: Mapping[str, Any], *, where: str, default: Note, prefix: str = ""
    ) -> None:
        for name, raw in sorted(tree.items(), key=lambda item: item[0] != "kind"):
            key = f"{prefix}{name}"
            depth = key.count(".")
            is_section = isinstance(raw, Mapping) and depth < (
                2 if key.startswith(tuple(_MANY)) else 1
            )
            if is_section:
                self.merge(raw, where=where, default=default, prefix=f"{key}.")
            else:
                value, note = unpack(raw, key=key, where=where, default=default)
                self.assign(key, value, where=where, note=note)

    def freeze(self) -> Hardware:
        parts: dict[str, Any] = {}
        for section, kind in _SINGLE.items():
            parts[section] = self._part(kind, section)
        for section, kind in _MANY.items():
            names = dict.fromkeys(
                k.split(".")[1] for k in self.values if k.startswith(f"{section}.")
            )
            parts[section] = {name: self._part(kind, f"{section}.{name}") for name in names}
        medium = parts["expander"].medium
        if medium not in parts["media"]:
            raise parameter_error(
                f"key 'expander.medium' is {medium!r}",
                where=self.places.get("expander.medium", "argument"),
                do=nearest(medium, parts["media"]),
            )
        return Hardware(**parts, notes=self.notes)

    def _part(self, kind: type[Any], prefix: str) -> Any:
        keys = [k for k in self.values if k.rpartition(".")[0] == prefix]
        values = {k.rpartition(".")[2]: self.values[k] for k in keys}
        places = {k.rpartition(".")[2]: self.places.get(k, "argument") for k in keys}
        return build(kind, values, prefix=prefix, where=places)


def parse_assignment(item: str) -> tuple[str, Any]:
    """Split `key=value` of a command line; the value is a number where it reads as one."""
    key, sign, raw = item.partition("=")
    if not sign or not key or not raw:
        raise parameter_error(
            f"'{item}' is not an assignment",
            where="--set",
            do="write key=value, as link.bandwidth_gbps=50",
        )
    try:
        value: Any = float(raw)
    except ValueError:
        return key.strip(), raw.strip()
    return key.strip(), int(value) if value.is_integer() else value


def load_hardware(
    path: Path | None = None,
    *,
    assignments: Sequence[str] = (),
    calibrated: bool = True,
) -> Hardware:
    """Load the shipped machine, a user's overrides and single assignments, in this order.

    Args:
        path: TOML file with any of the sections of `data/hardware.toml`; None for none.
        assignments: `key=value` strings, applied last.
        calibrated: Apply the fitted constants of `data/calibration.toml`.

    Raises:
        ParameterError: An unknown key, a wrong unit, a value out of range; names file and key.
    """
    tree = _Tree({}, {}, {})
    source = {k: v for k, v in _shipped().items() if k != "links"}
    tree.merge(source, where="hardware.toml", default=Note("C", "not stated"))
    tree.is_sealed = True
    if calibrated:
        file = read_toml(DATA / "calibration.toml")
        for key, entry in file["constants"].items():
            note = Note("F", f"fitted on {entry['target']}, calibration {file['version']}")
            tree.assign(key, entry["value"], where="calibration.toml", note=note)
    if path is not None:
        tree.merge(read_toml(path), where=str(path), default=Note("U", str(path)))
    for item in assignments:
        key, value = parse_assignment(item)
        tree.assign(key, value, where=f"--set {item}", note=Note("U", "--set"))
    return tree.freeze()
