"""FaultTolerantRun: step, commit, resume for the Python side of training (paper: failure tolerant
training).

Every commit makes the batch's rows and a resume record the new recovery point; the dense part is
captured every `dense_every` batches and written in the background (paper: relaxed batch-aware
checkpoint).
"""

import json
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from trainingcxl.batches import BatchFeed, Fetched
from trainingcxl.dense_part import DensePart
from trainingcxl.errors import PoolError
from trainingcxl.gradients import check_dense_grads, clip_dense_grads, scaled_dense_step
from trainingcxl.pool import Pool
from trainingcxl.pool.rewind import choose_point
from trainingcxl.resume import (
    PlainState,
    Recorded,
    changed_environment,
    check_settings,
    environment,
    optimizer_state,
    restore_dense,
    restore_optimizer_state,
)
from trainingcxl.rng import get_rng_state, set_rng_state
from trainingcxl.state import json_bytes
from trainingcxl.stats import StepStats

__all__ = ["FaultTolerantRun", "StepStats"]

_log = logging.getLogger("trainingcxl")


class FaultTolerantRun:
    """Makes a training loop durable at every batch and resumes it exactly.

    Args:
        pool: The pool that the model's embedding modules use.
        model: The model. Its parameters and buffers are the dense part; tables are in the pool.
        dense_optimizer: Optimizer of the dense part, or None.
        state: Further objects with state_dict()/load_state_dict(), by name: schedulers, scalers,
            counters.
        every_batch: Like `state`, for learning-rate schedulers that count batches: every commit
            steps them after the optimizers, so that they are part of its record. (One that the loop
            steps after `run.step` would be a batch behind after a resume. Schedulers that count
            epochs belong in `state`.)
        settings: What must not change between runs (JSON data); compared on resume.
        remarks: What may change (JSON data): kept in `pool.resume_record["volatile"]["remarks"]`,
            never compared.
        dense_every: Capture the dense part every K batches; "auto" keeps its cost within 2 % of the
            step.
        sparse_of: Features of a batch as the embedding module takes them, to announce them ahead.
            Default: `batch.sparse`.
        strict: Another torch, CPU or thread count than recorded is an error, not a warning.

    Construct it after the model, before the loop: where the pool has a recovery point, everything
    is restored here (model, optimizers, states, random generators, position).

    Raises:
        RecoveryError: The pool's state does not fit the model; names the entries.
        ConfigError: A setting differs; names both values.
    """

    def __init__(
        self,
        pool: Pool,
        model: nn.Module,
        dense_optimizer: torch.optim.Optimizer | None = None,
        *,
        state: Mapping[str, Any] | None = None,
        every_batch: Mapping[str, Any] | None = None,
        settings: Mapping[str, Any] | None = None,
        remarks: Mapping[str, Any] | None = None,
        dense_every: int | str = "auto",
        sparse_of: Callable[[Any], Any] | None = None,
        strict: bool = False,
    ) -> None:
        self.pool = pool
        self.model = model
        self.dense_optimizer = dense_optimizer
        self.epoch, self.batch = 0, 0
        self.finished = False
        self.notices: list[str] = []
        self._every_batch = dict(every_batch or {})
        self._state = {**(state or {}), **self._every_batch}
        self._plain_state = PlainState(self._state)
        self._settings = json.loads(json_bytes(dict(settings or {})))  # as it will be read back
        self._remarks = dict(remarks or {})
        self._sparse_of = sparse_of
        self._strict = strict
        self._core = pool.core
        self._table_names = list(pool.tables)
        self._recorded = Recorded()
        self._target_epochs: int | None = None
        self._through = 0
        self._current: Fetched | None = None
        self._feed: BatchFeed | None = None
        self._pending_batches = 0
        self._grad_scale = 1.0
        self._step_seconds = 0.0
        self._last_commit_at: float | None = None
        self._has_warned = False
        self._has_rewound = False  # since the loop over the epochs was last asked
        self._is_restored = False  # no loader has been brought to the recorded place yet
        # Not as they are when a generation is written: by then the loop may have drawn for the next
        # batch.
        self._committed_rng = get_rng_state()
        self._next_epoch = Recorded()  # what the last loader begins the next epoch with
        if pool.transaction.has_run:
            raise PoolError(
                f"pool '{pool.path}' already has a run\n  do:    use that one, or close the pool "
                "and open it again"
            )
        self._notice(*pool.notices)
        self._dense = DensePart(pool, model, dense_optimizer, self._state, every=dense_every)
        if pool.is_new:
            self._dense.capture(self._record_bytes())
            pool.is_new = False
        else:
            self._notice(*self._restore())
        pool.transaction.has_run = True
        pool.on_close(self.close)
        if not pool.is_read_only:
            pool.settle = self._write_generation

    # --- where the run stands

    @property
    def committed_batch(self) -> int:
        """Commits so far: what survives the end of the process."""
        return self.pool.committed_batch

    @property
    def durable_batch(self) -> int | None:
        """Newest batch known to survive a power loss; None where none is promised."""
        return self.pool.durable_batch

    @property
    def dense_every(self) -> int:
        """Batches between two dense generations at present."""
        return self._dense.every

    @property
    def stats(self) -> StepStats:
        """Where the time went since the pool was opened."""
        return StepStats.from_core(self._core.stats(), self._step_seconds)

    # --- the loop

    def epochs(self, num_epochs: int) -> Iterator[int]:
        """Epochs that are still to be trained, up to `num_epochs` in all; a finished one is not
        entered again.

        When the last one is over the run is marked finished. Leaving the loop by `break` does not
        mark it; call `finish()` for that (early stopping).
        """
        if self.finished and self.epoch >= num_epochs:
            self._notice(
                f"the run is complete: {self.epoch} epochs, batch {self.committed_batch}; "
                "nothing to do"
            )
            return
        if self.finished and self._is_stopped_early():
            self._notice(f"the run was finished early in epoch {self.epoch}; nothing to do")
            return
        self.finished = False
        self._target_epochs = num_epochs
        while self.epoch < num_epochs:
            self._has_rewound = False
            yield self.epoch
            if self.finished:
                return
            if not self._has_rewound:
                self._end_epoch()
        self.finish()

    def batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Batches of the present epoch after the last committed one; announces the next while
        one is in use. Ends early after `rewind`.
        """
        feed = BatchFeed(
            loader,
            epoch=self.epoch,
            consumed=self.batch,
            loader_state=self._recorded.loader_state,
            epoch_rng=self._recorded.epoch_rng,
            fetch_rng=self._recorded.fetch_rng,
            is_restored=self._is_restored,
            announce=self._announce,
            lookahead=self.pool.lookahead,
        )
        self._recorded.epoch_rng = feed.epoch_rng
        self._feed = feed
        self._is_restored = False
        self._last_commit_at = time.perf_counter()
        try:
            for fetched in feed:
                self._current = fetched
                self._through = fetched.step_id or self._through
                self._pending_batches += 1
                yield fetched.batch
                if self._feed is not feed:
                    return
                if self._pending_batches == 0:  # a kill before the next commit loses these
                    self._notice(*self._plain_state.changed_late(self.committed_batch))
            self._next_epoch = Recorded(*feed.end_state())
        finally:
            if self._feed is feed:
                self._forget_batches()

    def step(self, loss: Tensor, *, scaler: torch.amp.GradScaler | None = None) -> None:
        """Backward, dense optimizer step, row update, commit; then clears the gradients.

        Args:
            loss: A scalar.
            scaler: Of mixed precision: it scales the loss, its scale is taken off all gradients,
                those of rows too, and a batch whose gradients are not finite is skipped while the
                scale goes down. Pass it in the run's `state` as well.

        Raises:
            ValueError: The loss or a gradient is not finite: nothing has changed, skip() goes on.
        """
        if scaler is not None:
            scale = scaled_dense_step(loss, scaler, self.dense_optimizer, self._prepare)
            if scale is None:
                self.skip()
                return
            self._grad_scale /= scale
        elif not bool(torch.isfinite(loss.detach()).all()):
            raise ValueError(
                f"the loss of batch {self.committed_batch + 1} is {float(loss.detach())}\n"
                "  state: the pool is unchanged\n  do:    run.skip() leaves the batch out"
            )
        else:
            loss.backward()  # type: ignore[no-untyped-call]
        before = self.committed_batch
        try:
            self.commit(step_dense=scaler is None)
        finally:
            if self.committed_batch > before:  # also when its dense part found no room
                self._dense.zero_grad()

    def commit(self, *, step_dense: bool = True) -> None:
        """Makes everything since the last commit durable as one batch: dense step, rows, resume
        record.

        For loops that call backward themselves: accumulation over several batches, clipping, an own
        dense step (`step_dense=False`). Gradients of the dense part are left alone.

        Raises:
            ValueError: A gradient is not finite. Nothing has changed.
            PoolFull: The batch is larger than the pool's limits. Nothing has changed.
        """
        self._prepare()
        if step_dense and self.dense_optimizer is not None:
            check_dense_grads(self.model)
            self.dense_optimizer.step()
        self._commit_prepared()

    def skip(self) -> None:
        """Commits the batch without changing a row or the dense part: the position moves on."""
        if self._dense.is_ahead:
            raise PoolError(
                "the dense optimizer has already stepped; this batch can no longer be skipped"
            )
        # The transaction stays open until the commit: closing the pool before it, on a signal, must
        # see that a step has begun.
        self._dense.zero_grad()
        self._core.prepare([], self._through)
        self._commit_prepared(is_skipped=True)

    def unscale_(self, scaler: torch.amp.GradScaler) -> None:
        """Takes a scaler's scale off the rows' gradients; call it after scaler.unscale_."""
        self._grad_scale /= scaler.get_scale()

    def clip_grad_norm_(self, max_norm: float) -> float:
        """Scales all gradients, of rows (summed per distinct row) and of the dense part, to a norm
        of at most max_norm.

        Call between backward and commit, after `unscale_`. Returns the norm before, as
        torch.nn.utils.clip_grad_norm_ does.
        """
        self._prepare()
        squares = self._core.grad_norm_sq() * self._grad_scale**2
        norm, scale = clip_dense_grads(self.model, squares, max_norm)
        self._grad_scale *= scale
        return norm

    def sync(self) -> None:
        """Blocks until the committed batch's dense part is written and, where possible, durable."""
        self._write_generation()
        self.pool.sync()

    def finish(self) -> None:
        """Marks the run finished at the committed batch, with a dense generation of that batch."""
        self.finished = True
        self._committed_rng = get_rng_state()
        self._write_generation(force=True)

    def close(self) -> None:
        """Writes the committed batch's dense generation: resume has nothing to do again."""
        is_mid_step = self._dense.is_ahead or self.pool.transaction.has_forward
        if self.pool.is_read_only or self._core.is_poisoned or is_mid_step:
            return  # in the middle of a step the dense part is not that of the committed batch
        self._core.drop_announced()
        self._write_generation()

    def rewind(self, batches: int) -> int:
        """Goes back to the nearest exact point at least so many batches ago, e.g. when the loss
        exploded; returns its batch.

        Tables, model, optimizers, `state`, random generators and position are then those of that
        batch, as after a resume; the batches after it are gone for good. The running iteration of
        `run.batches` ends at its next step, and that of `run.epochs` goes on in the epoch of the
        point, so leave the body of the loop after the call. To leave bad data out, remember its
        place, and skip it when it comes again::

            bad = set()
            for epoch in run.epochs(3):
                for batch in run.batches(loader):
                    if (run.epoch, run.batch) in bad:
                        run.skip()
                        continue
                    loss = ...
                    if loss.item() > limit:
                        bad.add((run.epoch, run.batch))
                        run.rewind(5)
                        break
                    run.step(loss)

        A loader that is neither ours nor stateful is iterated anew and skipped to the place. How
        far back there are exact points: `pool.rewind_points()`, `keep_dense`, `log_bytes`.

        Raises:
            RecoveryError: There is no such point; names those that there are. Nothing has changed.
            PoolError: The pool is open read only.
        """
        points, here = self.pool.rewind_points(), self.committed_batch
        self.pool.take_back(choose_point(self.pool.path, points, here, batches=batches))
        self._forget_batches()
        self.pool.transaction.clear()
        self._dense.zero_grad()
        self._dense.is_ahead = False
        self._has_rewound, self._grad_scale = True, 1.0
        self._next_epoch = Recorded()
        self._restore()
        self._plain_state.record()
        return self.committed_batch

    # --- inside

    def _forget_batches(self) -> None:
        self._current = self._feed = None
        self._pending_batches = 0
        self._core.drop_announced()

    def _announce(self, batch: Any) -> int:
        take = self._sparse_of or (lambda one: getattr(one, "sparse", None))
        features = take(batch)
        if features is None or not self.pool.transaction.collections:
            return 0
        try:
            return int(self._core.announce(self.pool.transaction.group_inputs(features)))
        except (IndexError, ValueError, TypeError, KeyError):
            return 0  # the lookup itself raises it, at the batch that has it

    def _prepare(self) -> None:
        self._core.prepare(self.pool.transaction.native_parts(), self._through)

    def _commit_prepared(self, *, is_skipped: bool = False) -> None:
        batch = self.batch + self._pending_batches
        before = self.batch, self._recorded, self._committed_rng
        committed = self.committed_batch
        self.batch = batch
        self._committed_rng = get_rng_state()
        if self._current is not None and self._feed is not None:
            self._recorded = replace(
                self._recorded,
                loader_state=self._current.loader_state,
                fetch_rng=self._feed.fetch_rng(),
            )
        try:
            settings = self.pool.transaction.row_settings(self._table_names)
            if not is_skipped:
                self._step_schedulers()
            self._core.commit(settings, self._grad_scale, self._record_bytes())
        except BaseException:
            if self.committed_batch == committed:  # a signal may come just after the commit
                self.batch, self._recorded, self._committed_rng = before
            raise
        self._pending_batches = 0
        self._grad_scale = 1.0
        self._dense.is_ahead = False
        self._warn_unless_announced()
        self.pool.transaction.clear()
        self._count_time()
        self._dense.capture_if_due(self._record_bytes(), self._step_seconds)
        self.pool.desk.serve()

    def _step_schedulers(self) -> None:
        for collection in self.pool.transaction.collections:
            collection.optimizer.step()
        for scheduler in self._every_batch.values():
            scheduler.step()

    def _warn_unless_announced(self) -> None:
        parts = self.pool.transaction.parts
        if self._has_warned or not parts or parts[0].lookup.is_announced:
            return
        self._has_warned = True
        self._notice(
            f"batch {self.committed_batch} was not announced ahead, so the commit wrote its undo "
            "log; iterate with run.batches(loader), and pass sparse_of= when batches lack `sparse` "
            "(said once; run.stats.unannounced_batches counts)"
        )

    def _count_time(self) -> None:
        now = time.perf_counter()
        self._step_seconds += now - (self._last_commit_at or now)
        self._last_commit_at = now

    def _write_generation(self, *, force: bool = False) -> None:
        if self._dense.is_ahead:
            raise PoolError(
                "the dense optimizer has stepped beyond the committed batch\n  do:    commit first"
            )
        self._core.wait_dense()
        if force or self._core.dense_batch != self.committed_batch:
            self._dense.capture(self._record_bytes())
            self._core.wait_dense()
            self._core.commit_record(self._record_bytes())

    def _end_epoch(self) -> None:
        if self.pool.transaction.parts:
            raise PoolError(
                f"epoch {self.epoch} is over, but gradients of its last batches are in no commit\n"
                f"  state: the pool is at batch {self.committed_batch}\n"
                "  do:    call run.commit() (or run.skip()) after the loop over the batches"
            )
        self.epoch += 1
        self.batch = 0
        self._recorded, self._next_epoch = self._next_epoch, Recorded()
        self._committed_rng = get_rng_state()
        self._write_generation(force=True)

    def _is_stopped_early(self) -> bool:
        return (
            self._recorded.target_epochs is not None and self.epoch < self._recorded.target_epochs
        )

    def _record_bytes(self) -> bytes:
        record = {
            "format": 1,
            "epoch": self.epoch,
            "batch": self.batch,
            "finished": self.finished,
            "target_epochs": self._target_epochs if self.finished else None,
            "rng": self._committed_rng,
            "epoch_rng": self._recorded.epoch_rng,
            "fetch_rng": self._recorded.fetch_rng,
            "loader": self._recorded.loader_state,
            "state": self._plain_state.record(),
            "rows": optimizer_state(self.pool.transaction.collections),
            "settings": self._settings,
            "volatile": {**environment(self.pool.lookup), "remarks": self._remarks},
        }
        return json_bytes(record)

    def _restore(self) -> list[str]:
        """Puts everything to the pool's recovery point; returns what a user should know."""
        record = self.pool.resume_record
        assert record is not None
        check_settings(self.pool.path, self._settings, record.get("settings", {}))
        notices = [
            *restore_dense(self.pool, self.model, self.dense_optimizer, self._state, record),
            *restore_optimizer_state(self.pool.transaction.collections, record.get("rows", {})),
            *changed_environment(self.pool, record.get("volatile", {}), is_error=self._strict),
        ]
        self.epoch, self.batch, self.finished = record["epoch"], record["batch"], record["finished"]
        self._recorded = Recorded.of(record)
        self._committed_rng = record["rng"]
        self._is_restored = True
        set_rng_state(record["rng"])
        self._core.wait_dense()
        return notices

    def _notice(self, *texts: str) -> None:
        self.notices += texts
        for text in texts:
            _log.warning(text)
