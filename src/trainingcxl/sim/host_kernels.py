"""Micro-kernels that measure this machine: memory, sorting, log writes, syncs, hand-overs.

NumPy only. Each kernel stands for one kind of work of an embedding step and is measured on memory
of its own, never on a step. Times are CPU times of the calling thread; one call gives one sample of
every constant, and the caller takes the median of several.

Rows are read in two ways, and the better one counts, since a tuned kernel reaches at least that:
line by line (one load a line, the most misses in flight) and row by row (a copy of each row).
"""

import mmap
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["ASCENDING", "LINE", "PAGE", "RANDOM", "ROW_BYTES", "SPANS", "Scratch", "measure_round"]

Rows = NDArray[np.int64]
ROW_BYTES = (64, 128, 256, 512)
# Working sets, in bytes of rows: from the first-level cache to memory.
SPANS = tuple(1 << k for k in (14, 17, 20, 22, 24, 26, 28, 30))
PAGE = mmap.PAGESIZE
# How the rows of a working set lie and are visited; S is one of SPANS.
#   dense   at random in S bytes of memory
#   sparse  at random, one row on every eighth page: S / PAGE rows, each with a page-table entry of
#           its own and that in a line of its own
#   cold    as dense, but only the pages were touched lately, not the lines
#   few     in ascending order, one row a page, S bytes of rows
#   many    in ascending order, four rows a page, S bytes of rows
RANDOM = ("dense", "sparse", "cold")
ASCENDING = {"few": 1, "many": 4}
LINE = 64
_WORD = 8
_VISITS = 12_288
_SCAN_BYTES = 1 << 23
_PASSES = 3
_BAGS = 2048
_POOLED_BYTES = (1 << 20, 1 << 22, 1 << 24, 1 << 26)
_BLOCK_BYTES = 256 << 10  # of rows between two calls of NumPy
_KEYS = 1 << 12  # a part of a radix sort: in the caches next to the processor
_BUCKETS = 256
_REPEATS = 20
_NEAR_BYTES = 1 << 28  # working sets up to here are read once before they are timed


class Scratch:
    """A file mapped for reading and writing, removed at the end.

    Args:
        folder: Where the file lies: the medium of a pool.
        size: Bytes.
    """

    def __init__(self, folder: Path, size: int) -> None:
        self.path = folder / f".trainingcxl-calibrate-{os.getpid()}"
        descriptor = os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, size)
            self.map = mmap.mmap(descriptor, size)
        except OSError:
            self.path.unlink()
            raise
        finally:
            os.close(descriptor)
        self.words: NDArray[np.int64] = np.frombuffer(self.map, dtype=np.int64)
        self.words[:] = 0  # every page exists and is mapped

    def __enter__(self) -> "Scratch":
        return self

    def __exit__(self, *_: object) -> None:
        del self.words
        self.map.close()
        self.path.unlink()


def _timed(action: Callable[[], object]) -> float:
    """Seconds of CPU time of this thread."""
    started = time.thread_time()
    action()
    return time.thread_time() - started


