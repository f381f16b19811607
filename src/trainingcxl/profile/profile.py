"""Profile: takes the time of every phase of a run's batches while it is on, and nothing when off.

While on it stands around three methods of the run, hooks the model's forward, its output's backward
and the dense optimizer, and switches the core's trace on. The trainer's time is cut into phases
without gaps; what the core did lies inside them. So times add up to the step.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from trainingcxl.checkpoint import FaultTolerantRun
from trainingcxl.errors import ConfigError
from trainingcxl.profile.measured import TRAINER, BatchRecord, Span, Totals, exclusive_ns
from trainingcxl.profile.output import check_writable, table_text, write_profile
from trainingcxl.profile.scalars import Scalars, require_tensorboard

__all__ = ["Profile", "ProfileRequest"]

_SPANS_MAX = 1 << 14  # of the core, between two batches
_DELTAS = ("dense_bytes", "journal_bytes", "rows_handed_over", "corrected_lookups")


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfileRequest:
    """What to profile, for loops that make the run themselves."""

    out: Path | None = None
    batches: int = 100
    tensorboard: Path | None = None

    def __post_init__(self) -> None:
        """Refuse what cannot be had, before the time for it is spent."""
        if self.out is not None:
            check_writable(self.out)
        if self.tensorboard is not None:
            require_tensorboard()


class Profile:
    """Measures where the time and the bytes of each batch go. A context manager.

    Args:
        run: The run. Its model must be the one that the loop calls.
        out: JSON file, written at the end: summary, and a trace that ui.perfetto.dev shows.
        batches: So many batches are kept one by one, with their spans; later ones are only summed
            up. Bounds memory and file.
        tensorboard: Folder that gets scalars, about once a second; needs the extra `tensorboard`.
        model: Shape of the model as `trainingcxl simulate` reads it (docs/simulator.md).

    Raises:
        ConfigError: The run has a profile already; the file cannot be written; no tensorboard.

    Example:
        >>> with tcxl.Profile(run, "profile.json") as profile:  # doctest: +SKIP
        ...     for batch in run.batches(loader):
        ...         run.step(criterion(model(batch.dense, batch.sparse), batch.label))
        >>> print(profile.table())  # doctest: +SKIP

    Batches begin where `run.batches` is asked for them, in loops without it where the last commit
    ended. Results stay the same, bit for bit. With a GPU every phase waits for it.
    """

    def __init__(
        self,
        run: FaultTolerantRun,
        out: str | Path | None = None,
        *,
        batches: int = 100,
        tensorboard: str | Path | None = None,
        model: Mapping[str, Any] | None = None,
    ) -> None:
        if "batches" in vars(run):
            raise ConfigError("this run has a profile already\n  do:    leave that one first")
        if batches < 0:
            raise ConfigError(f"batches is {batches}, expected 0 or more")
        self.run = run
        self.model = model
        self.totals = Totals()
        self.kept: list[BatchRecord] = []
        self.spans: list[Span] = []  # of the kept batches and of the threads beside them
        self.dropped = 0
        self._out = None if out is None else check_writable(Path(out))
        self._batches_kept = batches
        self._scalars = None if tensorboard is None else Scalars(Path(tensorboard))
        self._core = run.pool.core
        self._base: list[Span] = []  # the trainer's phases of the open batch, without gaps
        self._phase, self._since = "loop", 0
        self._committed = 0
        self._is_fed = False
        self._depth = 0
        self._before: dict[str, int] = {}
        self._undo: list[Callable[[], None]] = []
        self._is_cuda = any(p.is_cuda for p in run.model.parameters())

    # --- for the loop

    def __enter__(self) -> Self:
        self._hook_run()
        self._hook_model()
        self._core.trace_start(_SPANS_MAX)
        self._since = time.perf_counter_ns()
        self._committed = self.run.committed_batch
        self._before = self._stats()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        while self._undo:
            self._undo.pop()()
        self._end_batch()
        self._core.trace_stop()
        self._forget_open()
        if self._scalars is not None:
            self._scalars.close()
        if self._out is not None:
            write_profile(self._out, self)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Gives the time inside a name of the loop's own, e.g. "augment"."""
        before = self._mark(name)
        try:
            yield
        finally:
            self._mark(before)

    def table(self) -> str:
        """The summary as text: time of each phase, what ran beside, rows and bytes."""
        return table_text(self)

    # --- hooks

    def _hook_run(self) -> None:
        run = self.run
        # On the object, not in the class: a run without a profile pays nothing.
        for name in ("step", "commit", "skip"):
            self._replace(run, name, self._around(getattr(run, name)))
        self._replace(run, "batches", self._around_batches(run.batches))
        if run.dense_optimizer is not None:
            before: list[str] = []
            hooks = (
                run.dense_optimizer.register_step_pre_hook(
                    lambda *_: before.append(self._mark("dense_update"))
                ),
                run.dense_optimizer.register_step_post_hook(lambda *_: self._end(before.pop())),
            )
            self._undo += [hook.remove for hook in hooks]

    def _replace(self, run: FaultTolerantRun, name: str, method: Callable[..., Any]) -> None:
        setattr(run, name, method)
        self._undo.append(lambda: delattr(run, name))

    def _hook_model(self) -> None:
        before = self.run.model.register_forward_pre_hook(lambda *_: self._begin_forward())
        after = self.run.model.register_forward_hook(lambda _, __, out: self._end_forward(out))
        self._undo += [before.remove, after.remove]

    def _begin_forward(self) -> None:
        self._mark("dense_forward" if torch.is_grad_enabled() else "evaluation")

    def _end_forward(self, output: Any) -> None:
        if not torch.is_grad_enabled():
            return
        self._mark("loss")
        tensor = _differentiable(output)
        if tensor is not None:
            tensor.register_hook(lambda _: self._begin_backward())  # type: ignore[no-untyped-call]

    def _begin_backward(self) -> None:
        if self._phase == "dense_backward" or not self._undo:
            return
        before = self._mark("dense_backward")
        # When all gradients are there, also those behind the embeddings.
        torch.autograd.Variable._execution_engine.queue_callback(
            lambda: self._end("commit" if self._depth else before)
        )

    def _around(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            if method.__name__ != "step":  # that of a step begins with the loss and its gradients
                self._mark("commit")
            self._depth += 1
            try:
                return method(*args, **kwargs)
            finally:
                self._depth -= 1
                if self._depth == 0:
                    self._mark("loop")
                    if not self._is_fed:
                        self._end_batch()

        return timed

    def _around_batches(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def timed(loader: Iterable[Any]) -> Iterator[Any]:
            feed = method(loader)
            self._is_fed = True
            self._end_batch()
            self._forget_open()  # what lies between two epochs is of no step
            try:
                while True:
                    self._end_batch()
                    self._mark("load")
                    try:
                        batch = next(feed)
                    except StopIteration:
                        return
                    self._mark("loop")
                    yield batch
            finally:
                self._is_fed = False
                self._mark("loop")
                feed.close()

        return timed

    # --- recording

    def _mark(self, phase: str) -> str:
        """Ends the present phase and begins another; returns the one that ended."""
        if self._is_cuda:
            torch.cuda.synchronize()
        now, before = time.perf_counter_ns(), self._phase
        self._base.append(Span(before, TRAINER, self._committed + 1, self._since, now))
        self._phase, self._since = phase, now
        return before

    def _end(self, then: str) -> None:
        self._mark(then)

    def _stats(self) -> dict[str, int]:
        raw = self._core.stats()
        return {name: raw[name] for name in _DELTAS}

    def _end_batch(self) -> None:
        """Sums up the batch if it has committed; this is the first phase of the next one."""
        if self.run.committed_batch == self._committed:
            return
        self._mark("profile")
        taken, counts, dropped = self._core.trace_take()
        spans = [Span(*one) for one in taken]
        self.dropped += dropped
        base, self._base = self._base, []
        own = [*base, *(span for span in spans if span.track == TRAINER)]
        record = BatchRecord(
            batch=self.run.committed_batch,
            begin=base[0].begin,
            end=base[-1].end,
            phases=exclusive_ns(own, counts),
            counts=self._counts(counts),
        )
        beside = [span for span in spans if span.track != TRAINER]
        for span in beside:
            self.totals.background[span.track, span.phase] += span.end - span.begin
        self.totals.add(record)
        if len(self.kept) < self._batches_kept:
            self.kept.append(record)
            self.spans += [*own, *beside]
        if self._scalars is not None:
            self._scalars.add(record)
        self._committed = self.run.committed_batch
        self._mark("loop")

    def _forget_open(self) -> None:
        spans, _, dropped = self._core.trace_take()
        for span in map(Span._make, spans):
            if span.track != TRAINER:
                self.totals.background[span.track, span.phase] += span.end - span.begin
                if len(self.kept) < self._batches_kept:
                    self.spans.append(span)
        self.dropped += dropped
        self._base.clear()
        self._since = time.perf_counter_ns()

    def _counts(self, counts: Iterable[Mapping[str, Any]]) -> dict[str, float]:
        found = {
            name: float(sum(one[name] for one in counts))
            for name in (
                "lookups",
                "rows",
                "lookup_bytes",
                "row_bytes",
                "log_bytes",
                "slot_bytes",
                "recurring_rows",
                "recurring_lookups",
                "first_rows",
                "is_announced",
                "is_fused",
            )
        }
        now = self._stats()
        found |= {name: float(now[name] - self._before[name]) for name in _DELTAS}
        self._before = now
        return found


def _differentiable(output: Any) -> Tensor | None:
    """A tensor of the model's output that has a gradient."""
    if isinstance(output, Tensor):
        return output if output.requires_grad else None
    if isinstance(output, Mapping):
        output = list(output.values())
    if isinstance(output, list | tuple):
        found = (_differentiable(one) for one in output)
        return next((one for one in found if one is not None), None)
    return None
