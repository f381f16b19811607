"""Quality of click predictions: exact AUC, log loss, normalized entropy, calibration."""

from dataclasses import dataclass
from math import log, nan
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Metrics", "auc", "log_loss", "measure"]

Floats = NDArray[np.floating[Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Metrics:
    """Quality of the predictions for some samples.

    A figure that the labels leave undefined (AUC and normalized entropy of one class, calibration
    without a click) is nan.
    """

    num_samples: int
    click_rate: float
    auc: float
    log_loss: float
    normalized_entropy: float
    calibration: float


def measure(labels: Floats, logits: Floats) -> Metrics:
    """Judge the logits of some samples by their labels.

    Args:
        labels: 0 or 1, shape (N,), N >= 1.
        logits: Predictions before the sigmoid, shape (N,).

    Returns:
        The figures. Normalized entropy is the log loss over that of always predicting the click
        rate: below 1 is better than knowing nothing. Calibration is predicted over actual clicks.

    Raises:
        ValueError: The shapes differ or are not (N,), or N is 0, or a value is not finite.
    """
    labels, logits = _checked(labels, logits)
    rate = float(labels.mean())
    entropy = -(rate * log(rate) + (1 - rate) * log(1 - rate)) if 0 < rate < 1 else nan
    loss = log_loss(labels, logits)
    clicks = float(np.exp(-np.logaddexp(0.0, -logits)).sum())  # the sigmoid, without overflow
    return Metrics(
        num_samples=len(labels),
        click_rate=rate,
        auc=auc(labels, logits),
        log_loss=loss,
        normalized_entropy=loss / entropy,
        calibration=clicks / float(labels.sum()) if rate else nan,
    )


def auc(labels: Floats, scores: Floats) -> float:
    """Return the exact area under the ROC curve, by the sum of ranks.

    It is the share of pairs of a click and a non-click that the scores order rightly; a tie counts
    one half. No thresholds are involved, so no figure is lost to them.

    Args:
        labels: 0 or 1, shape (N,), N >= 1.
        scores: Any monotone prediction, shape (N,).

    Returns:
        A number in [0, 1]; nan if all labels are equal.

    Raises:
        ValueError: The shapes differ or are not (N,), or N is 0, or a value is not finite.
    """
    labels, scores = _checked(labels, scores)
    num_clicks = int(labels.sum())
    num_pairs = num_clicks * (len(labels) - num_clicks)
    if num_pairs == 0:
        return nan
    _, groups, sizes = np.unique(scores, return_inverse=True, return_counts=True)
    last_ranks = np.cumsum(sizes)
    mean_ranks = last_ranks - (sizes - 1) / 2  # ties share the mean of their ranks, counted from 1
    sum_of_ranks = float(mean_ranks[groups][labels == 1].sum())
    return (sum_of_ranks - num_clicks * (num_clicks + 1) / 2) / num_pairs


def log_loss(labels: Floats, logits: Floats) -> float:
    """Return the mean negative log likelihood in nats, for arguments as in `measure`."""
    labels, logits = _checked(labels, logits)
    return float((np.logaddexp(0.0, logits) - labels * logits).mean())


def _checked(labels: Floats, values: Floats) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    if labels.ndim != 1 or labels.shape != values.shape or len(labels) == 0:
        raise ValueError(
            f"labels have shape {labels.shape}, predictions {values.shape}; "
            "expected the same shape (N,) with N of at least 1"
        )
    bad = np.flatnonzero(~np.isfinite(values))
    if len(bad):
        raise ValueError(f"prediction {bad[0]} of {len(values)} is {values[bad[0]]}")
    wrong = np.flatnonzero((labels != 0) & (labels != 1))
    if len(wrong):
        raise ValueError(f"label {wrong[0]} of {len(labels)} is {labels[wrong[0]]}, not 0 or 1")
    return labels.astype(np.float64), values.astype(np.float64)
