"""Train a DLRM whose embedding rows live in a pool: every batch durable, exact resume.

Read it from top to bottom: `train` opens the data and the pool, `Training` builds the model and has
the loop. What both need before the first batch is in `train_setup.py`.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from math import isfinite, isnan, nan
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from trainingcxl.checkpoint import FaultTolerantRun
from trainingcxl.config import ScheduleSettings, Settings
from trainingcxl.data import Batch, BatchLoader, Dataset
from trainingcxl.errors import TrainingCXLError
from trainingcxl.evaluation import predictions
from trainingcxl.metrics import Metrics, measure
from trainingcxl.models import DLRM
from trainingcxl.nn import EmbeddingBagCollection
from trainingcxl.pool import Pool
from trainingcxl.profile import Profile, ProfileRequest
from trainingcxl.setting_values import widths
from trainingcxl.train_setup import (
    Report,
    Stop,
    check_settings,
    choose_gemm,
    is_finished,
    make_dense_optimizer,
    make_row_optimizer,
    make_tables,
    model_shape,
    num_threads,
    open_source,
    open_training_pool,
    prepare_torch,
    recorded_level,
    settings_to_record,
    split_data,
)

__all__ = ["EarlyStopping", "Training", "learning_rate_factor", "train"]

_SKIPPED_IN_A_ROW_MAX = 10


def train(
    settings: Settings, report: Report, stop: Stop, profile: ProfileRequest | None = None
) -> Metrics | None:
    """Train as the settings say, or go on where an earlier run of the same settings stopped.

    Args:
        settings: What to train, on what, and in which pool.
        report: Told of everything that a user may want to know.
        stop: Asked between batches; on its request all that is committed is made durable.
        profile: Where the time of the batches goes is to be measured.

    Returns:
        Quality on the held-out samples at the end; None if none are held out, if the run had been
        finished before (it is left untouched), or if it was stopped.

    Raises:
        ConfigError: The pool was trained with other settings that change the result.
        PoolError, DurabilityUnavailable, RecoveryError: The pool cannot be used as asked.
        DataError: The data cannot be read.

    Every batch is a recovery point as soon as it ends.
    """
    device = prepare_torch(settings.run)
    report.event("compute", device=str(device), threads=num_threads(settings.run))
    data = open_source(settings, report)
    if is_finished(settings, data, report):
        return None
    with open_training_pool(settings, data, report) as pool:
        if pool.resume_record is not None:
            check_settings(pool.resume_record, settings, data, report)
        training = Training(settings, data, pool, device, report, stop, profile)
        with stop.deferred():
            return training.go_on()


class Training:
    """A model in a pool, its data and its loop, standing where the pool's recovery point is."""

    def __init__(
        self,
        settings: Settings,
        data: Dataset,
        pool: Pool,
        device: torch.device,
        report: Report,
        stop: Stop,
        profile: ProfileRequest | None = None,
    ) -> None:
        """Build model and optimizers, and restore them from the pool if it holds a run."""
        self.settings, self.report, self.stop, self.device = settings, report, stop, device
        training_data, held_out = split_data(settings, data)
        self.loader = BatchLoader(
            training_data,
            settings.run.batch_size,
            shuffle=settings.data.shuffle,
            seed=settings.run.seed,
        )
        self.held_out = held_out
        self.row_optimizer = make_row_optimizer(settings.rows)
        embeddings = EmbeddingBagCollection(
            pool,
            tables=make_tables(data, settings),
            optimizer=self.row_optimizer,
            seed=settings.run.seed,
        )
        self.model = DLRM(
            embeddings,
            num_dense=data.num_dense,
            bottom=widths("model.bottom", settings.model.bottom),
            top=widths("model.top", settings.model.top),
            seed=settings.run.seed,
        ).to(device)
        gemm = choose_gemm(
            self.model, settings, pool.resume_record, device, report, num_samples=data.num_samples
        )
        level = recorded_level(pool.resume_record, pool.durability)
        chosen = {"dense.gemm": gemm, "pool.durability": level}
        self.settings = settings = settings.with_values(chosen)
        self.dense_optimizer = make_dense_optimizer(settings.dense, self.model.parameters())
        self.early_stopping = EarlyStopping(settings.eval.patience)
        self._set_learning_rates(max(0, _trained(pool, len(self.loader)) - 1))
        fixed, free = settings_to_record(settings, data)
        every = settings.run.dense_every
        self.run = FaultTolerantRun(
            pool,
            self.model,
            self.dense_optimizer,
            state={"early_stopping": self.early_stopping} if settings.eval.patience else None,
            settings=fixed,
            remarks=free,
            dense_every=every if every == "auto" else int(every),
            strict=settings.run.strict,
        )
        self.profile = profile
        self.model_shape = model_shape(settings, data) if profile else None
        for notice in self.run.notices:
            report.event("notice", text=notice)
        self.metrics: Metrics | None = None
        self.skipped_in_a_row = 0
        self.pace = _Pace()

    @property
    def trained(self) -> int:
        """Number of batches trained, over all epochs and lives of the run."""
        return self.run.epoch * len(self.loader) + self.run.batch

    def go_on(self) -> Metrics | None:
        """Train from where the pool stands to the end, or to where it should stop.

        Returns:
            Quality on the held-out samples at the end; None if none are held out or if stopped.
        """
        if self.settings.eval.patience:
            self._evaluate_if_due()  # the last life may have ended between a batch and this
        if not self._is_over():
            with self._profiled():
                self._train()
        if self.metrics is None:
            self._evaluate()
        if self.stop.requested:
            self.run.sync()
            self.report.event("stopped", **self._position())
            return None
        if not self.run.finished:
            self.run.finish()
        self._report_result()
        return self.metrics

    @contextmanager
    def _profiled(self) -> Iterator[None]:
        """Take the profile that was asked for, and show it."""
        if self.profile is None:
            yield
            return
        profile = Profile(
            self.run,
            self.profile.out,
            batches=self.profile.batches,
            tensorboard=self.profile.tensorboard,
            model=self.model_shape,
        )
        with profile:
            yield
        self.report.show(profile.table())
        self.report.event("profile", batches=profile.totals.batches, file=str(self.profile.out))

    def _train(self) -> None:
        self.pace.mark()
        for _ in self.run.epochs(self.settings.run.epochs):
            for batch in self.run.batches(self.loader):
                self._set_learning_rates(self.trained)
                loss = self._loss(batch)
                if isfinite(loss.item()):
                    self.run.step(loss)
                    self.skipped_in_a_row = 0
                else:
                    self._skip(loss.item())
                self.metrics = None
                self.pace.add(len(batch.label), loss.item())
                self._report_progress()
                self._evaluate_if_due()
                self.pace.mark()
                if self._is_over():
                    return

    def _loss(self, batch: Batch) -> Tensor:
        logits = self.model(batch.dense.to(self.device), batch.sparse)
        labels = batch.label.to(self.device)
        return nn.functional.binary_cross_entropy_with_logits(logits, labels)

    def _set_learning_rates(self, trained: int) -> None:
        """Set both rates from the number of batches trained, so that no schedule needs a state."""
        factor = learning_rate_factor(self.settings.schedule, trained)
        for optimizer, rate in (
            (self.dense_optimizer, self.settings.dense.lr),
            (self.row_optimizer, self.settings.rows.lr),
        ):
            for group in optimizer.param_groups:
                group["lr"] = rate * factor

    def _skip(self, loss: float) -> None:
        self.run.skip()
        self.skipped_in_a_row += 1
        self.report.event("skipped", batch=self.trained, loss=loss)
        if self.skipped_in_a_row > _SKIPPED_IN_A_ROW_MAX:
            raise TrainingCXLError(
                f"the loss was not finite for {self.skipped_in_a_row} batches in a row\n"
                f"  where: pool {self.settings.pool.path!r}, batch {self.trained}\n"
                "  state: these batches changed nothing\n"
                "  do:    lower dense.lr or rows.lr and start over with --fresh"
            )

    def _is_over(self) -> bool:
        return self.stop.requested or self.early_stopping.stopped

    def _evaluate_if_due(self) -> None:
        every = self.settings.eval.every or len(self.loader)
        is_due = self.trained > 0 and self.trained % every == 0
        if is_due and not self.early_stopping.has_seen(self.trained):
            self._evaluate()
            if self.metrics is not None:
                self.early_stopping.see(self.trained, self.metrics.auc)

    def _evaluate(self) -> None:
        """Judge the model on the held-out samples; a request to stop ends it without a figure."""
        if self.held_out is None:
            return
        labels, logits = [], []
        for batch_labels, batch_logits in predictions(self.model, self.held_out, self.device):
            if self.stop.requested:
                return
            labels.append(batch_labels)
            logits.append(batch_logits)
        all_logits = np.concatenate(logits)
        if not np.isfinite(all_logits).all():
            raise TrainingCXLError(
                f"the training has diverged: after batch {self.trained} predictions for held-out "
                f"samples are not finite\n  where: pool {self.settings.pool.path!r}\n"
                "  state: that batch is committed\n"
                "  do:    lower dense.lr or rows.lr and start over with --fresh"
            )
        self.metrics = measure(np.concatenate(labels), all_logits)
        self.report.event("evaluation", **self._position(), **asdict(self.metrics))

    def _position(self) -> dict[str, int | None]:
        return {
            "epoch": self.run.epoch,
            "committed_batch": self.run.committed_batch,
            "durable_batch": self.run.durable_batch,
        }

    def _report_progress(self) -> None:
        self.report.progress(
            "train",
            self.trained,
            self.settings.run.epochs * len(self.loader),
            committed_batch=self.run.committed_batch,
            durable_batch=self.run.durable_batch,
            loss=self.pace.loss,
            samples_per_second=self.pace.samples_per_second,
        )

    def _report_result(self) -> None:
        """Say how good the model is, how fast it was trained, and what durability cost."""
        stats = self.run.stats
        waits = stats.flag_wait_s + stats.commit_s
        dense = stats.dense_copy_s + stats.dense_wait_s
        self.report.event(
            "result",
            **self._position(),
            **(asdict(self.metrics) if self.metrics else {}),
            stopped_early=self.early_stopping.stopped,
            samples_per_second=self.pace.samples_per_second,
            log_bytes=stats.log_bytes,
            dense_bytes=stats.dense_bytes,
            dense_every=self.run.dense_every,
            unannounced_batches=stats.unannounced_batches,
            fused_batches=stats.fused_batches,
            flag_wait_share=self.pace.share(stats.flag_wait_s),
            durability_share=self.pace.share(waits + dense),
        )


