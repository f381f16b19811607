"""Flipped bits anywhere in a pool: the short form of flips.py."""

import json
import subprocess
import sys
from pathlib import Path

_RIG = Path(__file__).with_name("flips.py")


def flips(*options: str) -> tuple[dict[str, int], list[str]]:
    """What the rig prints: its figures, and the flips that nobody saw."""
    done = subprocess.run(
        [sys.executable, str(_RIG), "--seed", "1", *options],
        capture_output=True,
        text=True,
        check=False,
    )
    figures = json.loads(done.stdout)
    assert done.returncode == (1 if figures["undetected"] else 0), done.stderr
    return figures, [line for line in done.stderr.splitlines() if " byte " in line]


def test_no_flip_gives_a_wrong_state_unseen() -> None:
    """Every 401st byte in use of a closed and of a killed pool, with checksums of rows."""
    figures, unseen = flips("--every", "401")
    assert unseen == []
    assert figures["bytes"] > 150
    assert figures["detected"] > 15
    assert figures["repaired"] > 15


def test_rig_sees_what_nobody_else_does() -> None:
    """Without checksums of rows some flips in the tables must go unseen: the rig can fail."""
    figures, unseen = flips("--every", "401", "--no-check-rows")
    assert figures["undetected"] == len(unseen) > 0
    assert all("/data byte" in place for place in unseen)
