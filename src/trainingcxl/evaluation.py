"""Judge and use the model in a pool, without the program that trained it and without a change.

`TrainedPool` opens a pool that `trainingcxl train` made for reading only, rebuilds the model from
what its resume record holds, and scores samples of any data that fits the model.
"""

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from trainingcxl.config import Settings, Value
from trainingcxl.data import BatchLoader, Dataset, Rows, Subset
from trainingcxl.data.dataset import Jagged
from trainingcxl.errors import ConfigError, DataError, PoolError, PoolLocked, RecoveryError
from trainingcxl.metrics import Metrics, measure
from trainingcxl.models import DLRM
from trainingcxl.models.linear import has_onednn, set_gemm
from trainingcxl.nn import EmbeddingBagCollection, EmbeddingBagConfig
from trainingcxl.pool import Pool
from trainingcxl.resume import environment, restore_dense
from trainingcxl.setting_values import widths
from trainingcxl.state import decode_blob
from trainingcxl.train_setup import Report, open_source, prepare_torch, split_data

__all__ = ["MAY_BE_SET", "Samples", "Scores", "TrainedPool", "predictions"]

MAY_BE_SET = (
    "data.source", "data.schema", "data.max_bad_lines", "cache.dir", "run.threads", "run.device",
    "pool.device", "pool.resume", "pool.trust_after_reboot",
)  # fmt: skip
"""Settings that may differ from those of the training; all others are the pool's."""

_BATCH = 8192  # of the figures of training too: the same batches, the same bits


def predictions(
    model: DLRM, data: Dataset, device: torch.device, *, features: Sequence[str] | None = None
) -> Iterator[tuple[NDArray[np.float32], NDArray[np.float32]]]:
    """Yield labels and logits, each float32 (B,), batch after batch in the order of the data.

    Args:
        model: In evaluation mode meanwhile; no gradient is kept.
        data: The samples. Labels are nan where they have none.
        device: Where the dense part of the model is.
        features: Those that the model takes; None is all that the data has.
    """
    was_training = model.training
    model.eval()
    loader = BatchLoader(data, _BATCH, seed=0, shuffle=False, fields=features)
    try:
        with torch.no_grad():
            for batch in loader:
                logits = model(batch.dense.to(device), batch.sparse)
                yield batch.label.numpy(), logits.cpu().numpy()
    finally:
        model.train(was_training)


@dataclass(frozen=True, kw_only=True, slots=True)
class Samples:
    """What is to be scored.

    Attributes:
        data: The samples.
        source: Text form of the source they are from.
        part: "all" of the source, or what training "held out" of it.
    """

    data: Dataset
    source: str
    part: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Scores:
    """Predictions for some samples, in their order.

    Attributes:
        rows: Number of each sample in its source, int64, (N,).
        logits: Predictions before the sigmoid, float32, (N,).
        labels: 0 or 1, float32, (N,); None where the source has none.
    """

    rows: NDArray[np.int64]
    logits: NDArray[np.float32]
    labels: NDArray[np.float32] | None

    def metrics(self) -> Metrics:
        """Judge the predictions as training does.

        Raises:
            DataError: There are no labels to judge by.
        """
        if self.labels is None:
            raise DataError("the data has no labels to judge by\n  do:    'predict' needs none")
        return measure(self.labels, self.logits)


