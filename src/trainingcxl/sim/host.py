"""This machine as a host: measure its memory and its log medium, predict an embedding step.

The constants come from loops that stand for the parts of a step (gather, sort, cached add, update
of sorted rows, log write), written with NumPy and measured on a mapped file, as a pool's tables
are. None is taken from a training step. All times are CPU times of one thread, the least of several
repeats, so that other work on the machine disturbs them little.
"""

import dataclasses
import mmap
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainingcxl.sim.parameters import build, number, read_toml, whole
from trainingcxl.sim.workload import FLOAT_BYTES, Model

__all__ = [
    "HostCalibration",
    "StepPrediction",
    "calibrate_host",
    "predict_host_step",
    "read_calibration",
    "write_calibration",
]

_ROW_BYTES = (64, 128, 256, 512)
# Many short repeats: on a busy machine some of them run undisturbed.
_REPEATS = 24
_GATHERS = 16_000
_FEW = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCalibration:
    """What was measured on a machine; one thread.

    Attributes:
        latency_ns: One dependent load from memory.
        stream_gbps: Sequential read.
        gather_*_ns: One row of so many bytes from a random place of a large mapped file.
        update_*_ns: Read, add to and write back one of many rows visited in ascending order, one
            or more on every page; NumPy's own passes, measured on a cached table, are taken off.
        sparse_*_ns: The same for rows that lie many pages apart.
        cached_*_ns: Add one row that lies in the cache to another.
        sort_ns: One of 100,000 (row, bag) pairs sorted by row.
        log_gbps: Sequential write to a mapped file.
        sync_ms: A small write forced to the medium of the folder (fdatasync).
        page_bytes: Page size of the mapped file.
        cache_bytes: Second-level cache of a core, as the kernel reports it.
    """

    latency_ns: float = number(0, 1e6, "ns", above=True)
    stream_gbps: float = number(0, 1e5, "GB/s", above=True)
    gather_64_ns: float = number(0, 1e6, "ns", above=True)
    gather_128_ns: float = number(0, 1e6, "ns", above=True)
    gather_256_ns: float = number(0, 1e6, "ns", above=True)
    gather_512_ns: float = number(0, 1e6, "ns", above=True)
    update_64_ns: float = number(0, 1e6, "ns", above=True)
    update_128_ns: float = number(0, 1e6, "ns", above=True)
    update_256_ns: float = number(0, 1e6, "ns", above=True)
    update_512_ns: float = number(0, 1e6, "ns", above=True)
    sparse_64_ns: float = number(0, 1e6, "ns", above=True)
    sparse_128_ns: float = number(0, 1e6, "ns", above=True)
    sparse_256_ns: float = number(0, 1e6, "ns", above=True)
    sparse_512_ns: float = number(0, 1e6, "ns", above=True)
    cached_64_ns: float = number(0, 1e6, "ns", above=True)
    cached_128_ns: float = number(0, 1e6, "ns", above=True)
    cached_256_ns: float = number(0, 1e6, "ns", above=True)
    cached_512_ns: float = number(0, 1e6, "ns", above=True)
    sort_ns: float = number(0, 1e6, "ns", above=True)
    log_gbps: float = number(0, 1e5, "GB/s", above=True)
    sync_ms: float = number(0, 1e6, "ms", above=True)
    page_bytes: int = whole(1, 1 << 30, "bytes")
    cache_bytes: int = whole(1, 1 << 40, "bytes")

    def per_row(self, kind: str, row_bytes: int) -> float:
        """Seconds per row of a kind (gather, update, ...), between the sizes measured."""
        known = [getattr(self, f"{kind}_{size}_ns") for size in _ROW_BYTES]
        return float(np.interp(row_bytes, _ROW_BYTES, known)) * 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPrediction:
    """A model of one embedding step (lookup, reduce, update with undo log) on a host."""

    lookup_s: float
    sort_s: float
    reduce_s: float
    update_s: float
    log_s: float

    @property
    def seconds(self) -> float:
        """Seconds of the step with one thread."""
        return self.lookup_s + self.sort_s + self.reduce_s + self.update_s + self.log_s


def _least(action: Callable[[], Any], count: int) -> float:
    """Nanoseconds of CPU time per item, the least of several repeats, the first left out."""
    action()
    times = []
    for _ in range(_REPEATS):
        started = time.thread_time()
        action()
        times.append(time.thread_time() - started)
    return max(min(times), 1e-9) / count * 1e9


