"""`trainingcxl demo`, smaller than a user runs it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from trainingcxl.pool import inspect


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_demo_kills_resumes_and_ends_with_equal_digests(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "trainingcxl", "demo", "--dir", tmp_path, "--batches", "24"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "COLUMNS": "200"},
    )
    assert done.returncode == 0, done.stderr
    rows = dict(re.findall(r"^(\w[\w ]*?)  +(.*)$", done.stdout, flags=re.MULTILINE))
    assert int(rows["batch at the kill"].split()[0]) >= 12
    assert int(rows["rows rolled back"].split()[0]) >= 0
    first, second = rows["digest"].split()
    assert first == second == inspect(tmp_path / "killed.pool", digest=True)["digest"]
    assert inspect(tmp_path / "killed.pool")["uuid"] in rows["uuid"].split()
    assert "AUC 0." in done.stdout
    assert "with the same bits" in done.stdout
    assert not (tmp_path / "cost.pool" / "data").exists()