class TrainedPool(AbstractContextManager["TrainedPool"]):
    """A pool of `trainingcxl train` that no trainer has open, opened for reading only.

    A pool whose process died is read as of the batch that its next training would go on from:
    recovery happens in private memory. Not one byte of the pool changes.

    Args:
        path: The pool.
        changes: Settings that differ from those of the training; names of `MAY_BE_SET`.
        report: Told what was found.

    Raises:
        ConfigError: A setting is the pool's own.
        PoolLocked: A training has it open; names its process.
        RecoveryError: It holds no model that `trainingcxl train` made.
        PoolError: There is no pool, or no training in it yet.
    """

    def __init__(self, path: Path, changes: Mapping[str, Value], report: Report) -> None:
        _check_changes(path, changes)
        self._held = ExitStack()
        self.path, self._report = path, report
        self._changes = dict(changes)
        self.pool = self._held.enter_context(_open(path, changes))
        try:
            record = _record_of(self.pool)
            self._recorded = record["settings"] | record["volatile"]["remarks"]
            known = Settings().flat()
            recorded = {name: self._recorded[name] for name in known if name in self._recorded}
            self.settings = Settings().with_values({**recorded, **changes})
            self._record = record
            self._tell()
            self._device = prepare_torch(self.settings.run)
            self._compare_environment()
        except BaseException:
            self.close()
            raise

    def _tell(self) -> None:
        """Say where the training stands, and what a crash made of it."""
        found = self.pool.recovery
        if found is not None and (found.batches_undone or found.batches_to_redo):
            self._report.event(
                "recovery",
                resume=found.resume,
                committed_batch=found.committed_batch,
                resumed_batch=found.resumed_batch,
                rows_rolled_back=found.rows_rolled_back,
                changes_the_pool=False,
            )
        self._report.event("pool", pool=str(self.path), uuid=self.pool.uuid, **self.position)

    def _compare_environment(self) -> None:
        there = self._record["volatile"]
        for name, here in environment().items():
            if name in there and there[name] != here:
                self._report.event(
                    "notice",
                    text=f"{name} is {here}, the pool was trained with {there[name]}: "
                    "the last bits may differ",
                )

    @property
    def position(self) -> dict[str, Any]:
        """What the pool is read as of."""
        return {
            "batch": self.pool.committed_batch,
            "epoch": self._record["epoch"],
            "finished": self._record["finished"],
        }

    def samples(
        self, *, held_out: bool = False, wrap_ids: bool = False, require_labels: bool = True
    ) -> Samples:
        """Open the data that the setting data.source names, or else what the pool held out.

        Args:
            held_out: Of the data named, take only what training held out; it must be the pool's.
            wrap_ids: Take ids beyond a table modulo its rows, instead of refusing them.
            require_labels: Refuse data without labels.

        Raises:
            ConfigError: There is no held-out part, or the data named is not the pool's.
            DataError: The data cannot be read, or does not fit the model.

        Blocks until text is converted. Conversions that the pool has are used; others go to the
        folder of the setting cache.dir, or to one that is removed on close.
        """
        settings = self.settings.with_values({"cache.dir": str(self._cache_folder())})
        data = open_source(settings, self._report, require_labels=require_labels)
        source, differs = settings.data.source, self._differences(data)
        is_named = "data.source" in self._changes
        if (held_out or not is_named) and differs:
            raise ConfigError(
                f"'{source}' is not the data that pool '{self.path}' was trained on, nothing of it "
                "was held out\n"
                + "\n".join(
                    f"  {key}: {old!r} in the pool, {new!r} now" for key, old, new in differs
                )
                + "\n  do:    name the data with --data, without --held-out, to take all of it"
            )
        takes_part = held_out or not is_named
        if is_named and not held_out and not differs:
            text = "the pool was trained on this data: --held-out takes only what it was not"
            self._report.event("notice", text=text)
        if differs:
            self._check_reading(data, source)
        return Samples(
            data=self._fitting(self._part(data) if takes_part else data, wrap_ids=wrap_ids),
            source=source,
            part="held out" if takes_part else "all",
        )

    def score(self, samples: Samples) -> Scores:
        """Predict all samples; keeps 16 bytes for each in memory.

        Raises:
            DataError: A prediction is not finite; names the sample.
        """
        data, num_samples = samples.data, samples.data.num_samples
        rows = _numbers(data)
        labels = np.empty(num_samples, dtype=np.float32)
        logits = np.empty(num_samples, dtype=np.float32)
        done = 0
        for batch_labels, batch_logits in self._predictions(data):
            stop = done + len(batch_logits)
            bad = np.flatnonzero(~np.isfinite(batch_logits))
            if len(bad):
                raise DataError(
                    f"the prediction for row {rows[done + bad[0]]} of '{samples.source}' is "
                    f"{batch_logits[bad[0]]}\n  where: pool '{self.path}', batch "
                    f"{self.pool.committed_batch}\n  do:    look at the dense values of that row; "
                    "if all rows are like it, the training has diverged"
                )
            labels[done:stop], logits[done:stop] = batch_labels, batch_logits
            done = stop
            self._report.progress("score", done, num_samples)
        return Scores(rows=rows, logits=logits, labels=labels if data.has_labels else None)

    def close(self) -> None:
        """Let go of the pool; remove conversions that nobody asked to keep."""
        self._held.close()

    def __exit__(self, *exception: object) -> None:
        self.close()

    # --- inside

    def _cache_folder(self) -> Path:
        """Return a folder for conversions outside the pool; those of the pool appear in it.

        A conversion is found by its name, so a link to one that is complete serves as well as it.
        """
        if named := self._changes.get("cache.dir"):
            return refuse_inside(self.path, Path(str(named)), "cache.dir")
        folder = Path(
            self._held.enter_context(tempfile.TemporaryDirectory(prefix="trainingcxl-cache-"))
        )
        for cache in (self.path / "cache", Path(self.settings.cache.dir or self.path / "cache")):
            for meta in cache.glob("*/meta.json"):
                link = folder / meta.parent.name
                if not meta.parent.name.endswith(".unfinished") and not link.exists():
                    link.symlink_to(meta.parent.resolve(), target_is_directory=True)
        return folder

    def _differences(self, data: Dataset) -> list[tuple[str, Any, Any]]:
        """Return in what the data differs from that of the training; nothing if it is the same."""
        there = self._recorded["data.fingerprint"]
        here = json.loads(json.dumps(data.fingerprint))
        return [
            (key, there.get(key), here.get(key))
            for key in there | here
            if there.get(key) != here.get(key)
        ]

    def _check_reading(self, data: Dataset, source: str) -> None:
        """Make sure that a value of this data means the row that it meant in training."""
        there, here = self._recorded["data.fingerprint"], data.fingerprint
        if there["source"] != here["source"]:
            text = (
                f"the pool was trained on {there['source']}: data, this is {here['source']}: data; "
                "scores mean something only if every column is read alike"
            )
            self._report.event("notice", text=text)
        elif there.get("conversion") == here.get("conversion"):
            return
        elif here["source"] == "criteo":
            raise DataError(
                f"the ids of '{source}' are of another form (ranks or hexadecimal) than those that "
                f"pool '{self.path}' was trained on: they would mean other rows\n"
                "  do:    give data of the form that it was trained on"
            )
        else:
            guessed = not self.settings.data.schema
            raise DataError(
                f"'{source}' is read by another schema than the data of pool '{self.path}' was: "
                "its ids would mean other rows\n"
                + ("  where: the schema is guessed from each file\n" if guessed else "")
                + "  do:    give the schema of the training, --set data.schema=FILE; if that was "
                "guessed, 'trainingcxl schema TRAINING_FILE --output FILE' writes it"
            )

    def _part(self, data: Dataset) -> Dataset:
        _, held_out = split_data(self.settings, data)
        if held_out is None:
            raise ConfigError(
                f"pool '{self.path}' was trained on all of its data (eval.fraction is 0)\n"
                "  do:    name data that it has not seen with --data"
            )
        return held_out

    def _fitting(self, data: Dataset, *, wrap_ids: bool) -> Dataset:
        """Check the data against tables and model; take ids modulo the rows if that is wanted."""
        rows = {name: table.num_embeddings for name, table in self.pool.tables.items()}
        beyond = {
            feature.name: feature.cardinality
            for feature in data.features
            if feature.cardinality > rows.get(feature.name, feature.cardinality)
        }
        if not beyond or not wrap_ids:
            if beyond:
                name, found = next(iter(beyond.items()))
                raise DataError(
                    f"feature '{name}' has ids up to {found - 1}, its table in pool '{self.path}' "
                    f"has {rows[name]} rows\n"
                    "  do:    --wrap-ids takes such ids modulo the rows; they get what another id "
                    "was trained to"
                )
            data.check_tables(rows)
            return data
        self._report.event("wrapped", features=" ".join(beyond))
        data.check_tables({name: count for name, count in rows.items() if name not in beyond})
        return _WrappedIds(data, {name: rows[name] for name in beyond})

    def _predictions(
        self, data: Dataset
    ) -> Iterator[tuple[NDArray[np.float32], NDArray[np.float32]]]:
        model = self._model(data)
        return predictions(model, data, self._device, features=list(self.pool.tables))

    def _model(self, data: Dataset) -> DLRM:
        """Build the model over the pool's tables and load its dense part."""
        tables = [
            EmbeddingBagConfig(
                name=table.name,
                num_embeddings=table.num_embeddings,
                embedding_dim=table.embedding_dim,
                feature_names=[table.name],
            )
            for table in self.pool.tables.values()
        ]
        blob = self.pool.core.dense_blob()
        assert blob is not None, "a pool with a recovery point has a dense generation"
        num_dense = decode_blob(blob)["model"]["bottom.0.weight"].shape[1]
        if max(data.num_dense, 1) != num_dense:
            raise DataError(
                f"the data has {data.num_dense} dense columns, the model in pool '{self.path}' "
                f"takes {num_dense}\n  do:    give data with the columns of the training"
            )
        settings = self.settings.model
        model = DLRM(
            EmbeddingBagCollection(self.pool, tables=tables, optimizer=None),
            num_dense=data.num_dense,
            bottom=widths("model.bottom", settings.bottom),
            top=widths("model.top", settings.top),
        )
        restore_dense(self.pool, model, None, {}, self._record)
        is_onednn = self.settings.dense.gemm == "onednn" and has_onednn()
        set_gemm(model, "onednn" if is_onednn else "mkl")
        return model.to(self._device)


