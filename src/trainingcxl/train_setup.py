"""What training needs before its first batch: torch, data, pool, tables, optimizers."""

import json
import os
import random
import sys
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from trainingcxl import optim
from trainingcxl.config import (
    DenseSettings,
    Effect,
    RowSettings,
    RunSettings,
    Settings,
    differences,
    effect_of,
)
from trainingcxl.data import Dataset, open_data, split_dataset
from trainingcxl.errors import ConfigError, PoolError, RecoveryError
from trainingcxl.models.linear import Timing, has_onednn, layer_flops, measure_gemms, set_gemm
from trainingcxl.nn import EmbeddingBagConfig
from trainingcxl.pool import Pool, inspect
from trainingcxl.setting_values import hash_sizes, widths

__all__ = [
    "Report",
    "Silent",
    "Stop",
    "check_settings",
    "choose_gemm",
    "is_finished",
    "make_dense_optimizer",
    "make_row_optimizer",
    "make_tables",
    "model_shape",
    "num_threads",
    "open_source",
    "open_training_pool",
    "prepare_torch",
    "recorded_level",
    "settings_to_record",
    "split_data",
]

_WORTH_CHANGING = 1.1  # less is noise, and torch's own is what people compare with
_FLOPS_MIN = 200_000_000  # of a step; below, calls cost more than products


class Report(Protocol):
    """Where training says what happens."""

    def event(self, name: str, **values: Any) -> None:
        """Take note of something that has happened."""

    def progress(self, work: str, done: int, total: int, **values: Any) -> None:
        """Take note of how far a long piece of work has come."""

    def show(self, text: str) -> None:
        """Show a text of several lines to people."""


class Stop(Protocol):
    """How training learns that it should stop before its end."""

    @property
    def requested(self) -> bool:
        """Whether to stop after the batch in flight."""

    def deferred(self) -> AbstractContextManager[None]:
        """Promise to look at `requested` between batches."""


class Silent:
    """A report that nobody reads and a stop that never comes, for training inside a program."""

    requested = False

    def event(self, name: str, **values: Any) -> None:
        """Let it pass."""

    def progress(self, work: str, done: int, total: int, **values: Any) -> None:
        """Let it pass."""

    def show(self, text: str) -> None:
        """Let it pass."""

    def deferred(self) -> AbstractContextManager[None]:
        """Promise nothing."""
        return nullcontext()


def prepare_torch(run: RunSettings) -> torch.device:
    """Make torch compute the same bits every time, and choose where.

    Returns:
        The device of the dense part.

    Raises:
        ConfigError: A GPU is asked for and torch sees none.
    """
    # Without it the sums of a matrix product depend on the number of threads. It takes effect
    # before the first product of the process; measured cost: 0 to 15 % of a dense step.
    os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # or cuBLAS is not deterministic
    torch.use_deterministic_algorithms(True)
    # Else torch makes a pass over every new tensor.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.set_num_threads(num_threads(run))
    # Nothing here draws from the global generators, but their states are part of what a resumed
    # run restores: two runs of the same settings must hold the same.
    random.seed(run.seed)
    np.random.seed(run.seed % (1 << 32))
    torch.manual_seed(run.seed)
    if run.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            f"run.device is 'cuda', but torch {torch.__version__} sees no GPU\n"
            "  do:    install a CUDA build of torch, or use --device cpu"
        )
    has_gpu = run.device != "cpu" and torch.cuda.is_available()
    return torch.device("cuda" if has_gpu else "cpu")


def num_threads(run: RunSettings) -> int:
    """Return the threads to use: as set, or one for each core that this process may use."""
    return run.threads or len(os.sched_getaffinity(0))


def make_tables(data: Dataset, settings: Settings) -> list[EmbeddingBagConfig]:
    """Give every categorical column a table of its own; several ids of a sample are summed."""
    return [
        EmbeddingBagConfig(
            name=feature.name,
            num_embeddings=feature.cardinality,
            embedding_dim=settings.model.embedding_dim,
            feature_names=[feature.name],
            pooling="sum",
            init_scale=settings.rows.init_scale or None,
        )
        for feature in data.features
    ]


