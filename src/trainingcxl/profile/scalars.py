"""A profile's scalars for TensorBoard, through torch.utils.tensorboard."""

import time
from pathlib import Path
from typing import Any

from trainingcxl.errors import ConfigError
from trainingcxl.profile.measured import BatchRecord, Totals

__all__ = ["Scalars", "require_tensorboard"]

_SECONDS_BETWEEN = 1.0  # writing them at every batch would be a phase of its own


def require_tensorboard() -> Any:
    """The class that writes event files.

    Raises:
        ConfigError: The package is not installed; names the extra.
    """
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ConfigError(
            "TensorBoard scalars need the package 'tensorboard', which is not installed\n"
            "  do:    pip install 'trainingcxl[tensorboard]', or leave --tensorboard out"
        ) from error
    return SummaryWriter


class Scalars:
    """Means over the batches since the last ones, at the number of the newest batch."""

    def __init__(self, folder: Path) -> None:
        self._writer = require_tensorboard()(str(folder))
        self._since = Totals()
        self._batch = 0
        self._next = time.monotonic()

    def add(self, record: BatchRecord) -> None:
        """Count a batch; write if it is time to."""
        self._since.add(record)
        self._batch = record.batch
        if time.monotonic() >= self._next:
            self._write()

    def close(self) -> None:
        """Write what is left."""
        self._write()
        self._writer.close()

    def _write(self) -> None:
        totals, self._since = self._since, Totals()
        self._next = time.monotonic() + _SECONDS_BETWEEN
        if totals.batches == 0:
            return
        values = {"step/ms": 1e-6 * totals.step_ns / totals.batches}
        for name in totals.ordered_phases():
            values[f"phase_ms/{name}"] = 1e-6 * totals.phases[name] / totals.batches
        counts = totals.counts
        for name in ("lookup_bytes", "row_bytes", "log_bytes", "journal_bytes", "dense_bytes"):
            values[f"bytes/{name.removesuffix('_bytes')}"] = counts[name] / totals.batches
        values["rows/distinct"] = counts["rows"] / totals.batches
        if counts["rows"]:
            values["rows/recurring_share"] = counts["recurring_rows"] / counts["rows"]
            values["rows/first_touch_share"] = counts["first_rows"] / counts["rows"]
        for name, value in values.items():
            self._writer.add_scalar(name, value, self._batch)