class _WrappedIds(Dataset):
    """Another data set with the ids of some features taken modulo the rows of their tables."""

    def __init__(self, base: Dataset, rows: Mapping[str, int]) -> None:
        self.base, self._rows = base, rows
        self.num_samples, self.dense_names = base.num_samples, base.dense_names
        self.features, self.has_labels = base.features, base.has_labels
        self.fingerprint, self.report = base.fingerprint, base.report

    def read(self, samples: NDArray[np.int64]) -> Rows:
        """Read the samples and wrap their ids."""
        found = self.base.read(samples)
        single = [feature.name for feature in self.features if not feature.is_jagged]
        for column, name in enumerate(single):
            if name in self._rows:
                found.ids[:, column] %= self._rows[name]
        jagged = {
            name: Jagged(ids.values % self._rows[name], ids.lengths) if name in self._rows else ids
            for name, ids in found.jagged.items()
        }
        return Rows(found.dense, found.ids, jagged, found.label)


def _numbers(data: Dataset) -> NDArray[np.int64]:
    """Return the number of each sample in the source."""
    samples = np.arange(data.num_samples, dtype=np.int64)
    if isinstance(data, _WrappedIds):
        return _numbers(data.base)
    return data.numbers(samples) if isinstance(data, Subset) else samples


def refuse_inside(pool: Path, path: Path, what: str) -> Path:
    """Return `path`, unless it lies in a pool that must not change.

    Raises:
        ConfigError: It does.
    """
    if path.resolve().is_relative_to(pool.resolve()):
        raise ConfigError(
            f"{what} is '{path}', inside pool '{pool}', which is only read here\n"
            "  do:    name a place outside the pool"
        )
    return path