def make_row_optimizer(rows: RowSettings) -> optim.RowOptimizer:
    """Build the optimizer of the embedding rows."""
    if rows.optimizer == "sgd":
        return optim.SGD(lr=rows.lr)
    if rows.optimizer == "adagrad":
        return optim.Adagrad(lr=rows.lr, eps=rows.eps)
    return optim.RowWiseAdagrad(lr=rows.lr, eps=rows.eps)


def make_dense_optimizer(
    dense: DenseSettings, parameters: Iterable[Tensor]
) -> torch.optim.Optimizer:
    """Build the optimizer of the dense part."""
    if dense.optimizer == "sgd":
        return torch.optim.SGD(parameters, lr=dense.lr)
    if dense.optimizer == "adagrad":
        return torch.optim.Adagrad(parameters, lr=dense.lr)
    return torch.optim.Adam(parameters, lr=dense.lr)


def choose_gemm(
    model: nn.Module,
    settings: Settings,
    record: Mapping[str, Any] | None,
    device: torch.device,
    report: Report,
    *,
    num_samples: int = sys.maxsize,
) -> str:
    """Choose the matrix products of the dense part, and say so.

    Args:
        model: Its layers are timed where nothing else decides, and set.
        settings: What is asked for.
        record: The pool's resume record, None for a new run. The same products are used again;
            they are never measured anew, as that might change the bits.
        device: Of the dense part.
        report: Told of the choice and of what was measured.
        num_samples: Of the data: no batch is larger.

    Returns:
        mkl or onednn.

    Raises:
        ConfigError: This torch has no oneDNN, and it was asked for.
    """
    times: dict[str, Timing] = {}
    batch_size = min(settings.run.batch_size, num_samples)
    chosen, why = settings.dense.gemm, "set"
    if chosen == "auto" and record is not None:
        chosen, why = _recorded_gemm(record), "as the pool was trained"
    elif chosen == "auto" and (device.type != "cpu" or not has_onednn()):
        chosen, why = "mkl", "no other for this device and torch"
    elif chosen == "auto" and layer_flops(model, batch_size) < _FLOPS_MIN:
        chosen, why = "mkl", "the products are too small to matter"
    elif chosen == "auto":
        times = measure_gemms(model, batch_size)
        is_faster = times["mkl"].is_beaten_by(times["onednn"], _WORTH_CHANGING)
        chosen, why = "onednn" if is_faster else "mkl", "measured"
    if chosen == "onednn" and not has_onednn():
        what = (
            f"torch {torch.__version__} has no oneDNN here for matrix products of full float32 "
            "accuracy (is ONEDNN_DEFAULT_FPMATH_MODE set?)"
        )
        if record is None or settings.dense.gemm != "auto" or settings.run.strict:
            raise ConfigError(
                f"dense.gemm is 'onednn', but {what}\n"
                "  do:    use --dense-gemm mkl, or another torch"
            )
        notice = f"the pool was trained with oneDNN, but {what}: the last bits may differ"
        report.event("notice", text=notice)
        chosen = "mkl"
    set_gemm(model, chosen)
    figures = {f"{name}_ms": round(spent.median, 3) for name, spent in times.items()}
    report.event("dense_gemm", chosen=chosen, why=why, **figures)
    return chosen


def _recorded_gemm(record: Mapping[str, Any]) -> str:
    return str(record["volatile"]["remarks"].get("dense.gemm", "mkl"))  # before it was recorded


def model_shape(settings: Settings, data: Dataset) -> dict[str, Any]:
    """Describe the model as `trainingcxl simulate` reads it; lists of ids by their mean length."""
    head = data.read(np.arange(min(data.num_samples, 4096), dtype=np.int64))
    dim = settings.model.embedding_dim
    lookups = {
        name: max(1, round(float(np.mean(ids.lengths)))) for name, ids in head.jagged.items()
    }
    return {
        "name": "trained",
        "batch": settings.run.batch_size,
        "interaction": settings.model.interaction,
        "bottom": [max(data.num_dense, 1), *widths("model.bottom", settings.model.bottom), dim],
        "top": [*widths("model.top", settings.model.top), 1],
        "table": [
            {"count": 1, "rows": f.cardinality, "lookups": lookups.get(f.name, 1), "dim": dim}
            for f in data.features
        ],
    }


