"""The virtual machine rig: the real drivers of persistent memory, killed and booted again.

Lost would be a batch that was reported as durable: by a mapping without MAP_SYNC, a region or
namespace that is not found again, a journal of the file system, or page cache that nobody synced.
"""

import json
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

_HERE = Path(__file__).parent
_OPENED = {
    "medium": "fsdax", "has_point": True, "committed": 8, "resumed": 6, "changed": 3,
    "milliseconds": 1.5, "fault": "",
}  # fmt: skip


@pytest.mark.vm
@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_three_kills_of_the_machine() -> None:
    """E: power failure, with the kernel's drivers."""
    if shutil.which("qemu-system-x86_64") is None:
        pytest.skip("vm: qemu-system-x86_64 is missing; 'make crash-vm' installs it")
    done = subprocess.run(
        [sys.executable, str(_HERE / "run.py"), "--kills", "3", "--no-python"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    if lines and "skipped" in lines[0]:
        pytest.skip(f"vm: {lines[0]['skipped']}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert {line["machine"]: line["map_sync"] for line in lines} == {
        "nvdimm-ext4": True, "nvdimm-devdax": True, "cxl-ext4": True, "virtio-block": False,
    }  # fmt: skip
    assert all(line["kills"] == 3 and line["mismatches"] == 0 for line in lines)


def _tally() -> Any:
    tally = runpy.run_path(str(_HERE / "promises.py"))["Tally"]("nvdimm-ext4")
    tally.hear("opened", json.dumps({**_OPENED, "has_point": False}))
    tally.hear("durable", "7 6")
    tally.hear("durable", "8 6")
    return tally


def test_kept_promises_are_no_mismatch() -> None:
    tally = _tally()
    for mode in ("latest", "exact"):
        tally.hear("opening", mode)
        tally.hear("opened", json.dumps(_OPENED))
    assert (tally.recoveries, tally.torn, tally.mismatches) == (2, 2, [])


@pytest.mark.parametrize(
    "found",
    [
        {"committed": 7, "resumed": 7},
        {"resumed": 5},
        {"has_point": False},
        {"fault": "3 rows differ from those of batch 6"},
    ],
)
def test_broken_promises_are_found(found: dict[str, Any]) -> None:
    """A rig that overlooks them proves nothing."""
    tally = _tally()
    tally.hear("opening", "latest")
    tally.hear("opened", json.dumps({**_OPENED, **found}))
    assert len(tally.mismatches) == 1


def test_an_exact_recovery_that_was_killed_may_have_gone_back() -> None:
    tally = _tally()
    tally.hear("opening", "exact")
    tally.hear("opening", "latest")
    tally.hear("opened", json.dumps({**_OPENED, "committed": 6}))
    assert tally.mismatches == []


def test_lines_of_the_guest_between_messages_of_its_kernel(tmp_path: Path) -> None:
    console_class = runpy.run_path(str(_HERE / "console.py"))["Console"]
    said = "[ 1.2] ACPI Error\\r\\n@a-b opening exact\\r\\n[ 2.0] x @c durable 3 2\\n@c dur"
    script = f"printf '{said}'; exec sleep 60"
    with console_class(["sh", "-c", script], tmp_path / "log") as console:
        heard = []
        while len(heard) < 2:
            heard += console.lines(float("inf"))
        console.kill()
        heard += console.rest()
    assert heard == [("a-b", "opening", "exact"), ("c", "durable", "3 2")]