def _check_changes(path: Path, changes: Mapping[str, Value]) -> None:
    for name in changes:
        if name not in MAY_BE_SET:
            raise ConfigError(
                f"{name} cannot be set here: the model is the one that pool '{path}' holds\n"
                f"  do:    leave it out; what may be set is {', '.join(MAY_BE_SET)}"
            )


@contextmanager
def _open(path: Path, changes: Mapping[str, Value]) -> Iterator[Pool]:
    if not path.is_dir():
        raise PoolError(f"'{path}' holds no pool\n  do:    check the path; training creates a pool")
    threads = changes.get("run.threads")
    try:
        pool = Pool(
            path,
            read_only=True,
            device=str(changes.get("pool.device", "")),
            resume=str(changes.get("pool.resume", "exact")),
            trust_after_reboot=bool(changes.get("pool.trust_after_reboot", False)),
            threads=int(threads) if threads else None,
        )
    except PoolLocked as error:
        raise PoolLocked(
            f"{str(error).partition(chr(10))[0]}\n"
            f"  do:    take a copy of one batch, 'trainingcxl snapshot {path} COPY', and use that; "
            "or wait for the process, or end it with Ctrl-C: the same command goes on afterwards"
        ) from error
    with pool:
        yield pool


def _record_of(pool: Pool) -> dict[str, Any]:
    """Return the resume record of a pool that `trainingcxl train` made.

    Raises:
        PoolError: Nothing was trained yet.
        RecoveryError: Another program made the pool: only it knows the model.
    """
    record = pool.resume_record
    if record is None:
        raise PoolError(
            f"pool '{pool.path}' holds no training yet\n"
            "  do:    train it first: trainingcxl train --pool PATH"
        )
    if "data.fingerprint" not in record.get("settings", {}):
        raise RecoveryError(
            f"pool '{pool.path}' was not trained by 'trainingcxl train', so it does not say how "
            "to build its model\n"
            "  do:    in the program that made it: open tcxl.Pool(PATH, read_only=True), build the "
            "same modules over it, make tcxl.FaultTolerantRun(pool, model), which restores them, "
            "and call model.eval()"
        )
    return record
