"""Text converted once to arrays on disk, found again by what the source is.

A conversion is a folder named by its key: `meta.json` and one raw little-endian file an array. It
is written beside its final name, synced, and renamed, so a folder that has its final name is
complete, whatever killed the process that wrote it.
"""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from trainingcxl.data.dataset import DataReport, Dataset, Feature, Jagged, Rows
from trainingcxl.errors import DataError

__all__ = ["ArrayDataset", "ArrayWriter", "Source", "convert_once", "identify"]

_VERSION = 1
_WHOLE_BYTES = 64 << 20
_EDGE_BYTES = 1 << 20
_PROBES, _PROBE_BYTES = 62, 1 << 16


@dataclass(frozen=True, slots=True)
class Source:
    """What a file was when it was looked at.

    Attributes:
        path: Where it lies.
        size: Bytes.
        mtime_ns: Time of its last change.
        digest: SHA-256 of the content; of a file above 64 MiB: of its first and last MiB and 62
            places of 64 KiB spread evenly between.
    """

    path: Path
    size: int
    mtime_ns: int
    digest: str

    def check_unchanged(self) -> None:
        """Raise `DataError` if the file is no longer what was looked at."""
        try:
            status = self.path.stat()
        except OSError as error:
            raise DataError(f"{self.path} vanished while it was read: {error.strerror}") from error
        if (status.st_size, status.st_mtime_ns) != (self.size, self.mtime_ns):
            raise DataError(
                f"{self.path} was changed while it was read\n"
                "  do:    wait until it is complete, then start again"
            )


def identify(path: Path) -> Source:
    """Look at a file; reads at most 64 MiB of it.

    Raises:
        DataError: It can't be read.
    """
    try:
        status = path.stat()
        digest = hashlib.sha256(str(status.st_size).encode())
        with path.open("rb") as stream:
            if status.st_size <= _WHOLE_BYTES:
                digest.update(stream.read())
            else:
                for offset, count in _probes(status.st_size):
                    stream.seek(offset)
                    digest.update(stream.read(count))
    except OSError as error:
        raise DataError(
            f"cannot read {path}: {error.strerror}\n  do:    check the path and its permissions"
        ) from error
    return Source(path, status.st_size, status.st_mtime_ns, digest.hexdigest())


def _probes(size: int) -> Iterator[tuple[int, int]]:
    yield 0, _EDGE_BYTES
    step = (size - 2 * _EDGE_BYTES) // (_PROBES + 1)
    for number in range(1, _PROBES + 1):
        yield _EDGE_BYTES + number * step, _PROBE_BYTES
    yield size - _EDGE_BYTES, _EDGE_BYTES


