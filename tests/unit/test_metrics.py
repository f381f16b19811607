"""Metrics against definitions written out, and against torchmetrics where it is installed."""

import math

import numpy as np
import pytest

from trainingcxl.metrics import auc, log_loss, measure


def auc_by_pairs(labels: np.ndarray, scores: np.ndarray) -> float:
    clicks, others = scores[labels == 1], scores[labels == 0]
    above = (clicks[:, None] > others[None, :]).sum()
    equal = (clicks[:, None] == others[None, :]).sum()
    return (above + equal / 2) / (len(clicks) * len(others))


@pytest.mark.parametrize("num_values", [2, 7, 10_000])
def test_auc_counts_pairs_and_halves_of_ties(num_values: int) -> None:
    rng = np.random.default_rng(num_values)
    scores = rng.integers(num_values, size=500).astype(np.float32)
    labels = (rng.random(500) < 0.3).astype(np.float32)
    assert auc(labels, scores) == pytest.approx(auc_by_pairs(labels, scores), abs=1e-12)


def test_auc_of_perfect_reversed_and_constant_scores() -> None:
    labels = np.array([0, 0, 1, 1], dtype=np.float32)
    assert auc(labels, np.array([1.0, 2.0, 3.0, 4.0])) == 1.0
    assert auc(labels, np.array([4.0, 3.0, 2.0, 1.0])) == 0.0
    assert auc(labels, np.zeros(4)) == 0.5


def test_auc_agrees_with_torchmetrics_to_the_last_digits() -> None:
    functional = pytest.importorskip(
        "torchmetrics.functional", reason="torchmetrics is not installed"
    )
    import torch

    rng = np.random.default_rng(0)
    scores = rng.random(20_000).astype(np.float32).round(3)  # many ties
    labels = (rng.random(20_000) < 0.03).astype(np.int64)
    theirs = functional.auroc(
        torch.from_numpy(scores), torch.from_numpy(labels), task="binary", thresholds=None
    )
    assert auc(labels.astype(np.float32), scores) == pytest.approx(float(theirs), abs=1e-6)


def test_log_loss_is_finite_for_logits_far_out() -> None:
    labels = np.array([1.0, 0.0, 1.0])
    assert log_loss(labels, np.array([1000.0, -1000.0, -1000.0])) == pytest.approx(1000 / 3)


def test_measure_by_definition() -> None:
    rng = np.random.default_rng(1)
    logits = rng.normal(size=1000)
    labels = (rng.random(1000) < 0.25).astype(np.float32)
    predicted = 1 / (1 + np.exp(-logits))
    loss = -np.mean(labels * np.log(predicted) + (1 - labels) * np.log(1 - predicted))
    rate = labels.mean()
    entropy = -(rate * math.log(rate) + (1 - rate) * math.log(1 - rate))
    found = measure(labels, logits)
    assert found.num_samples == 1000
    assert found.click_rate == pytest.approx(rate)
    assert found.log_loss == pytest.approx(loss)
    assert found.normalized_entropy == pytest.approx(loss / entropy)
    assert found.calibration == pytest.approx(predicted.sum() / labels.sum())


def test_predicting_the_click_rate_has_normalized_entropy_and_calibration_one() -> None:
    labels = np.array([1.0, 0.0, 0.0, 0.0])
    found = measure(labels, np.full(4, math.log(0.25 / 0.75)))
    assert found.normalized_entropy == pytest.approx(1.0)
    assert found.calibration == pytest.approx(1.0)


@pytest.mark.parametrize("label", [0.0, 1.0])
def test_labels_of_one_class_leave_figures_undefined(label: float) -> None:
    found = measure(np.full(3, label), np.array([0.1, 0.2, 0.3]))
    assert math.isnan(found.auc)
    assert math.isnan(found.normalized_entropy)
    assert math.isnan(found.calibration) == (label == 0)
    assert math.isfinite(found.log_loss)


@pytest.mark.parametrize(
    ("labels", "logits", "message"),
    [
        ([], [], "N of at least 1"),
        ([0.0, 1.0], [0.0], "expected the same shape"),
        ([0.0, 1.0], [0.0, float("nan")], "prediction 1 of 2 is nan"),
        ([0.0, 2.0], [0.0, 1.0], "label 1 of 2 is 2.0"),
    ],
)
def test_bad_arguments_are_named(labels: list[float], logits: list[float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        measure(np.array(labels), np.array(logits))
