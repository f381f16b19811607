"""What was measured on a machine, as a value and as a file."""

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainingcxl.sim.host_kernels import LINE, ROW_BYTES, SPANS
from trainingcxl.sim.parameters import build, number, read_toml, series, whole

__all__ = ["HostCalibration", "read_calibration", "write_calibration"]

Array = NDArray[np.float64]


def _ns() -> Any:
    return number(0, 1e6, "ns", above=True)


def _row_ns() -> Any:
    return series(len(SPANS), 0, 1e6, "ns", above=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCalibration:
    """Constants of a machine; one thread.

    A row is priced by where it was since it was last touched: `span` bytes of other rows ago. The
    series hold nanoseconds a row for working sets of `host_kernels.SPANS` bytes.

    Attributes:
        latency_ns: One dependent load from memory.
        stream_gbps: Sequential read of memory.
        log_gbps: Sequential write to a mapped file, each block out of the cache.
        sync_ms: A small write forced to the medium of the folder (fdatasync).
        dense_*_ns: Read one row of so many bytes at random from a dense piece of a mapped file.
        sparse_*_ns: The same where each page holds one row of the working set.
        few_*_ns, few_update_*_ns: Read, or read and store, rows in ascending order, one a page.
        many_*_ns, many_update_*_ns: The same, four rows a page.
        scatter_ns: Move one 8-byte key to one of 256 buckets that grow side by side.
        count_ns: Count one key in a histogram of 256 buckets.
        word_ns: One 8-byte word of a scalar loop over cached memory.
        hand_over_us: CPU time of waking a sleeping thread, both sides.
        page_bytes: Page size of the mapped file.
    """

    latency_ns: float = _ns()
    store_gbps: float = number(0, 1e5, "GB/s", above=True)
    sync_ms: float = number(0, 1e6, "ms", above=True)
    scatter_ns: float = _ns()
    count_ns: float = _ns()
    merge_ns: float = _ns()
    word_ns: float = _ns()
    call_us: float = number(0, 1e6, "us", above=True)
    hand_over_us: float = number(0, 1e6, "us", above=True)
    page_bytes: int = whole(1, 1 << 30, "bytes")
    scan_ns: tuple[float, ...] = _row_ns()
    fill_ns: tuple[float, ...] = _row_ns()
    pooled_ns: tuple[float, ...] = _row_ns()
    dense_64_ns: tuple[float, ...] = _row_ns()
    dense_128_ns: tuple[float, ...] = _row_ns()
    dense_256_ns: tuple[float, ...] = _row_ns()
    dense_512_ns: tuple[float, ...] = _row_ns()
    sparse_64_ns: tuple[float, ...] = _row_ns()
    sparse_128_ns: tuple[float, ...] = _row_ns()
    sparse_256_ns: tuple[float, ...] = _row_ns()
    sparse_512_ns: tuple[float, ...] = _row_ns()
    cold_64_ns: tuple[float, ...] = _row_ns()
    cold_128_ns: tuple[float, ...] = _row_ns()
    cold_256_ns: tuple[float, ...] = _row_ns()
    cold_512_ns: tuple[float, ...] = _row_ns()
    few_64_ns: tuple[float, ...] = _row_ns()
    few_128_ns: tuple[float, ...] = _row_ns()
    few_256_ns: tuple[float, ...] = _row_ns()
    few_512_ns: tuple[float, ...] = _row_ns()
    few_update_64_ns: tuple[float, ...] = _row_ns()
    few_update_128_ns: tuple[float, ...] = _row_ns()
    few_update_256_ns: tuple[float, ...] = _row_ns()
    few_update_512_ns: tuple[float, ...] = _row_ns()
    many_64_ns: tuple[float, ...] = _row_ns()
    many_128_ns: tuple[float, ...] = _row_ns()
    many_256_ns: tuple[float, ...] = _row_ns()
    many_512_ns: tuple[float, ...] = _row_ns()
    many_update_64_ns: tuple[float, ...] = _row_ns()
    many_update_128_ns: tuple[float, ...] = _row_ns()
    many_update_256_ns: tuple[float, ...] = _row_ns()
    many_update_512_ns: tuple[float, ...] = _row_ns()

    @property
    def log_gbps(self) -> float:
        """Sequential write to the log, past the caches.

        A store to a line that is not in the cache moves it twice, for ownership and when it is
        written back; a non-temporal one moves it once.
        """
        return 2.0 * self.store_gbps

    def _line_s(self, series: tuple[float, ...], span: float) -> float:
        place = math.log2(min(max(span, SPANS[0]), SPANS[-1]))
        return float(np.interp(place, np.log2(SPANS), series)) * 1e-9

    def scan_s(self, num_bytes: float, span: float) -> float:
        """Seconds to read bytes in order that were last touched `span` bytes ago."""
        return num_bytes / LINE * self._line_s(self.scan_ns, span)

    def pooled_s(self, row_bytes: int, span: float) -> float:
        """Seconds to store one row of a matrix of `span` bytes, a block of columns at a time."""
        rest = max(row_bytes / LINE - 1.0, 0.0)
        return self._line_s(self.pooled_ns, span) + rest * self._line_s(self.fill_ns, span)

    def row_s(self, family: str, row_bytes: int, span: Array | float) -> Array:
        """Seconds a row of a family costs in a working set of `span` bytes, in the shape of `span`.

        Between the sizes and spans that were measured, linear in the size and in the logarithm of
        the span; rows below the least size cost as much as it, rows above the largest in
        proportion.
        """
        place = np.log2(np.clip(span, SPANS[0], SPANS[-1]))
        at = float(np.interp(row_bytes, ROW_BYTES, range(len(ROW_BYTES))))
        low = min(int(at), len(ROW_BYTES) - 2)
        below, above = (
            np.interp(place, np.log2(SPANS), getattr(self, f"{family}_{size}_ns"))
            for size in ROW_BYTES[low : low + 2]
        )
        scale = max(row_bytes / ROW_BYTES[-1], 1.0) * 1e-9
        return np.asarray(scale * (below + (at - low) * (above - below)))


def write_calibration(calibration: HostCalibration, path: Path) -> None:
    """Write a calibration as TOML, each number measured here."""
    lines = ["# Measured on this machine by `trainingcxl simulate --calibrate-host`."]
    lines.append(f"# Rows: ns in working sets of {', '.join(str(s) for s in SPANS)} bytes.")
    lines.append("[host]")
    for entry in dataclasses.fields(calibration):
        value = getattr(calibration, entry.name)
        lines.append(f"{entry.name} = {list(value) if isinstance(value, tuple) else value!r}")
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def read_calibration(path: Path) -> HostCalibration:
    """Read what `write_calibration` wrote.

    Raises:
        ParameterError: Missing file, unknown key or value out of range.
    """
    tree = read_toml(path)
    return build(HostCalibration, tree.get("host", tree), prefix="host", where=str(path))