def fingerprint_of(sources: Sequence[Source], identity: dict[str, Any]) -> dict[str, Any]:
    """Return what identifies converted data on any machine: contents, not names or times."""
    content = json.dumps([[source.size, source.digest] for source in sources])
    settings = json.dumps(identity, sort_keys=True)
    return {
        "source": identity["source"],
        "bytes": sum(source.size for source in sources),
        "content": hashlib.sha256(content.encode()).hexdigest(),
        "conversion": hashlib.sha256(settings.encode()).hexdigest()[:16],
    }


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class ArrayWriter:
    """Appends samples to the arrays of a conversion."""

    def __init__(
        self,
        folder: Path,
        dense_names: Sequence[str],
        features: Sequence[Feature],
        limits: Sequence[int],
    ) -> None:
        """Open the files.

        Args:
            folder: Where they go.
            dense_names: Names of the dense columns.
            features: The categorical columns; a cardinality of 0 is set to the largest id + 1.
            limits: Ids of each feature are taken modulo this.
        """
        self._folder, self._dense_names = folder, tuple(dense_names)
        self._features, self._limits = tuple(features), tuple(limits)
        # Half the bytes where ids allow it.
        self._id_type = "<i4" if max(limits, default=0) <= 1 << 31 else "<i8"
        self._files: dict[str, IO[bytes]] = {}
        self._totals = {feature.name: 0 for feature in features if feature.is_jagged}
        self.largest = dict.fromkeys((feature.name for feature in features), 0)
        self.num_samples = 0

    def _append(self, name: str, values: NDArray[Any], kind: str) -> None:
        if name not in self._files:
            self._files[name] = (self._folder / f"{name}.bin").open("wb")
        self._files[name].write(np.ascontiguousarray(values, dtype=kind).tobytes())

    def append(
        self,
        dense: NDArray[np.float32],
        ids: Sequence[NDArray[np.uint64]],
        lengths: Sequence[NDArray[np.int64] | None],
        label: NDArray[np.float32],
    ) -> None:
        """Add n samples.

        Args:
            dense: Shape (n, number of dense columns).
            ids: Of each feature, before the modulo; shape (n,), or (sum of its lengths,).
            lengths: Of each jagged feature, shape (n,); None for a single-valued one.
            label: Shape (n,).
        """
        self._append("label", label, "<f4")
        self._append("dense", dense, "<f4")
        columns = []
        for j, feature in enumerate(self._features):
            if ids[j].size:
                largest = int(ids[j].max())
                self.largest[feature.name] = max(self.largest[feature.name], largest)
            wrapped = ids[j] % np.uint64(self._limits[j])
            length = lengths[j]
            if length is None:
                columns.append(wrapped)
                continue
            offsets = self._totals[feature.name] + np.cumsum(length)
            self._append(f"values-{j}", wrapped, self._id_type)
            self._append(f"ends-{j}", offsets, "<i8")
            self._totals[feature.name] += int(length.sum())
        if columns:
            self._append("ids", np.stack(columns, axis=1), self._id_type)
        self.num_samples += label.size

    def finish(self, facts: dict[str, Any]) -> None:
        """Sync the arrays and write `meta.json`: `facts` and what is known of the columns."""
        for stream in self._files.values():
            stream.flush()
            os.fsync(stream.fileno())
        features = []
        for feature, limit in zip(self._features, self._limits, strict=True):
            largest = self.largest[feature.name]
            entry = asdict(feature)
            entry["cardinality"] = feature.cardinality or min(largest + 1, limit)
            entry["largest_source_id"] = largest
            features.append(entry)
        meta = {
            **facts,
            "num_samples": self.num_samples,
            "dense_names": self._dense_names,
            "features": features,
            "id_type": self._id_type,
        }
        with (self._folder / "meta.json").open("wb") as file:
            file.write(json.dumps(meta, indent=1).encode())
            file.flush()
            os.fsync(file.fileno())
        _fsync(self._folder)

    def close(self) -> None:
        """Close the files."""
        for stream in self._files.values():
            stream.close()


class ArrayDataset(Dataset):
    """Samples in arrays, memory-mapped or in memory."""

    def __init__(
        self,
        *,
        dense: NDArray[Any],
        dense_names: Sequence[str],
        features: Sequence[Feature],
        ids: NDArray[Any],
        jagged: dict[str, tuple[NDArray[Any], NDArray[Any]]],
        label: NDArray[Any],
        has_labels: bool,
        fingerprint: dict[str, Any],
        report: DataReport,
    ) -> None:
        """Take the arrays.

        Args:
            dense: Numbers, shape (n, number of dense columns).
            dense_names: Their names.
            features: The categorical columns.
            ids: Ids of the single-valued features, integers, shape (n, how many).
            jagged: Ids and end offsets (n,) of each jagged feature.
            label: Shape (n,).
            has_labels: Whether the labels mean something.
            fingerprint: See `Dataset`.
            report: See `Dataset`.
        """
        self._dense, self._ids, self._jagged, self._label = dense, ids, jagged, label
        self.num_samples = len(label)
        self.dense_names, self.features = tuple(dense_names), tuple(features)
        self.has_labels, self.fingerprint, self.report = has_labels, fingerprint, report

    def read(self, samples: NDArray[np.int64]) -> Rows:
        """Copy the given samples out of the arrays."""
        self._check_samples(samples)
        return Rows(
            dense=self._dense[samples].astype(np.float32, copy=False),
            ids=self._ids[samples].astype(np.int64, copy=False),
            jagged={name: _gather(*arrays, samples) for name, arrays in self._jagged.items()},
            label=self._label[samples].astype(np.float32, copy=False),
        )


def _gather(values: NDArray[Any], ends: NDArray[Any], samples: NDArray[np.int64]) -> Jagged:
    end = ends[samples].astype(np.int64)
    start = np.where(samples > 0, ends[samples - 1], 0).astype(np.int64)
    lengths = end - start
    # Position of each value: start of its sample + its number within the sample.
    first = np.cumsum(lengths) - lengths
    place = np.arange(int(lengths.sum())) + np.repeat(start - first, lengths)
    return Jagged(values[place].astype(np.int64), lengths)


