"""What every benchmark script shares: its options, its JSON document and its table.

A script has measurements by name. Each gives figures (a bar looks at one of them), the times of its
candidates, and facts. `--only` makes some of them, `--json` writes the document.
"""

import argparse
import ctypes
import gc
import importlib.metadata
import json
import os
import platform
import shutil
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rounds import ForeignLoad, Times, disturbance, interleave, spread

SCHEMA = 1
_PACKAGES = ("torch", "numpy", "trainingcxl", "fbgemm-gpu-cpu", "torchrec", "torchsnapshot")


class Skipped(Exception):
    """This measurement cannot be made here; says why."""


@dataclass
class Result:
    """What one measurement found."""

    times: dict[str, Times] = field(default_factory=dict)
    figures: dict[str, Sequence[float]] = field(default_factory=dict)
    """Values of the kept rounds (or one value) by the figure's name."""
    skipped: dict[str, str] = field(default_factory=dict)
    """Figures that cannot be had here, and why."""
    facts: dict[str, Any] = field(default_factory=dict)
    threads: int | None = None
    """Of the candidates, for the rule of disturbance; None where they wait for a medium."""
    is_timed: bool = True
    """False: no load of others changes the figures."""
    doubt: str = ""
    """Why the rounds are not what they should be; counts as a disturbance."""


Measurement = Callable[[argparse.Namespace], Result]


def options(doc: str) -> argparse.ArgumentParser:
    """The options that every script has."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="measurements, separated by commas")
    parser.add_argument("--list", action="store_true", help="print the measurements' names")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--quick", action="store_true", help="fewer and smaller, for a look")
    parser.add_argument("--dir", type=Path, default=Path("/dev/shm"), help="of pools in memory")
    parser.add_argument(
        "--disk", type=Path, default=Path("build/bench"), help="folder on an ordinary disk"
    )
    parser.add_argument(
        "--new-buffers", action="store_true", help="leave the allocator as it is: new pages a step"
    )
    parser.add_argument("--json", type=Path, help="file for the document")
    return parser


def run_script(
    script: str,
    measurements: Mapping[str, Measurement],
    parser: argparse.ArgumentParser,
    *,
    quick: Sequence[str] = (),
) -> None:
    """Makes the chosen measurements, prints and writes them. `quick`: those of --quick."""
    args = parser.parse_args()
    names = [name for name in args.only.split(",") if name]
    if unknown := [name for name in names if name not in measurements]:
        parser.error(f"--only {','.join(unknown)}: there are {', '.join(measurements)}")
    names = names or [n for n in measurements if not args.quick or not quick or n in quick]
    if args.list:
        print("\n".join(names))
        return
    made = [measure(name, measurements[name], args) for name in names]
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(document(script, made, args), indent=1) + "\n")
    if any(one["failed"] for one in made):
        raise SystemExit(1)


def measure(name: str, call: Measurement, args: argparse.Namespace) -> dict[str, Any]:
    """One measurement as it stands in the document; prints its table."""
    load, started = ForeignLoad(), time.monotonic()
    nothing = {"name": name, "skipped": "", "failed": "", "figures": {}, "times": {}, "facts": {}}
    try:
        result = call(args)
    except Skipped as reason:
        print(f"\n{name}: skipped: {reason}", flush=True)
        return {**nothing, "skipped": str(reason)}
    except Exception as error:  # the other measurements go on
        print(f"\n{name}: failed\n{traceback.format_exc()}", flush=True)
        return {**nothing, "failed": repr(error)}
    finally:
        gc.collect()  # mappings of removed pools hold their memory
    foreign = load.share()
    why = result.doubt
    if result.is_timed and not why:
        why = disturbance(result.times, threads=result.threads, foreign=foreign)
    made = {
        "name": name,
        "skipped": "",
        "failed": "",
        "threads": result.threads,
        "seconds": time.monotonic() - started,
        "foreign_share": foreign,
        "disturbed": why,
        "times": {key: times.as_dict() for key, times in result.times.items()},
        "figures": {
            **{key: {**spread(values), "disturbed": why} for key, values in result.figures.items()},
            **{key: {"skipped": reason} for key, reason in result.skipped.items()},
        },
        "facts": result.facts,
    }
    print(table(made), flush=True)
    return made


def table(made: Mapping[str, Any]) -> str:
    """Times and figures of a measurement, for a person."""
    lines = [f"\n{made['name']} ({made['seconds']:.0f} s)"]
    if made["disturbed"]:
        lines[0] += f"  DISTURBED: {made['disturbed']}"
    for key, times in made["times"].items():
        wall, cpu = times["wall_ms"], times["cpu_ms"]
        lines.append(
            f"  {key:<34}{wall['median']:10.3f} ms [{wall['min']:.3f}, {wall['max']:.3f}]"
            f"  CPU {cpu['median']:.3f}"
        )
    for key, figure in made["figures"].items():
        if "skipped" in figure:
            lines.append(f"  {key}: skipped: {figure['skipped']}")
            continue
        lines.append(
            f"  {key:<46}{figure['median']:10.4g}  [{figure['min']:.4g}, {figure['max']:.4g}]"
        )
    lines += [f"  {key}: {_shown(value)}" for key, value in made["facts"].items()]
    return "\n".join(lines)


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return json.dumps(value) if isinstance(value, dict | list) else str(value)


def document(
    script: str, made: Sequence[Mapping[str, Any]], args: argparse.Namespace
) -> dict[str, Any]:
    """The JSON document of a run."""
    return {
        "schema": SCHEMA,
        "script": script,
        "rounds": args.rounds,
        "quick": args.quick,
        "new_buffers": args.new_buffers,
        "machine": machine(),
        "versions": versions(),
        "measurements": list(made),
    }


def find_figure(
    documented: Mapping[str, Any], measurement: str, figure: str
) -> dict[str, Any] | None:
    """A figure of a document; one of a skipped measurement has only the reason."""
    for made in documented["measurements"]:
        if made["name"] == measurement:
            if made["skipped"]:
                return {"skipped": made["skipped"]}
            found: dict[str, Any] | None = made["figures"].get(figure)
            return found
    return None


def machine() -> dict[str, Any]:
    """What the figures depend on."""
    pages = Path("/sys/kernel/mm/transparent_hugepage")
    return {
        "cpu": _field("/proc/cpuinfo", "model name") or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "kernel": platform.release(),
        "page_bytes": os.sysconf("SC_PAGE_SIZE"),
        "huge_pages": {name: _read(pages / name) for name in ("enabled", "shmem_enabled")},
    }


def versions() -> dict[str, str]:
    """Of Python and of what is installed of our packages and the peers."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _field(path: str, name: str) -> str:
    for line in _read(Path(path)).splitlines():
        if line.startswith(name):
            return line.partition(":")[2].strip()
    return ""


