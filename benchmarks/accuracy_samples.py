"""AUC on two real samples, with all columns and with a kind of column zeroed.

    python benchmarks/accuracy_samples.py FOLDER_OF_THE_SAMPLES [--json FILE]

Criteo: the ranked sample, trained on its first 8,000 rows, judged on its last 2,000; one epoch of
batches of 128; mean over three seeds. MovieLens-100k: a random fifth held out, two epochs, mean
over three splits. All settings not named here are the defaults of `trainingcxl train`.
"""

import argparse
import json
import statistics
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from trainingcxl.config import load_settings
from trainingcxl.data import Dataset, Rows, open_data
from trainingcxl.pool import Pool
from trainingcxl.train import Training
from trainingcxl.train_setup import Silent, prepare_torch

SEEDS = (0, 1, 2)
CRITEO = "criteo-kaggle-sample/train.ranked.part10.tsv.gz"
CRITEO_SETTINGS = ["eval.fraction=0.2", "data.hash_size=100000"]
MOVIELENS = "movielens-100k"
MOVIELENS_SETTINGS = [
    "eval.fraction=0.2",
    "eval.split=random",
    "run.epochs=2",
    "data.shuffle=true",
]


class Zeroed(Dataset):
    """A data set in which the dense or the categorical columns say nothing."""

    def __init__(self, base: Dataset, *, columns: str) -> None:
        """Zero the columns of `base` that `columns` names: dense, categorical, or none."""
        self.base, self.columns = base, columns
        self.num_samples, self.dense_names = base.num_samples, base.dense_names
        self.features, self.has_labels = base.features, base.has_labels
        self.fingerprint, self.report = {**base.fingerprint, "zeroed": columns}, base.report

    def read(self, samples: NDArray[np.int64]) -> Rows:
        """Read samples and zero what is to be zeroed."""
        rows = self.base.read(samples)
        if self.columns == "dense":
            return replace(rows, dense=np.zeros_like(rows.dense))
        if self.columns == "categorical":
            return replace(rows, ids=np.zeros_like(rows.ids), jagged={})
        return rows


def train_once(data: Dataset, seed: int, assignments: list[str]) -> float:
    """Train in a pool that is thrown away and return the AUC on the held-out samples."""
    settings = load_settings(
        assignments=["run.batch_size=128", f"run.seed={seed}", "run.device=cpu", *assignments]
    )
    device, silent = prepare_torch(settings.run), Silent()
    with (
        tempfile.TemporaryDirectory(prefix="trainingcxl-accuracy-") as folder,
        Pool(Path(folder) / "accuracy.pool") as pool,
    ):
        metrics = Training(settings, data, pool, device, silent, silent).go_on()
    assert metrics is not None
    return metrics.auc


def measure(folder: Path) -> Iterator[tuple[str, list[float]]]:
    """Yield what was trained and the AUC of each seed."""
    with tempfile.TemporaryDirectory(prefix="trainingcxl-accuracy-") as cache:
        criteo = open_data(f"criteo:{folder / CRITEO}", cache_dir=cache, hash_size=100_000)
        for columns in ("none", "categorical", "dense"):
            data = Zeroed(criteo, columns=columns)
            name = "criteo" if columns == "none" else f"criteo, {columns} columns zeroed"
            yield name, [train_once(data, seed, CRITEO_SETTINGS) for seed in SEEDS]
        movielens = open_data(f"movielens:{folder / MOVIELENS}", cache_dir=cache)
        yield "movielens", [train_once(movielens, seed, MOVIELENS_SETTINGS) for seed in SEEDS]


def main() -> None:
    """Measure, print a table, and write the figures as JSON on request."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--json", type=Path, help="file to write the figures to")
    arguments = parser.parse_args()
    found = {}
    for name, aucs in measure(arguments.folder):
        each = " ".join(f"{auc:.4f}" for auc in aucs)
        print(f"{name:<36} mean {statistics.mean(aucs):.4f}  each {each}", flush=True)
        found[name] = aucs
    if arguments.json:
        arguments.json.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