class _Reader:
    """Reads and updates rows of one size of the scratch memory, a block at a time."""

    def __init__(self, words: NDArray[np.int64], size: int) -> None:
        self.size = size
        self.rows = words.reshape(-1, size // _WORD)
        # One byte a line: few stores of results are in flight, and with them few addresses that a
        # load may have to wait for because they look alike.
        self.bytes = words.view(np.int8)
        self.line_out = np.zeros(_BLOCK_BYTES // LINE, dtype=np.int8)
        self.row_out = np.zeros((_BLOCK_BYTES // size, size // _WORD), dtype=np.int64)

    def lines(self, rows: Rows) -> NDArray[np.int64]:
        """Return the first byte of each line, a block of rows at a time, even lines first.

        Processors fetch a line with its neighbour: what the even lines brought along is found near
        by the odd ones, and where nothing came along the odd ones wait for it.
        """
        step = len(self.row_out)
        even = np.arange(0, self.size, 2 * LINE)
        odd = even[: self.size // 2 // LINE] + LINE
        parts = []
        for start in range(0, rows.size, step):
            first = rows[start : start + step, None] * self.size
            parts += [(first + even).ravel(), (first + odd).ravel()]
        return np.concatenate(parts)

    def by_line(self, lines: NDArray[np.int64], *, store: bool = False) -> None:
        step = self.line_out.size
        for start in range(0, lines.size, step):
            index = lines[start : start + step]
            out = self.line_out[: index.size]
            self.bytes.take(index, 0, out, "clip")
            if store:
                self.bytes[index] = out

    def by_row(self, rows: Rows) -> None:
        step = len(self.row_out)
        for start in range(0, rows.size, step):
            index = rows[start : start + step]
            self.rows.take(index, 0, self.row_out[: index.size], "clip")


@dataclass(frozen=True, slots=True)
class _WorkingSet:
    """Rows that are visited again and again: what brings them near, and the timed passes."""

    piece: NDArray[np.int64] | None  # memory to read in order first
    warm: Rows  # then these
    passes: tuple[Rows, ...]


def _random_set(rng: np.random.Generator, reader: _Reader, span: int, family: str) -> _WorkingSet:
    per_page = PAGE // reader.size
    pages = min(span // PAGE, reader.bytes.size // PAGE // (8 if family == "sparse" else 1))
    stride = 8 if family == "sparse" else 1
    last = reader.bytes.size // PAGE - pages * stride
    start = int(rng.integers(0, last + 1))
    if family == "sparse":
        rows = (start + stride * np.arange(pages)) * per_page + rng.integers(0, per_page, pages)
        return _WorkingSet(None, rng.permutation(rows), _cut(rng.permutation(rows)))
    draws = start * per_page + rng.integers(0, pages * per_page, (1 + _PASSES, _VISITS))
    if family == "cold":
        touched = (start + np.arange(pages)) * per_page
        return _WorkingSet(None, touched, tuple(draws[1:]))
    low = start * per_page
    piece = reader.rows[low : low + pages * per_page] if span <= _NEAR_BYTES else None
    return _WorkingSet(piece, draws[0], tuple(draws[1:]))


def _ascending_set(
    rng: np.random.Generator, reader: _Reader, span: int, family: str
) -> _WorkingSet:
    gap = PAGE // ASCENDING[family] // reader.size  # rows of an equal part of a page
    places = len(reader.rows) // gap
    is_far = span == SPANS[-1]
    count = min(_PASSES * _VISITS if is_far else span // reader.size, places)
    start = int(rng.integers(0, places - count + 1))
    rows = (start + np.arange(count)) * gap + rng.integers(0, gap, count)
    return _WorkingSet(None, rows[:1] if is_far else rows, _cut(rows))


def _cut(rows: Rows) -> tuple[Rows, ...]:
    """Cut passes out of rows, different ones where there are enough: none warms the next."""
    length = min(rows.size, _VISITS)
    starts = [k * length if (k + 1) * length <= rows.size else 0 for k in range(_PASSES)]
    return tuple(np.resize(rows[s : s + length], _VISITS) for s in starts)


def _row_costs(
    words: NDArray[np.int64], size: int, rng: np.random.Generator
) -> dict[str, tuple[float, ...]]:
    """Nanoseconds a row of every family and span."""
    reader = _Reader(words, size)
    found: dict[str, tuple[float, ...]] = {}
    for family in RANDOM:
        sets = (_random_set(rng, reader, span, family) for span in SPANS)
        found[f"{family}_{size}_ns"] = tuple(_cost(reader, chosen)[0] for chosen in sets)
    for family in ASCENDING:
        sets = (_ascending_set(rng, reader, span, family) for span in SPANS)
        costs = [_cost(reader, chosen) for chosen in sets]
        found[f"{family}_{size}_ns"] = tuple(read for read, _ in costs)
        found[f"{family}_update_{size}_ns"] = tuple(update for _, update in costs)
    return found


def _cost(reader: _Reader, chosen: _WorkingSet) -> tuple[float, float]:
    """Nanoseconds to read, and to read and store, one row of a timed pass."""
    lines, rows, stored = chosen.passes
    actions = (
        partial(reader.by_line, reader.lines(lines)),
        partial(reader.by_row, rows),
        partial(reader.by_line, reader.lines(stored), store=True),
    )
    warm = reader.lines(chosen.warm)
    times = []
    for k, action in enumerate(actions):
        if k == 0 or chosen.warm.size < _PASSES * _VISITS:
            if chosen.piece is not None:
                chosen.piece.max()
            reader.by_line(warm)
        times.append(_timed(action) / _VISITS * 1e9)
    read = max(min(times[:2]), 0.1)
    return read, read + max(times[2] - times[0], 0.0)


def _chase_ns(words: NDArray[np.int64], rng: np.random.Generator) -> float:
    """Time dependent loads: each place holds the number of the next."""
    steps = 20_000

    def chase(places: memoryview) -> None:
        place = 0
        for _ in range(steps):
            place = places[place]

    def cycle(slots: NDArray[np.int64]) -> float:
        order = rng.permutation(slots.size)
        slots[order] = np.roll(order, -1)
        places = slots.data
        spent = _timed(partial(chase, places))
        places.release()
        return spent / steps * 1e9

    near = np.empty(512, dtype=np.int64)
    cycle(near)
    least = cycle(near)
    return max(cycle(words[: 1 << 24]) - least, 1.0)


def _repeated_ns(action: Callable[[], object]) -> float:
    """Nanoseconds of one of several calls, after a first one."""
    action()
    started = time.thread_time()
    for _ in range(_REPEATS):
        action()
    return (time.thread_time() - started) / _REPEATS * 1e9


def _word_ns() -> float:
    """Nanoseconds a word of a scalar loop over cached memory, and nothing of NumPy's call."""
    # Every second word: a loop that no vector instruction shortens.
    short, long = np.zeros(1 << 11)[::2], np.zeros(1 << 13)[::2]
    longer = _repeated_ns(partial(np.add.reduce, long))
    longer -= _repeated_ns(partial(np.add.reduce, short))
    return max(longer / (long.size - short.size), 0.01)


def _loop_costs(rng: np.random.Generator) -> dict[str, float]:
    """Nanoseconds a key of sorting and merging, a word of a scalar loop, and a call."""
    keys = rng.integers(0, _BUCKETS, _KEYS)
    out = np.zeros_like(keys)
    # The mirror image of a scatter into buckets: one advancing place a bucket is read.
    place = np.zeros_like(keys)
    place[np.argsort(keys, kind="stable")] = np.arange(_KEYS)
    lists = np.sort(rng.integers(0, 4 * _KEYS, (2, _KEYS))).ravel()  # two ascending lists
    word_ns = _word_ns()
    # NumPy first looks for the least and the largest key, in a scalar loop.
    count_ns = _repeated_ns(partial(np.bincount, keys, minlength=_BUCKETS)) / _KEYS - word_ns
    # A stable sort of two ascending lists merges them.
    merge_ns = _repeated_ns(lambda: lists.copy().sort(kind="stable")) / lists.size
    call = partial(np.take, keys, place[:1], out=out[:1], mode="clip")
    return {
        "scatter_ns": _repeated_ns(partial(keys.take, place, 0, out, "clip")) / _KEYS,
        "count_ns": max(count_ns, word_ns),
        "merge_ns": merge_ns,
        "word_ns": word_ns,
        "call_us": _repeated_ns(call) / 1e3,
    }


def _scan_ns(words: NDArray[np.int64]) -> tuple[float, ...]:
    """Nanoseconds a line of reading S bytes in order, again and again."""
    costs = []
    for span in SPANS:
        piece = words[: span // _WORD].view(np.float32)
        repeats = max(1, _SCAN_BYTES // piece.nbytes)
        piece.max()
        started = time.thread_time()
        for _ in range(repeats):
            piece.max()
        spent = time.thread_time() - started
        costs.append(max(spent / repeats / piece.nbytes * LINE * 1e9, 1e-3))
    # Short pieces are mostly NumPy's call.
    return tuple(np.minimum.accumulate(costs[::-1])[::-1].tolist())


def _store_costs() -> dict[str, tuple[float, ...]]:
    """Nanoseconds to store one line of S bytes of process memory, where pooled vectors lie.

    `fill_ns`: in order. `pooled_ns`: the first line of each row of a matrix of `_BAGS` rows, column
    by column. Spans that were not measured cost as much as the nearest one.
    """
    memory = np.zeros(_POOLED_BYTES[-1], dtype=np.int8)
    fill: list[float] = []
    pooled: list[float] = []
    for span in _POOLED_BYTES:
        piece = memory[:span].view(np.int64)
        columns = span // _BAGS // LINE
        rows = np.arange(_BAGS) * (columns * LINE)
        blocks = [rows + column * LINE for column in range(columns)]

        def store(blocks: list[NDArray[np.int64]] = blocks) -> None:
            for block in blocks:
                memory[block] = 1

        for action, costs in ((partial(piece.fill, 1), fill), (store, pooled)):
            action()
            costs.append(max(_timed(action) / span * LINE * 1e9, 0.01))
    return {
        "fill_ns": tuple(np.interp(SPANS, _POOLED_BYTES, fill).tolist()),
        "pooled_ns": tuple(np.interp(SPANS, _POOLED_BYTES, pooled).tolist()),
    }


def _write_gbps(words: NDArray[np.int64]) -> float:
    """Copy a cached block over a long piece of memory, as a log fills its ring."""
    block = np.ones(8 << 10, dtype=np.int64)
    size = min(words.size, 16 << 20)
    start = words.size - size

    def write() -> None:
        for at in range(start, start + size - block.size + 1, block.size):
            np.copyto(words[at : at + block.size], block)

    return size * _WORD / max(_timed(write), 1e-9) / 1e9


def _hand_over_us() -> float:
    """CPU time of all threads when one thread wakes another and sleeps."""
    turns = 200
    there, back = os.pipe(), os.pipe()

    def answer() -> None:
        for _ in range(turns):
            os.read(there[0], 1)
            os.write(back[1], b"x")

    thread = threading.Thread(target=answer)
    thread.start()
    started = time.process_time()
    for _ in range(turns):
        os.write(there[1], b"x")
        os.read(back[0], 1)
    spent = time.process_time() - started
    thread.join()
    for end in (*there, *back):
        os.close(end)
    return max(spent / turns / 2 * 1e6, 1e-3)


def _sync_ms(folder: Path) -> float:
    """Wall time of forcing 4 KiB to the medium."""
    path = folder / f".trainingcxl-sync-{os.getpid()}"
    times = []
    try:
        with path.open("wb", buffering=0) as stream:
            for _ in range(5):
                stream.seek(0)
                stream.write(bytes(PAGE))
                started = time.perf_counter()
                os.fdatasync(stream.fileno())
                times.append(time.perf_counter() - started)
    finally:
        path.unlink(missing_ok=True)
    return max(float(np.median(times)) * 1e3, 1e-6)


def measure_round(folder: Path, scratch: Scratch, seed: int) -> dict[str, Any]:
    """Measure every constant once.

    Args:
        folder: For the sync.
        scratch: Memory of the medium.
        seed: Places are drawn from it.

    Returns:
        Values by field name of `HostCalibration`.
    """
    rng = np.random.default_rng(seed)
    words = scratch.words
    found: dict[str, Any] = {"latency_ns": _chase_ns(words, rng)}
    found["scan_ns"] = _scan_ns(words)
    for size in ROW_BYTES:
        found |= _row_costs(words, size, rng)
    found |= _store_costs()
    found["store_gbps"] = _write_gbps(words)
    found |= _loop_costs(rng)
    found["hand_over_us"] = _hand_over_us()
    found["sync_ms"] = _sync_ms(folder)
    return found
