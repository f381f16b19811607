"""Data as files: the built-in set as Criteo text and NumPy arrays, scores as Parquet."""

import contextlib
import gzip
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import numpy as np
from numpy.typing import NDArray

from trainingcxl.data.dataset import SyntheticDataset
from trainingcxl.data.options import Progress
from trainingcxl.data.parquet_source import import_polars
from trainingcxl.data.synthetic import DENSE_MISSING
from trainingcxl.errors import ConfigError

__all__ = ["write_criteo", "write_npy", "write_scores"]

_CHUNK = 8192


def _chunks(count: int) -> Iterator[NDArray[np.int64]]:
    for start in range(0, count, _CHUNK):
        yield np.arange(start, min(start + _CHUNK, count), dtype=np.int64)


@contextlib.contextmanager
def _whole_or_nothing(path: Path) -> Iterator[Path]:
    """Give a name to write to; it becomes `path` when all went well, else it is removed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.unfinished")
    try:
        yield unfinished
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def write_criteo(data: SyntheticDataset, path: Path, progress: Progress) -> None:
    """Write the official Criteo text: 40 TAB columns, ids as 8 hex digits, missing empty.

    Args:
        data: What to write; one lookup a field.
        path: The file; compressed if its name ends in .gz.
        progress: Called with (what, samples done, samples in all).

    Raises:
        ConfigError: The data has several lookups a field, which the format can't hold.
        OSError: The file can't be written; nothing is left behind.
    """
    if max(data.spec.hotness) > 1:
        raise ConfigError(
            "Criteo text holds one id a field\n  do:    leave out multi_hot, or use --npy"
        )
    if len(data.features) != 26:
        raise ConfigError(
            f"Criteo text has 26 categories, '{data.spec.preset}' {len(data.features)}"
        )
    with (
        _whole_or_nothing(path) as unfinished,
        unfinished.open("wb") as raw,
        _packed(raw, path) as stream,
    ):
        for samples in _chunks(data.num_samples):
            stream.write(_lines(data, samples))
            progress(f"writing {path}", int(samples[-1]) + 1, data.num_samples)


@contextlib.contextmanager
def _packed(raw: IO[bytes], path: Path) -> Iterator[IO[bytes] | gzip.GzipFile]:
    if path.suffix != ".gz":
        yield raw
        return
    # No name and no time in the header: equal data gives equal files.
    with gzip.GzipFile("", "wb", 6, raw, mtime=0) as packed:
        yield packed


def _lines(data: SyntheticDataset, samples: NDArray[np.int64]) -> bytes:
    rows = data.generator.generate(samples)
    raw = data.generator.raw_dense(samples).tolist()
    lines = []
    for label, dense, ids in zip(rows.label.tolist(), raw, rows.ids.tolist(), strict=True):
        numbers = ["" if value == DENSE_MISSING else str(value) for value in dense]
        lines.append("\t".join([f"{int(label)}", *numbers, *(f"{i:08x}" for i in ids)]))
    return ("\n".join(lines) + "\n").encode()


def write_npy(data: SyntheticDataset, folder: Path, progress: Progress) -> None:
    """Write dense.npy (after log1p), labels.npy, and sparse.npy or sparse_multi_hot.npz.

    Args:
        data: What to write.
        folder: Where to; made if absent.
        progress: Called with (what, samples done, samples in all).

    Raises:
        OSError: A file can't be written; no file is left half-written.
    """
    count, hotness = data.num_samples, data.spec.hotness
    with contextlib.ExitStack() as stack:

        def array(name: str, kind: type, shape: tuple[int, ...]) -> NDArray[np.generic]:
            path = stack.enter_context(_whole_or_nothing(folder / name))
            return np.lib.format.open_memmap(path, "w+", np.dtype(kind), shape)

        dense = array("dense.npy", np.float32, (count, data.num_dense))
        label = array("labels.npy", np.int32, (count, 1))
        is_single = max(hotness) == 1
        name = "sparse.npy" if is_single else "all-lookups.npy"
        ids = array(name, np.int32, (count, sum(hotness)))
        for samples in _chunks(count):
            rows = data.generator.generate(samples)
            dense[samples], label[samples], ids[samples] = rows.dense, rows.label[:, None], rows.ids
            progress(f"writing {folder}", int(samples[-1]) + 1, count)
        for written in (dense, label, ids):
            written.flush()  # type: ignore[attr-defined]
        if is_single:
            return
        members = np.split(ids, np.cumsum(hotness)[:-1], axis=1)
        path = stack.enter_context(_whole_or_nothing(folder / "sparse_multi_hot.npz"))
        with path.open("wb") as stream:
            np.savez(stream, **{str(j): values for j, values in enumerate(members)})
    if not is_single:
        (folder / "all-lookups.npy").unlink()


def write_scores(
    path: Path,
    *,
    rows: NDArray[np.int64],
    logits: NDArray[np.float32],
    labels: NDArray[np.float32] | None,
) -> None:
    """Write the Parquet columns row, score (the sigmoid, float64) and label (uint8).

    Args:
        path: The file.
        rows: Number of each sample in its source, shape (N,).
        logits: Predictions before the sigmoid, shape (N,). As float64 their sigmoids keep the
            order, so that the file gives the same AUC.
        labels: 0 or 1, shape (N,); None leaves the column out.

    Raises:
        DataError: Polars is not installed.
        OSError: The file can't be written; nothing is left behind.
    """
    polars = import_polars()
    scores = np.exp(-np.logaddexp(0.0, -logits.astype(np.float64)))
    columns = {"row": rows, "score": scores}
    if labels is not None:
        columns["label"] = labels.astype(np.uint8)
    with _whole_or_nothing(path) as unfinished:
        polars.DataFrame(columns).write_parquet(unfinished)
