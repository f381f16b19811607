"""kill -9 in a rewind: the pool is at the old batch or at the new one, never in between."""

from pathlib import Path
from typing import Any

import pytest


@pytest.mark.parametrize("medium", ["process", "fsdax"])
def test_rewind_killed_at_each_point(ask: Any, tmpfs_folder: Path, medium: str) -> None:
    """Persistent: the slot that decides, or not; rows of any of six batches; all frames and dense
    parts. Lost: how far it came. Were the decision not one store, or a frame given up before its
    rows were back, the rows would be of one batch and the dense part of another.
    """
    found = ask("rewinds_killed", folder=str(tmpfs_folder), medium=medium, stride=4)
    assert found["problems"] == []
    assert found["kills"] >= 12
    assert found["found"]["new"] >= 5


@pytest.mark.parametrize("point", ["rewind", "fence"])
def test_rewind_killed_around_its_decision(ask: Any, tmpfs_folder: Path, point: str) -> None:
    """Before the slot the old batch, after it the new one."""
    found = ask("rewinds_killed", folder=str(tmpfs_folder), medium="process", stride=1, point=point)
    assert found["problems"] == []
    assert found["found"]["old"] >= 1
    assert found["kills"] == sum(found["found"].values())


def test_rewind_beside_a_journal(ask: Any, tmp_path: Path) -> None:
    """Killed, and the next opening takes the machine for restarted: the journal, which knows
    nothing of the rewind, must not be believed between the slot that decides and its new base.
    """
    found = ask("rewinds_killed", folder=str(tmp_path), medium="journal", stride=6)
    assert found["problems"] == []
    assert found["kills"] >= 5
    assert found["found"]["new"] >= 3