class _Scratch:
    """A file mapped for reading and writing, removed at the end."""

    def __init__(self, folder: Path, size: int) -> None:
        self.path = folder / f".trainingcxl-calibrate-{os.getpid()}"
        descriptor = os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, size)
            self.map = mmap.mmap(descriptor, size)
        finally:
            os.close(descriptor)
        self.bytes = np.frombuffer(self.map, dtype=np.uint8)

    def __enter__(self) -> "_Scratch":
        return self

    def __exit__(self, *_: object) -> None:
        del self.bytes
        self.map.close()
        self.path.unlink()


def _chase_ns(memory: NDArray[np.uint8], rng: np.random.Generator) -> float:
    """Time dependent loads: each place holds the number of the next."""
    steps = 20_000

    def chase(places: memoryview) -> Callable[[], None]:
        def run() -> None:
            place = 0
            for _ in range(steps):
                place = places[place]

        return run

    def cycle(slots: NDArray[np.int64]) -> memoryview:
        order = rng.permutation(slots.size)
        slots[order] = np.roll(order, -1)
        return slots.data

    large = memory[: memory.size // 8 * 8].view(np.int64)
    near = cycle(np.empty(512, dtype=np.int64))
    far = cycle(large)
    found = _least(chase(far), steps) - _least(chase(near), steps)
    far.release()
    return max(found, 1.0)


def calibrate_host(
    folder: Path, *, table_bytes: int = 512 << 20, rounds: int = 3
) -> HostCalibration:
    """Measure this machine with tables and log in `folder` (the medium of a pool).

    Args:
        folder: A folder with room for `table_bytes`; files in it are removed again.
        table_bytes: Size of the table that rows are gathered from; much larger than the caches.
        rounds: The whole is measured so many times and the best of each constant kept.

    Blocks for some seconds a round; uses one thread.
    """
    best: dict[str, Any] = {}
    for _ in range(rounds):
        for name, value in _measure(folder, table_bytes).items():
            better = max if name.endswith("_gbps") else min
            best[name] = better(best.get(name, value), value)
    return HostCalibration(**best)


def _measure(folder: Path, table_bytes: int) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    found: dict[str, Any] = {}
    with _Scratch(folder, table_bytes) as scratch:
        memory = scratch.bytes
        memory[:] = 1
        found["latency_ns"] = _chase_ns(memory, rng)
        memory[:] = 0
        table = memory.view(np.float32)
        part = table[: table.size // 8]
        found["stream_gbps"] = part.nbytes / _least(part.max, 1)
        for size in _ROW_BYTES:
            found |= _row_constants(table.reshape(-1, size // FLOAT_BYTES), size, rng)
        ring = memory[: memory.size // 8]
        found["log_gbps"] = ring.size / _least(partial(_write_through, ring), 1)
        del table, part, ring, memory
    pairs = (rng.integers(0, 1 << 20, 100_000) << 32) | np.arange(100_000)
    found["sort_ns"] = _least(lambda: np.sort(pairs), pairs.size)
    found["sync_ms"] = _sync_ms(folder)
    found["page_bytes"] = mmap.PAGESIZE
    found["cache_bytes"] = _cache_bytes()
    return found


def _write_through(memory: NDArray[np.uint8]) -> None:
    """Copy a cached block over all of the memory, as a log fills its ring."""
    block = np.ones(64 << 10, dtype=np.uint8)
    for start in range(0, memory.size - block.size + 1, block.size):
        np.copyto(memory[start : start + block.size], block)


def _row_constants(
    rows: NDArray[np.float32], size: int, rng: np.random.Generator
) -> dict[str, float]:
    """Measure gather, update and cached add for rows of one size."""
    # Each repeat works in another part, as a step goes from table to table: a quarter at random is
    # about a table of a million rows, a twenty-fourth has some rows of the batch on every page.
    parts = range(_REPEATS + 1)
    quarter, eighth = len(rows) // 4, len(rows) // 8
    wide = [rng.integers(0, len(rows), _GATHERS) for _ in parts]
    batches = [rng.integers(0, quarter, _GATHERS) + p % 4 * quarter for p in parts]
    ascending = [
        np.unique(rng.integers(0, eighth // 3, _GATHERS)) + p % 24 * (eighth // 3) for p in parts
    ]
    out = np.empty((_GATHERS, rows.shape[1]), dtype=np.float32)
    turn = iter(range(10 * _REPEATS))
    gradient = np.full((2048, rows.shape[1]), 1e-6, dtype=np.float32)
    bags = rng.integers(0, 2048, _GATHERS)

    def gather() -> None:
        index = batches[next(turn) % len(batches)]
        np.take(rows, index, axis=0, out=out, mode="clip")

    def update() -> None:
        change(ascending[next(turn) % len(ascending)])

    def sparse() -> None:
        # Some rows of the table at a time, as a batch with one lookup a bag has them.
        index = wide[next(turn) % len(wide)]
        for start in range(0, _GATHERS - _FEW + 1, _FEW):
            change(np.sort(index[start : start + _FEW]))

    def change(index: NDArray[np.int64], table: NDArray[np.float32] = rows) -> None:
        buffer = out[: index.size]
        np.take(table, index, axis=0, out=buffer, mode="clip")
        np.add(buffer, gradient[0], out=buffer)
        table[index] = buffer

    def cached() -> None:
        np.take(gradient, bags, axis=0, out=out, mode="clip")

    # What NumPy's three passes cost where memory costs nothing is no part of a native update.
    near = np.sort(rng.permutation(2048)[:_FEW])
    numpy_ns = _least(lambda: change(near, gradient), near.size)
    cached_ns = _least(cached, _GATHERS)

    def native(measured: float) -> float:
        return max(measured - numpy_ns, 0.0) + cached_ns

    return {
        f"gather_{size}_ns": _least(gather, _GATHERS),
        f"update_{size}_ns": native(_least(update, ascending[0].size)),
        f"sparse_{size}_ns": native(_least(sparse, _GATHERS // _FEW * _FEW)),
        f"cached_{size}_ns": cached_ns,
    }


def _cache_bytes() -> int:
    """Size of a core's second-level cache; 1 MiB where the kernel does not tell."""
    path = Path("/sys/devices/system/cpu/cpu0/cache/index2/size")
    try:
        text = path.read_text(encoding="ascii").strip()
        return int(text.removesuffix("K")) * 1024
    except (OSError, ValueError):
        return 1 << 20


def _sync_ms(folder: Path) -> float:
    """Wall time of forcing 4 KiB to the medium; the median, as other work delays some."""
    path = folder / f".trainingcxl-sync-{os.getpid()}"
    times = []
    with path.open("wb", buffering=0) as stream:
        for _ in range(_REPEATS):
            stream.seek(0)
            stream.write(bytes(4096))
            started = time.perf_counter()
            os.fdatasync(stream.fileno())
            times.append(time.perf_counter() - started)
    path.unlink()
    return max(float(np.median(times)) * 1e3, 1e-6)


def predict_host_step(model: Model, calibration: HostCalibration) -> StepPrediction:
    """Predict one embedding step with SGD and undo log, one thread, on a calibrated host.

    Every lookup is a random gather. For the update all (row, bag) pairs are sorted, the bags'
    gradients are added up from the cache, and each distinct row is visited once in ascending order;
    its old bytes go to the log.

    Args:
        model: Tables, batch, and the distinct rows of its locality.
        calibration: Constants of `calibrate_host`, on the medium of the pool.
    """
    lookup = sort = reduce = update = log = 0.0
    # Pooled vectors are written once; their gradients are read in the order of the rows, from the
    # cache as far as they fit.
    pooled = model.pooled_bytes
    near = min(1.0, calibration.cache_bytes / pooled)
    lookup += pooled / (calibration.log_gbps * 1e9)
    for group in model.tables:
        rows = model.batch * group.lookups * group.count
        size = group.dim * FLOAT_BYTES
        is_cached = group.rows * size <= calibration.cache_bytes
        gathered = calibration.per_row("gather", size)
        cached = calibration.per_row("cached", size)
        lookup += rows * (cached if is_cached else gathered)
        sort += rows * calibration.sort_ns * 1e-9
        reduce += rows * (near * cached + (1.0 - near) * gathered)
        distinct = rows * model.locality.unique_share
        pages = group.rows * group.count * size / calibration.page_bytes
        dense = min(1.0, distinct / pages)
        update += distinct * (
            dense * calibration.per_row("update", size)
            + (1.0 - dense) * calibration.per_row("sparse", size)
        )
        log += distinct * size / (calibration.log_gbps * 1e9)
    return StepPrediction(lookup_s=lookup, sort_s=sort, reduce_s=reduce, update_s=update, log_s=log)


def write_calibration(calibration: HostCalibration, path: Path) -> None:
    """Write a calibration as TOML, each number tagged M (measured here)."""
    lines = ["# Measured on this machine by `trainingcxl simulate --calibrate-host`.", "[host]"]
    fields = dataclasses.fields(calibration)
    lines += [f"{field.name} = {getattr(calibration, field.name)!r}" for field in fields]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def read_calibration(path: Path) -> HostCalibration:
    """Read what `write_calibration` wrote.

    Raises:
        ParameterError: Missing file, unknown key or value out of range.
    """
    tree = read_toml(path)
    return build(HostCalibration, tree.get("host", tree), prefix="host", where=str(path))
