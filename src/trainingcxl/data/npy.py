"""NumPy arrays as the MLPerf DLRM and TorchRec scripts write them: mapped, never converted.

A folder with {NAME_}dense.npy, {NAME_}sparse.npy and {NAME_}labels.npy, NAME being day_0, day_1 and
so on: dense float [n, K] (used as it is: these scripts store logarithms), sparse integer [n, J],
labels [n] or [n, 1]. {NAME_}sparse_multi_hot.npz may take the place of sparse.npy: members 0.npy,
1.npy and so on, integer [n, lookups], stored without compression.
"""

import re
import struct
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainingcxl.data.cache import fingerprint_of, identify
from trainingcxl.data.dataset import DataReport, Dataset, Feature, Jagged, Rows
from trainingcxl.data.options import Limit, OpenOptions, limits_of, wrap_notes
from trainingcxl.errors import DataError

__all__ = ["open_npy"]

_SCAN_ROWS = 1 << 16


def _map_npy(path: Path) -> NDArray[Any]:
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"cannot read {path}: {error}\n  do:    it must be a .npy file") from error
    if not isinstance(array, np.ndarray):
        raise DataError(f"{path} is not one array\n  do:    it must be a .npy file")
    return array


def _map_member(path: Path, archive: zipfile.ZipFile, name: str) -> NDArray[Any]:
    """Map one stored member of a .npz: the bytes of a .npy file lie in the archive as they are."""
    member = archive.getinfo(name)
    if member.compress_type != zipfile.ZIP_STORED:
        raise DataError(
            f"{path}: member {name} is compressed and can't be mapped\n"
            "  do:    write it anew with numpy.savez (not savez_compressed)"
        )
    with path.open("rb") as stream:
        stream.seek(member.header_offset + 26)
        name_bytes, extra_bytes = struct.unpack("<HH", stream.read(4))
        stream.seek(member.header_offset + 30 + name_bytes + extra_bytes)
        version = np.lib.format.read_magic(stream)
        read_header = (
            np.lib.format.read_array_header_1_0
            if version == (1, 0)
            else np.lib.format.read_array_header_2_0
        )
        shape, is_fortran, kind = read_header(stream)
        if kind.hasobject or is_fortran or int(np.prod(shape)) == 0:
            raise DataError(f"{path}: member {name} is {kind} {shape}, expected rows of integers")
        return np.memmap(path, dtype=kind, mode="r", offset=stream.tell(), shape=shape)


def _map_multi_hot(path: Path) -> list[NDArray[Any]]:
    try:
        with zipfile.ZipFile(path) as archive:
            count = len(archive.namelist())
            return [_map_member(path, archive, f"{j}.npy") for j in range(count)]
    except (OSError, KeyError, ValueError, struct.error, zipfile.BadZipFile) as error:
        raise DataError(
            f"cannot read {path}: {error}\n  do:    it must hold the members 0.npy, 1.npy, ..."
        ) from error


class _Part:
    """The arrays of one day."""

    def __init__(self, folder: Path, prefix: str) -> None:
        self.paths = [folder / f"{prefix}dense.npy", folder / f"{prefix}labels.npy"]
        self.dense, self.label = _map_npy(self.paths[0]), _map_npy(self.paths[1]).reshape(-1)
        multi_hot = folder / f"{prefix}sparse_multi_hot.npz"
        self.paths.append(multi_hot if multi_hot.exists() else folder / f"{prefix}sparse.npy")
        if multi_hot.exists():
            self.columns = _map_multi_hot(multi_hot)
        else:
            sparse = _map_npy(self.paths[2])
            self._check(self.paths[2], sparse, "iu")
            self.columns = [sparse[:, j : j + 1] for j in range(sparse.shape[1])]
        self._check(self.paths[0], self.dense, "fiu")
        for array in self.columns:
            self._check(self.paths[2], array, "iu")

    def _check(self, path: Path, array: NDArray[Any], kinds: str) -> None:
        if array.ndim != 2 or array.dtype.kind not in kinds or len(array) != len(self.label):
            raise DataError(
                f"{path} holds {array.dtype} of shape {array.shape}, expected "
                f"{'integers' if 'f' not in kinds else 'numbers'} [{len(self.label)}, columns]\n"
                f"  do:    {self.paths[1].name} says how many rows there are"
            )

    @property
    def shape(self) -> tuple[int, list[int]]:
        """Dense columns, and lookups of each feature."""
        return self.dense.shape[1], [array.shape[1] for array in self.columns]


def _unsigned(array: NDArray[Any]) -> NDArray[np.uint64]:
    """Read signed integers as the unsigned ones they were (raw hashes stored as int32 or int64)."""
    unsigned = np.dtype(f"u{array.dtype.itemsize}")
    return np.ascontiguousarray(array).view(unsigned).astype(np.uint64)


