"""The dense part of a model in the dense log (paper: relaxed batch-aware checkpoint)."""

import math
import statistics
from collections import deque
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from trainingcxl.pool import Pool
from trainingcxl.state import BlobParts

__all__ = ["DensePart"]

_BUDGET = 0.02  # of the step's time, for capturing and writing the dense part
_EVERY_MAX = 1000


class DensePart:
    """Captures model, dense optimizer and further states; decides how often.

    Args:
        pool: Where the generations go.
        model: Its parameters and buffers.
        optimizer: Optimizer of the dense part, or None.
        state: Further objects with state_dict(), by name.
        every: Batches between two generations, or "auto": as many as keep the cost within 2 % of
            the step.
    """

    def __init__(
        self,
        pool: Pool,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        state: Mapping[str, Any],
        *,
        every: int | str,
    ) -> None:
        if every != "auto" and not (isinstance(every, int) and 1 <= every <= _EVERY_MAX):
            raise ValueError(f"dense_every is {every!r}, expected 'auto' or 1 to {_EVERY_MAX}")
        self.model = model
        self.optimizer = optimizer
        self.state = state
        self.is_ahead = False  # the dense optimizer has stepped beyond the committed batch
        self._core = pool.core
        self._is_auto = every == "auto"
        self.every = 1 if every == "auto" else int(every)
        self._spent = 0.0  # on all generations so far
        self._costs: deque[float] = deque(maxlen=5)  # of the newest ones
        if optimizer is not None:
            optimizer.register_step_post_hook(self._mark_ahead)
        self._core.set_dense_every(self.every)

    def _mark_ahead(self, *_: Any) -> None:
        self.is_ahead = True

    def capture(self, record: bytes) -> None:
        """Copies the dense part; the background thread writes it as a generation with `record`."""
        tree: dict[str, Any] = {"model": self.model.state_dict()}
        if self.optimizer is not None:
            tree["optimizer"] = self.optimizer.state_dict()
        tree["state"] = {name: item.state_dict() for name, item in self.state.items()}
        parts = BlobParts(tree)  # must outlive the call: the core copies from its addresses
        self._core.capture(record, parts.pieces())

    def capture_if_due(self, record: bytes, step_seconds: float) -> None:
        """Captures when the interval is over or the undo log is half full.

        Args:
            record: The resume record of the committed batch.
            step_seconds: Time of all steps so far, to which "auto" relates the cost.
        """
        if not self._core.is_dense_due():
            return
        self.capture(record)
        if not self._is_auto:
            return
        raw = self._core.stats()
        spent = 1e-9 * (raw["dense_copy_ns"] + raw["background_dense_ns"])
        self._costs.append(spent - self._spent)
        self._spent = spent
        step = step_seconds / max(1, raw["batches"])
        if step <= 0:
            return
        wanted = math.ceil(statistics.median(self._costs) / (_BUDGET * step))
        # No leap: one slow write (a busy disk, a first touch) would leave much to train again.
        wanted = min(max(wanted, 1), 2 * self.every, _EVERY_MAX)
        if not 0.8 <= wanted / self.every <= 1.25:  # noise is no reason to change
            self.every = wanted
            self._core.set_dense_every(wanted)

    def zero_grad(self) -> None:
        """Clears the gradients of the dense part."""
        (self.optimizer or self.model).zero_grad(set_to_none=True)