@contextmanager
def freed_memory_kept() -> Iterator[None]:
    """Lets the allocator keep what is freed meanwhile. Each large buffer would else be mapped anew
    in every step, at microseconds a page: that would time the kernel, not the candidates.
    """
    libc = ctypes.CDLL(None)
    trim, mmap_max = -1, -4  # M_TRIM_THRESHOLD, M_MMAP_MAX of glibc
    if not hasattr(libc, "malloc_trim"):
        yield
        return
    libc.mallopt(mmap_max, 0)
    libc.mallopt(trim, 2**31 - 1)
    try:
        yield
    finally:
        libc.mallopt(mmap_max, 65536)
        libc.mallopt(trim, 128 << 10)
        libc.malloc_trim(0)


def timed(
    candidates: Mapping[str, Callable[[int], object]],
    args: argparse.Namespace,
    *,
    repeats: int = 1,
    steps: int = 1,
    lead_in: int = 0,
) -> dict[str, Times]:
    """Interleaved rounds of the candidates, one warm-up round (`rounds.interleave`)."""
    with nullcontext() if args.new_buffers else freed_memory_kept():
        return interleave(
            candidates, rounds=args.rounds, repeats=repeats, steps=steps, lead_in=lead_in
        )


@contextmanager
def folder_in(parent: Path) -> Iterator[Path]:
    """A folder that is gone afterwards."""
    parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(dir=parent, prefix="tcxl-bench-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def need_bytes(folder: Path, wanted: int) -> None:
    """Skips the measurement where a folder (or, for one in memory, the memory) has no room."""
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if str(folder).startswith("/dev/shm"):
        available = _field("/proc/meminfo", "MemAvailable").split()
        free = min(free, int(available[0]) << 10 if available else free)
    if free < wanted:
        raise Skipped(f"{folder} has {free / 1e9:.1f} GB free, {wanted / 1e9:.1f} GB are needed")
