"""The model learns what a plain torch model learns, on real samples."""

import json
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.samples
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_auc_on_real_samples(samples: Path, tmp_path: Path) -> None:
    file = tmp_path / "auc.json"
    script = ROOT / "benchmarks" / "accuracy_samples.py"
    subprocess.run([sys.executable, script, samples, "--json", file], check=True)
    auc = {name: statistics.mean(each) for name, each in json.loads(file.read_text()).items()}
    assert auc["criteo"] >= 0.75
    # Both kinds of column must count, or the model has not understood one of them.
    assert auc["criteo, categorical columns zeroed"] <= auc["criteo"] - 0.01
    assert auc["criteo, dense columns zeroed"] <= auc["criteo"] - 0.03
    assert auc["movielens"] >= 0.772
