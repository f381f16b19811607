"""How fast the medium takes writes and syncs: a file without a name, gone when it is closed."""

import errno
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = ["measure_writes"]

_RECORD_BYTES = 4096
_RECORDS = 64
_SECONDS_OF_RECORDS = 1.5
_PIECE_BYTES = 16 << 20
_PIECES = 8
_SECONDS_OF_PIECES = 2.0


def measure_writes(folder: Path, free_bytes: int) -> dict[str, Any]:
    """Time small synced writes and large sequential ones in a file that nobody else can see.

    Args:
        folder: Where a pool would lie.
        free_bytes: What the file system has left; at most a tenth of it is used.

    Returns:
        sync_p50_ms, sync_max_ms, syncs: 4 KiB written over, then fdatasync, one after the other;
        sequential_bytes: how much was written for the following two;
        write_bytes_per_s: into the page cache alone;
        durable_bytes_per_s: with an fdatasync every 16 MiB.

    Raises:
        OSError: A file cannot be made, written or synced here.
    """
    with _nameless_file(folder) as file:
        piece = os.urandom(_PIECE_BYTES)  # what compresses would flatter some file systems
        pieces = max(1, min(_PIECES, free_bytes // 10 // _PIECE_BYTES))
        if free_bytes < 2 * _PIECE_BYTES:
            raise OSError(errno.ENOSPC, f"only {free_bytes} bytes are free, nothing was measured")
        os.posix_fallocate(file, 0, pieces * _PIECE_BYTES)
        written, write_s, all_s = _time_pieces(file, piece, pieces)
        times = _time_records(file, piece[:_RECORD_BYTES])
    times.sort()
    return {
        "syncs": len(times),
        "sync_p50_ms": round(1e3 * times[len(times) // 2], 4),
        "sync_max_ms": round(1e3 * times[-1], 4),
        "sequential_bytes": written,
        "write_bytes_per_s": round(written / write_s),
        "durable_bytes_per_s": round(written / all_s),
    }


@contextmanager
def _nameless_file(folder: Path) -> Iterator[int]:
    """Open a file that leaves nothing behind, whatever ends this process."""
    try:
        file = os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL):
            raise
        file, name = tempfile.mkstemp(prefix=".trainingcxl-doctor-", dir=folder)
        Path(name).unlink()
    try:
        yield file
    finally:
        os.close(file)


def _time_pieces(file: int, piece: bytes, pieces: int) -> tuple[int, float, float]:
    """Return bytes written, seconds of the writes alone, seconds in all."""
    begin, write_s, written = time.perf_counter(), 0.0, 0
    for _ in range(pieces):
        started = time.perf_counter()
        written += os.pwrite(file, piece, written)
        write_s += time.perf_counter() - started
        os.fdatasync(file)
        if time.perf_counter() - begin > _SECONDS_OF_PIECES:
            break
    return written, write_s, time.perf_counter() - begin


def _time_records(file: int, record: bytes) -> list[float]:
    """Return the seconds of each synced write, into blocks that were written before."""
    begin, times = time.perf_counter(), []
    for number in range(_RECORDS):
        started = time.perf_counter()
        os.pwrite(file, record, number * len(record))
        os.fdatasync(file)
        times.append(time.perf_counter() - started)
        if times and time.perf_counter() - begin > _SECONDS_OF_RECORDS:
            break
    return times
