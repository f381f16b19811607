"""Facts about data that decide what durability costs: distinct rows, recurrence, click rate."""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainingcxl.data.dataset import Dataset, Rows, SyntheticDataset

__all__ = ["Description", "describe"]


@dataclass(frozen=True, slots=True)
class Description:
    """Facts about the first batches of a data set, in its own order.

    Attributes:
        samples: Samples looked at.
        batch_size: Samples of a batch.
        click_rate: Mean label.
        distinct_share: Distinct rows of a batch / its lookups, all tables together. The undo log
            follows distinct rows.
        recurring_rows: Share of a batch's distinct rows that the batch before also has, all tables
            together.
        recurring_lookups: The same share of lookups.
        bayes_auc: AUC of the best possible model; None where it is not known.
    """

    samples: int
    batch_size: int
    click_rate: float
    distinct_share: float
    recurring_rows: float
    recurring_lookups: float
    bayes_auc: float | None

    def as_dict(self) -> dict[str, Any]:
        """Return the facts as a dictionary for JSON."""
        return asdict(self)


def rank_auc(score: NDArray[np.float64], label: NDArray[np.float32]) -> float:
    """Return the exact area under the ROC curve, equal scores counting half; nan for one class."""
    positive = float(label.sum())
    negative = label.size - positive
    if positive == 0 or negative == 0:
        return float("nan")
    _, place, count = np.unique(score, return_inverse=True, return_counts=True)
    mean_rank = np.cumsum(count) - (count - 1) / 2.0
    rank_sum = float(mean_rank[place][label > 0].sum())
    return (rank_sum - positive * (positive + 1) / 2.0) / (positive * negative)


def _ids_by_feature(data: Dataset, rows: Rows) -> list[NDArray[np.int64]]:
    ids, column = [], 0
    for feature in data.features:
        if feature.is_jagged:
            ids.append(rows.jagged[feature.name].values)
        else:
            ids.append(rows.ids[:, column])
            column += 1
    return ids


def describe(data: Dataset, *, batch_size: int = 2048, batches: int = 10) -> Description:
    """Look at the first batches of a data set.

    Args:
        data: What to describe.
        batch_size: Samples of a batch.
        batches: How many batches to look at; fewer if the data has fewer.

    Returns:
        The facts; recurrence is nan with fewer than two batches.

    Reads batches x batch_size samples; changes nothing.
    """
    batches = max(1, min(batches, data.num_samples // batch_size))
    batch_size = min(batch_size, data.num_samples)
    clicks, distinct, lookups = 0.0, 0, 0
    # Of the batches after the first: distinct rows, lookups, and how many of each recur.
    total, recurring = np.zeros(2), np.zeros(2)
    before: list[NDArray[np.int64]] = []
    for number in range(batches):
        rows = data.read(np.arange(number * batch_size, (number + 1) * batch_size))
        clicks += float(rows.label.sum())
        now = []
        for j, ids in enumerate(_ids_by_feature(data, rows)):
            unique, count = np.unique(ids, return_counts=True)
            now.append(unique)
            distinct, lookups = distinct + unique.size, lookups + ids.size
            if before and unique.size:
                recurs = np.isin(unique, before[j], assume_unique=True)
                total += [unique.size, ids.size]
                recurring += [recurs.sum(), count[recurs].sum()]
        before = now
    samples = batches * batch_size
    shares = recurring / total if total.all() else np.full(2, np.nan)
    return Description(
        samples=samples,
        batch_size=batch_size,
        click_rate=clicks / samples,
        distinct_share=distinct / max(lookups, 1),
        recurring_rows=float(shares[0]),
        recurring_lookups=float(shares[1]),
        bayes_auc=_bayes_auc(data, samples),
    )


def _bayes_auc(data: Dataset, samples: int) -> float | None:
    if not isinstance(data, SyntheticDataset):
        return None
    rows = data.generator.generate(np.arange(min(max(samples, 60_000), data.num_samples)))
    return rank_auc(rows.score, rows.label)
