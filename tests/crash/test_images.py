"""Power failures on persistent memory, tried on records of small trainings (capability of the rig:
power_rig.py).

Persistent is what was flushed and fenced; of everything else any part may be, in any combination:
log records, flags, rows, slots, dense generations, sizes and entries of files. Lost would be a
committed batch, or one half of it, where a flush, a fence, or an order of the two is missing.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

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


@pytest.mark.slow
def test_every_fault_is_found() -> None:
    """A rig that never failed proves nothing: each fault of csrc/fault.h shows in it."""
    core = next(iter(sorted((_ROOT / "build" / "faults").glob("_core*.so"))), None)
    if core is None:
        pytest.skip("the core with faults is not built ('make faults')")
    if any(source.stat().st_mtime > core.stat().st_mtime for source in _ROOT.glob("csrc/*")):
        pytest.skip("the core with faults is older than csrc ('make faults')")
    line, said = _run(
        "--modes", "", "--faults", str(core), "--mutant-images", "150", "--bad-max", "1"
    )  # fmt: skip
    assert line["found"] == line["mutants"] >= 30, said
    assert "without a fault" not in said
