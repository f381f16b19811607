"""One trainer a pool, also when trainers die (cases D1, D6)."""

from pathlib import Path
from typing import Any


def test_two_trainers_create_one_pool(ask: Any, tmpfs_folder: Path) -> None:
    """Two processes start the same training at the same moment on a path where nothing is.

    Persistent: whatever the winner has made so far. The loser must be told who it is and leave the
    winner's files alone; deleting them as "left behind" would lose the whole run.
    """
    for first, second, damage in ask("race", folder=str(tmpfs_folder), rounds=6):
        assert damage == "0"
        outcomes = sorted(text.partition(":")[0] for text in (first, second))
        assert outcomes in (["locked", "trained"], ["trained", "trained"]), (first, second)


def test_lock_goes_with_its_owner(ask: Any, tmpfs_folder: Path) -> None:
    """A second trainer is refused, naming the first, until the first is killed.

    Persistent: the lock file, with the pid of a process that is gone. Lost: the lock itself, with
    the process. A pool that stayed locked after a kill would need the user's hands.
    """
    found = ask("lock_of_killed", folder=str(tmpfs_folder))
    assert f"in use by process {found['pid']}" in found["second"]
    assert found["third"].startswith("opened at ")
