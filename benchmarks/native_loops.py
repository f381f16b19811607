"""The loops of benchmarks/native/ceilings.cc, compiled here and called with arrays."""

import ctypes
import os
import shutil
import subprocess
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from report import Skipped

HERE = Path(__file__).resolve().parent
_DISTANCES = (0, 8, 24)


@cache
def _library() -> ctypes.CDLL:
    source = HERE / "native" / "ceilings.cc"
    target = HERE.parent / "build" / "bench" / "ceilings.so"
    compiler = os.environ.get("CXX") or shutil.which("c++")
    if compiler is None:
        raise Skipped("no C++ compiler for the plain loops")
    target.parent.mkdir(parents=True, exist_ok=True)
    if not target.exists() or target.stat().st_mtime < source.stat().st_mtime:
        command = [compiler, "-std=c++20", "-O3", "-march=native", "-shared", "-fPIC"]
        subprocess.run([*command, str(source), "-o", str(target)], check=True)
    library = ctypes.CDLL(str(target))
    library.read_in_order.restype = library.gather.restype = ctypes.c_float
    library.log_rows.restype = library.sort_rows.restype = ctypes.c_int64
    return library


def _at(array: NDArray[np.generic]) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


def read_in_order(array: NDArray[np.float32]) -> float:
    """Sum of an array that is contiguous: one pass of reading."""
    return float(_library().read_in_order(_at(array), ctypes.c_int64(array.size)))


def write_in_order(array: NDArray[np.float32]) -> None:
    """One pass of stores over an array that is contiguous."""
    _library().write_in_order(_at(array), ctypes.c_int64(array.size))


def gather(table: NDArray[np.float32], rows: NDArray[np.int64], distance: int) -> float:
    """Sum over rows of a table (R, D), D a multiple of 16, prefetched `distance` ahead."""
    size = map(ctypes.c_int64, (len(rows), distance))
    return float(_library().gather(_at(table), ctypes.c_int64(table.shape[1]), _at(rows), *size))


def gathers() -> dict[str, int]:
    """The prefetch distances worth a try, by name."""
    return {f"gather, {d} ahead": d for d in _DISTANCES}


def sort_rows(
    rows: NDArray[np.int64], keys: NDArray[np.uint64], spare: NDArray[np.uint64]
) -> NDArray[np.uint64]:
    """The distinct rows (R,) of some below 2**22, ascending, as a view of `keys`."""
    count = ctypes.c_int64(len(rows))
    kept = int(_library().sort_rows(_at(rows), count, _at(keys), _at(spare)))
    return keys[:kept]


def change_rows(
    table: NDArray[np.float32], rows: NDArray[np.uint64], log: NDArray[np.float32] | None
) -> None:
    """Reads and stores rows of a table (R, D), D a multiple of 16, and copies them to a log."""
    size = ctypes.c_int64(table.shape[1]), _at(rows), ctypes.c_int64(len(rows))
    _library().change_rows(_at(table), *size, None if log is None else _at(log))


def log_rows(
    table: NDArray[np.float32], rows: NDArray[np.int64], log: NDArray[np.uint8], begin: int
) -> int:
    """Copies rows with their numbers to `log` from byte `begin`, forced out; where it ended."""
    place = ctypes.c_void_p(log.ctypes.data + begin)
    size = ctypes.c_int64(table.shape[1]), _at(rows), ctypes.c_int64(len(rows))
    return begin + int(_library().log_rows(_at(table), *size, place))


def log_bytes(data: NDArray[np.uint8], log: NDArray[np.uint8], begin: int) -> int:
    """Copies bytes to `log` from byte `begin`, forced out; where it ended."""
    place = ctypes.c_void_p(log.ctypes.data + begin)
    _library().log_bytes(_at(data), ctypes.c_int64(data.size), place)
    return begin + data.size