def recorded_level(record: Mapping[str, Any] | None, level: str) -> str:
    """Return the durability level that a run has on record, `level` for a new one."""
    return level if record is None else str(record["settings"].get("pool.durability", level))


def settings_to_record(settings: Settings, data: Dataset) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what the pool keeps for later runs to compare with: what is fixed, and what is not.

    Only the first part is of the run's logical state: runs that differ in the second have the same
    digest. Both name the source of the data by its fingerprint as well, as files may move.
    """
    fixed: dict[str, Any] = {"data.fingerprint": data.fingerprint}
    free: dict[str, Any] = {}
    for name, value in settings.flat().items():
        is_fixed = effect_of(name, settings) is Effect.RESULT and name != "data.source"
        (fixed if is_fixed else free)[name] = value
    return fixed, free


def open_source(settings: Settings, report: Report, *, require_labels: bool = True) -> Dataset:
    """Open the data, converting text to arrays if that has not been done, and say what it is."""
    wanted = settings.data
    data = open_data(
        wanted.source,
        cache_dir=settings.cache.dir or Path(settings.pool.path) / "cache",
        hash_size=hash_sizes(wanted.hash_size),
        max_bad_lines=wanted.max_bad_lines,
        require_labels=require_labels,
        schema=wanted.schema or None,
        progress=report.progress,
    )
    for line in data.report.bad_lines:
        report.event("bad_line", line=line)
    for note in data.report.notes:
        report.event("note", note=note)
    report.event(
        "data",
        samples=data.num_samples,
        dense_columns=data.num_dense,
        features=len(data.features),
        rows=sum(data.cardinalities.values()),
    )
    return data


def split_data(settings: Settings, data: Dataset) -> tuple[Dataset, Dataset | None]:
    """Split the data into what is trained on and what is held out (None for nothing)."""
    is_random = settings.eval.split == "random"
    return split_dataset(
        data, settings.eval.fraction, order=settings.run.seed if is_random else None
    )


def _rows_per_batch_max(settings: Settings, data: Dataset) -> int | None:
    """Return how many rows a batch can change; None if a sample may look up any number."""
    if any(feature.is_jagged for feature in data.features):
        return None
    batch_size = settings.run.batch_size
    return sum(min(batch_size, feature.cardinality) for feature in data.features)


def open_training_pool(settings: Settings, data: Dataset, report: Report) -> Pool:
    """Open or create the pool, and say what was found and what will be durable from now on."""
    wanted, path = settings.pool, Path(settings.pool.path)
    has_files = path.is_dir() and any(e.name not in ("cache", "lock") for e in path.iterdir())
    pool = Pool(
        path,
        device=wanted.device,
        durability=wanted.durability,
        resume=wanted.resume,
        threads=num_threads(settings.run),
        rows_per_batch_max=wanted.rows_per_batch_max or _rows_per_batch_max(settings, data),
        log_bytes=wanted.log_bytes or None,
        keep_dense=wanted.keep_dense if wanted.keep_dense == "auto" else int(wanted.keep_dense),
        lookahead=wanted.lookahead,
        lookup=wanted.lookup,
        undo_log=wanted.undo_log,
        lag_max=wanted.lag_max,
        journal_bytes=wanted.journal_bytes or None,
        check_rows=wanted.check_rows,
        trust_after_reboot=wanted.trust_after_reboot,
        progress=lambda what, done, total: report.progress("create tables", done, total),
    )
    if pool.is_new and has_files:
        report.event("created_anew", pool=str(path), why="its creation had not been completed")
    if pool.recovery is not None:
        report.event(
            "recovery",
            resume=pool.recovery.resume,
            committed_batch=pool.recovery.committed_batch,
            resumed_batch=pool.recovery.resumed_batch,
            rows_rolled_back=pool.recovery.rows_rolled_back,
            batches_to_redo=pool.recovery.batches_to_redo,
            milliseconds=pool.recovery.milliseconds,
        )
    report.event(
        "durability",
        pool=str(path),
        uuid=pool.uuid,
        medium=pool.medium,
        level=pool.durability,
        survives={"process": "kill -9", "power": "kill -9 and power loss"}[pool.durability],
        every_batches=1,
        dense_every=settings.run.dense_every,
    )
    return pool


def is_finished(settings: Settings, data: Dataset, report: Report) -> bool:
    """Say so if the pool's run has done all that is asked; opens the pool for reading only."""
    path = settings.pool.path
    try:
        if not inspect(path)["finished"]:
            return False
    except PoolError:  # no pool yet, or one that cannot be read: opening it will tell
        return False
    with Pool(path, read_only=True) as pool:
        record = pool.resume_record
        if record is None:
            return False
        target = record["target_epochs"]
        was_stopped_early = target is None or record["epoch"] < target
        if not was_stopped_early and record["epoch"] < settings.run.epochs:
            return False
        check_settings(record, settings, data, report)
        report.event(
            "finished",
            pool=path,
            uuid=pool.uuid,
            epochs=record["epoch"],
            stopped_early=was_stopped_early,
            committed_batch=pool.committed_batch,
            do="--fresh starts over" + ("" if was_stopped_early else ", more --epochs train on"),
        )
    return True