class NpyDataset(Dataset):
    """Samples in the mapped arrays of several days, one after the other."""

    def __init__(
        self,
        parts: Sequence[_Part],
        features: Sequence[Feature],
        limits: Sequence[int],
        fingerprint: dict[str, Any],
        report: DataReport,
    ) -> None:
        """Take the parts; ids are taken modulo `limits`, one number a feature."""
        self._parts, self._limits = parts, limits
        self._ends = np.cumsum([len(part.label) for part in parts])
        self.num_samples = int(self._ends[-1])
        self.dense_names = tuple(f"I{k + 1}" for k in range(parts[0].dense.shape[1]))
        self.features, self.report = tuple(features), report
        self.has_labels, self.fingerprint = True, fingerprint

    def _take(self, samples: NDArray[np.int64], arrays: Sequence[NDArray[Any]]) -> NDArray[Any]:
        part_of = np.searchsorted(self._ends, samples, side="right")
        out = np.empty((samples.size, *arrays[0].shape[1:]), dtype=arrays[0].dtype)
        for number in np.unique(part_of):
            chosen = part_of == number
            first = self._ends[number] - len(self._parts[number].label)
            out[chosen] = arrays[number][samples[chosen] - first]
        return out

    def read(self, samples: NDArray[np.int64]) -> Rows:
        """Copy the given samples out of the arrays."""
        self._check_samples(samples)
        single, jagged = [], {}
        for j, feature in enumerate(self.features):
            raw = self._take(samples, [part.columns[j] for part in self._parts])
            ids = (_unsigned(raw) % np.uint64(self._limits[j])).astype(np.int64)
            if feature.is_jagged:
                lengths = np.full(samples.size, ids.shape[1], dtype=np.int64)
                jagged[feature.name] = Jagged(ids.reshape(-1), lengths)
            else:
                single.append(ids[:, 0])
        ids = np.stack(single, axis=1) if single else np.empty((samples.size, 0), dtype=np.int64)
        return Rows(
            dense=self._take(samples, [part.dense for part in self._parts]).astype(np.float32),
            ids=ids,
            jagged=jagged,
            label=self._take(samples, [part.label for part in self._parts]).astype(np.float32),
        )


def _day(path: Path) -> tuple[int, str]:
    number = re.search(r"\d+", path.name)
    return (int(number.group()) if number else -1, path.name)


def _largest_ids(parts: Sequence[_Part], options: OpenOptions) -> list[int]:
    """Look at every id once."""
    largest = [0] * len(parts[0].columns)
    total = sum(array.nbytes for part in parts for array in part.columns)
    done = 0
    for part in parts:
        for start in range(0, len(part.label), _SCAN_ROWS):
            for j, array in enumerate(part.columns):
                block = array[start : start + _SCAN_ROWS]
                largest[j] = max(largest[j], int(_unsigned(block).max(initial=0)))
                done += block.nbytes
            options.progress("checking the range of ids", done, total)
    return largest


def _check_labels(parts: Sequence[_Part]) -> None:
    for part in parts:
        wrong = np.flatnonzero(~np.isin(part.label, (0, 1)))
        if wrong.size:
            raise DataError(
                f"{part.paths[1]}, row {wrong[0]}: label is {part.label[wrong[0]]}, expected 0 or 1"
            )


def open_npy(where: str, options: OpenOptions) -> Dataset:
    """Open a folder of .npy files; see `open_data`."""
    folder = Path(where).expanduser()
    found = sorted(folder.glob("*dense.npy"), key=_day)
    if not found:
        raise DataError(
            f"{folder} holds no dense.npy and no day_0_dense.npy\n"
            "  do:    'trainingcxl export-data' shows what such a folder looks like"
        )
    parts = [_Part(folder, path.name.removesuffix("dense.npy")) for path in found]
    for part in parts:
        if part.shape != parts[0].shape:
            raise DataError(
                f"{part.paths[0]} and its companions have {part.shape} dense columns and lookups, "
                f"{parts[0].paths[0]} has {parts[0].shape}"
            )
    if sum(len(part.label) for part in parts) == 0:
        raise DataError(f"{folder} holds no samples")
    _check_labels(parts)
    names = [f"C{j + 1}" for j in range(len(parts[0].columns))]
    limits = limits_of(names, options.hash_size)
    largest = dict(zip(names, _largest_ids(parts, options), strict=True))
    features = [_feature(name, largest[name], limits[name], parts[0].shape[1][j])
                for j, name in enumerate(names)]  # fmt: skip
    sizes = {name: [limit.rows, limit.is_exact] for name, limit in limits.items()}
    sources = [identify(path) for part in parts for path in part.paths]
    fingerprint = fingerprint_of(sources, {"source": "npy", "version": 1, "hash_size": sizes})
    bounds = [limit.rows for limit in limits.values()]
    data = NpyDataset(
        parts, features, bounds, fingerprint, DataReport(notes=wrap_notes(largest, limits))
    )
    data.fingerprint["num_samples"] = data.num_samples
    return data


def _feature(name: str, largest: int, limit: Limit, lookups: int) -> Feature:
    rows = limit.rows if limit.is_exact else min(largest + 1, limit.rows)
    return Feature(name, rows, is_jagged=lookups > 1, largest_source_id=largest)
