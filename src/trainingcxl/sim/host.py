"""This machine as a host: measure its memory and its log medium, predict an embedding step.

The constants come from micro-kernels (`host_kernels`), none from a training step, and the
prediction (`host_step`) adds them up along what the engine does.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from trainingcxl.sim.errors import parameter_error
from trainingcxl.sim.host_calibration import (
    HostCalibration,
    read_calibration,
    write_calibration,
)
from trainingcxl.sim.host_kernels import PAGE, Scratch, measure_round
from trainingcxl.sim.host_step import StepPrediction, predict_host_step

__all__ = [
    "HostCalibration",
    "StepPrediction",
    "calibrate_host",
    "median_calibration",
    "predict_host_step",
    "read_calibration",
    "write_calibration",
]


def calibrate_host(folder: Path, *, table_bytes: int = 1 << 30, rounds: int = 7) -> HostCalibration:
    """Measure this machine with tables and log in `folder` (the medium of a pool).

    Args:
        folder: A folder with room for `table_bytes`; files in it are removed again.
        table_bytes: Size of the memory that rows lie in; much larger than the caches.
        rounds: The whole is measured so many times and the median of each constant taken.

    Blocks for some seconds a round; uses one thread, and a second one for a moment.

    Raises:
        ParameterError: The folder has no room, or cannot be written.
    """
    try:
        with Scratch(folder, table_bytes) as scratch:
            return median_calibration(measure_round(folder, scratch, k) for k in range(rounds))
    except OSError as error:
        raise parameter_error(
            f"a scratch file of {table_bytes} bytes cannot be used: {error.strerror}",
            where=str(folder),
            do="name an output file in a writable folder with room for it",
        ) from error


def median_calibration(rounds: Iterable[dict[str, Any]]) -> HostCalibration:
    """Take the median of each constant over rounds of `host_kernels.measure_round`."""
    measured = list(rounds)
    values: dict[str, Any] = {}
    for name, first in measured[0].items():
        middle = np.median([one[name] for one in measured], axis=0)
        values[name] = tuple(middle.tolist()) if isinstance(first, tuple) else float(middle)
    return HostCalibration(page_bytes=PAGE, **values)