def check_settings(
    record: dict[str, Any], settings: Settings, data: Dataset, report: Report
) -> None:
    """Refuse settings that would change the result of the pool's run; report all other changes.

    Args:
        record: The pool's resume record.
        settings: The settings given now.
        data: The data opened now; equal data may have moved to another place.
        report: Told of changes that leave the result, or all but its last bits.

    Raises:
        ConfigError: Names each setting that changes the result, with both values.
    """
    recorded = record["settings"] | record["volatile"]["remarks"]
    recorded.setdefault("dense.gemm", _recorded_gemm(record))
    if settings.dense.gemm == "auto":
        settings = settings.with_values({"dense.gemm": recorded["dense.gemm"]})
    # The pool itself refuses another level; a snapshot may have one of its own, and goes on.
    level = recorded_level(record, settings.pool.durability)
    settings = settings.with_values({"pool.durability": level})
    if "data.fingerprint" not in recorded:
        raise RecoveryError(
            f"pool {settings.pool.path!r} was not trained by 'trainingcxl train'\n"
            "  state: nothing was changed\n"
            "  do:    go on with the program that made it, or name another --pool"
        )
    trained_on = recorded["data.fingerprint"]
    trains_on = json.loads(json.dumps(data.fingerprint))  # as the pool's record has it
    refused = []
    for change in differences(recorded, settings):
        has_only_moved = change.name == "data.source" and trained_on == trains_on
        if change.effect is Effect.RESULT and not has_only_moved:
            refused.append((change.name, change.recorded, change.current))
        else:
            report.event(
                "setting_changed",
                setting=change.name,
                before=change.recorded,
                now=change.current,
                effect=(Effect.NONE if has_only_moved else change.effect).value,
            )
    if not refused:
        refused = [
            (f"fingerprint of the data, {key}", trained_on.get(key), trains_on.get(key))
            for key in trained_on | trains_on
            if trained_on.get(key) != trains_on.get(key)
        ]
    if refused:
        lines = [f"  {name}: {old!r} in the pool, {new!r} now" for name, old, new in refused]
        raise ConfigError(
            f"pool {settings.pool.path!r} was trained with other settings, which would change "
            "the result\n" + "\n".join(lines) + "\n"
            "  state: nothing was changed\n"
            "  do:    give the settings of the pool to go on, name another --pool, or discard the "
            "run with --fresh"
        )