def _trained(pool: Pool, batches_per_epoch: int) -> int:
    record = pool.resume_record
    return record["epoch"] * batches_per_epoch + record["batch"] if record else 0


class EarlyStopping:
    """Stops a run when its AUC has not risen for some evaluations; survives a kill (case A9)."""

    def __init__(self, patience: int) -> None:
        """Stop after `patience` evaluations without a better AUC; 0 is never."""
        self.patience = patience
        self.best_auc = -1.0
        self.disappointments = 0
        self.seen_batch = -1

    @property
    def stopped(self) -> bool:
        """Whether patience is at its end."""
        return bool(self.patience) and self.disappointments >= self.patience

    def has_seen(self, batch: int) -> bool:
        """Return whether the evaluation after this many batches is counted already."""
        return self.seen_batch == batch

    def see(self, batch: int, auc: float) -> None:
        """Count the AUC found after this many batches."""
        if self.has_seen(batch):
            return
        self.seen_batch = batch
        self.disappointments = 0 if auc > self.best_auc else self.disappointments + 1
        self.best_auc = max(self.best_auc, auc)

    def state_dict(self) -> dict[str, float]:
        """Return what a resumed run must know."""
        return {
            "best_auc": self.best_auc,
            "disappointments": self.disappointments,
            "seen_batch": self.seen_batch,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` gave."""
        self.best_auc = float(state["best_auc"])
        self.disappointments = int(state["disappointments"])
        self.seen_batch = int(state["seen_batch"])


class _Pace:
    """Recent loss and overall speed of this life of the run, evaluation left out."""

    def __init__(self) -> None:
        self.samples = 0
        self.seconds = 0.0
        self.loss = nan

    def mark(self) -> None:
        """Begin to count the time of the next batch."""
        self._begin = time.perf_counter()

    def add(self, samples: int, loss: float) -> None:
        """Count a batch that ends now."""
        self.samples += samples
        self.seconds += time.perf_counter() - self._begin
        self.loss = loss if isnan(self.loss) else 0.98 * self.loss + 0.02 * loss

    @property
    def samples_per_second(self) -> float | None:
        return self.samples / self.seconds if self.seconds else None

    def share(self, seconds: float) -> float | None:
        """Return a time's share of all; None where this life had no batch to train."""
        return seconds / self.seconds if self.seconds else None


def learning_rate_factor(schedule: ScheduleSettings, batch: int) -> float:
    """Return the factor on the learning rates of the step that follows `batch` trained batches."""
    rise = min(1.0, (batch + 1) / schedule.warmup) if schedule.warmup else 1.0
    if not schedule.decay_batches:
        return rise
    decayed = max(0, batch - schedule.decay_start) / schedule.decay_batches
    return rise * max(0.0, 1.0 - decayed) ** 2
