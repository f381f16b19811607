"""Power failures on persistent memory and on ordinary files, tried on records of small trainings
(power_rig.py).

Persistent memory: there is what was flushed and fenced; of everything else any part may be, in any
combination: log records, flags, rows, slots, dense generations, sizes and entries of files. Lost
would be a committed batch, or one half of it, where a flush, a fence, or an order of the two is
missing.

Ordinary files: there is what was synced; every other sector has any version that it had since, of
tables, log and journal alike. Lost would be a batch that was reported as durable, or one half of
any batch.
"""

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from trainingcxl.pool import inspect

_RIG = Path(__file__).with_name("crash_images.py")
_ROOT = Path(__file__).parents[2]


def _run(*arguments: str) -> tuple[dict[str, Any], str]:
    done = subprocess.run(
        [sys.executable, str(_RIG), *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode in (0, 1), done.stderr
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


@pytest.mark.parametrize("mode", ["tso", "weak"])
def test_every_image_is_recovered(mode: str) -> None:
    """Both log forms, one and several threads, skips, other data after a recovery, growth.

    "tso": stores to one line arrive in their order, as on x86. "weak": any 8-byte words, as the
    protocol assumes.
    """
    line, said = _run("--modes", mode, "--images", "1000")
    assert line["bad"] == 0, said
    assert line["images"] >= 800
    assert line["needing_recovery"] >= 0.4 * line["images"]
    assert line["undone"] >= 0.3 * line["images"]
    assert line["in_recovery"] >= 100


def test_every_image_of_a_file_is_recovered() -> None:
    """Journals that lag, are cut, grow, and begin anew after a kill; both forms of the undo log."""
    line, said = _run("--modes", "block", "--images", "280")
    assert line["bad"] == 0, said
    assert line["images"] >= 700
    assert line["needing_recovery"] >= 0.4 * line["images"]
    assert line["undone"] >= 0.5 * line["images"]
    assert line["in_recovery"] >= 100


@pytest.mark.slow
@pytest.mark.timeout(1200)  # the first time it builds the core
def test_every_fault_is_found() -> None:
    """A rig that never failed proves nothing: each fault of csrc/fault.h shows in it; of the
    journal's some, as the others take long (`make crash-images`).
    """
    subprocess.run(["bash", "tools/fault_build.sh"], cwd=_ROOT, check=True)
    core = next((_ROOT / "build" / "faults").glob("_core*.so"))
    line, said = _run(
        "--modes", "", "--faults", str(core), "--mutant-images", "1600", "--control-images", "60",
        "--bad-max", "1", "--every-journal-fault", "4",
    )  # fmt: skip
    assert line["found"] == line["mutants"] >= 39, said
    assert "without a fault" not in said


def test_a_closed_pool_is_open_once_recovery_changes_it(tmpfs_folder: Path) -> None:
    """A pool is closed three batches after its newest generation, and its exact recovery is killed.

    Persistent: rows of which some were taken back, and the session record. Lost: that there was a
    recovery. Were the pool still marked closed, a restart of the machine would go unnoticed (level
    process), and the next recovery would build on bytes that only the cache has (level power).
    """
    path = tmpfs_folder / "closed.pool"
    died = subprocess.run(
        [sys.executable, "-c", _KILLED_RECOVERY, str(path)],
        cwd=_RIG.parent, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert died.returncode == -signal.SIGKILL, died.stderr
    assert not inspect(path)["clean"]


_KILLED_RECOVERY = """
import sys
from power_plans import TRACES
from power_trace import Training, open_core
from trainingcxl import _core

training = Training(TRACES["background"], sys.argv[1])
training.create()
training.train(5)
training.close(clean=True)
_core.kill_at_persist(3, "recovery: row")
open_core(training.plan, training.path).recover(True)
"""