def _map(folder: Path, name: str, kind: str, shape: tuple[int, ...]) -> NDArray[Any]:
    count = int(np.prod(shape))
    if count == 0:
        return np.empty(shape, dtype=kind)
    path = folder / f"{name}.bin"
    wanted = count * np.dtype(kind).itemsize
    if path.stat().st_size != wanted:
        raise DataError(
            f"{path} has {path.stat().st_size} bytes, expected {wanted}\n"
            f"  do:    delete the folder {folder}; it is made anew"
        )
    return np.memmap(path, dtype=kind, mode="r", shape=shape)


def load_arrays(folder: Path, fingerprint: dict[str, Any], notes: list[str]) -> ArrayDataset:
    """Open a complete conversion; maps its arrays, reads none of them.

    Raises:
        DataError: The folder is damaged.
    """
    if sys.byteorder != "little":
        raise DataError("converted data is little-endian, this machine is not")
    try:
        meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        features = tuple(Feature(**entry) for entry in meta["features"])
        count, kind = meta["num_samples"], meta["id_type"]
        single = sum(not feature.is_jagged for feature in features)
        jagged = {}
        for j, feature in enumerate(features):
            if feature.is_jagged:
                ends = _map(folder, f"ends-{j}", "<i8", (count,))
                total = int(ends[-1]) if count else 0
                jagged[feature.name] = (_map(folder, f"values-{j}", kind, (total,)), ends)
        return ArrayDataset(
            dense=_map(folder, "dense", "<f4", (count, len(meta["dense_names"]))),
            dense_names=meta["dense_names"],
            features=features,
            ids=_map(folder, "ids", kind, (count, single)),
            jagged=jagged,
            label=_map(folder, "label", "<f4", (count,)),
            has_labels=meta["has_labels"],
            fingerprint={**fingerprint, "num_samples": count},
            report=DataReport(list(meta["bad_lines"]), [*meta["notes"], *notes]),
        )
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise DataError(
            f"converted data in {folder} is damaged: {error}\n"
            "  do:    delete the folder; it is made anew"
        ) from error


@contextlib.contextmanager
def _locked(folder: Path, waiting: Callable[[], None]) -> Iterator[None]:
    """Hold the folder's lock; the kernel drops it if this process dies."""
    with (folder / "lock").open("wb") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waiting()
            fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def convert_once(
    cache_dir: Path,
    sources: Sequence[Source],
    identity: dict[str, Any],
    convert: Callable[[Path], None],
    waiting: Callable[[], None],
) -> Path:
    """Return the folder of a conversion, made by `convert` if there is none.

    Args:
        cache_dir: Folder of all conversions; made if absent.
        sources: The files that are read.
        identity: Everything else that the result depends on, for JSON.
        convert: Writes the arrays into the folder it is given.
        waiting: Called when another process is converting into the same cache folder.

    Raises:
        DataError: The cache folder can't be written, or a source changed meanwhile.

    Safe when several processes convert at once: they take turns, and find what the first one made.
    """
    files = [[source.size, source.mtime_ns, source.digest] for source in sources]
    facts = json.dumps({"version": _VERSION, "files": files, **identity}, sort_keys=True)
    final = cache_dir / hashlib.sha256(facts.encode()).hexdigest()[:24]
    if (final / "meta.json").is_file():
        return final
    unfinished = final.with_suffix(".unfinished")
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        with _locked(cache_dir, waiting):
            if (final / "meta.json").is_file():
                return final
            # Under the lock, whatever is unfinished was left by a process that died.
            for left_over in cache_dir.glob("*.unfinished"):
                shutil.rmtree(left_over)
            unfinished.mkdir()
            try:
                convert(unfinished)
                for source in sources:
                    source.check_unchanged()
                shutil.rmtree(final, ignore_errors=True)
                unfinished.rename(final)
                _fsync(cache_dir)
            except BaseException:
                shutil.rmtree(unfinished, ignore_errors=True)
                raise
    except OSError as error:
        raise _cannot_write(cache_dir, sources, error) from error
    return final


def _cannot_write(cache_dir: Path, sources: Sequence[Source], error: OSError) -> DataError:
    room = ""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        wanted = sum(source.size for source in sources)
        free = shutil.disk_usage(cache_dir).free
        room = f" ({free} bytes are free; the source has {wanted}, three times that if compressed)"
    return DataError(
        f"cannot write converted data to {cache_dir}: {error.strerror}{room}\n"
        "  do:    choose a folder that can be written and has room, --set cache.dir=FOLDER"
    )
