"""Full disks, torn tails, damaged logs (cases D6, D7, D10)."""

from pathlib import Path
from typing import Any


def test_no_room_at_creation(ask: Any, tmp_path: Path) -> None:
    """D6, D10: the disk has half of what the pool needs.

    Persistent: nothing yet. The error comes before any store into a file with holes, which would
    kill the process later with SIGBUS, and leaves nothing behind.
    """
    found = ask("creation_without_room", folder=str(tmp_path))
    assert "no room for the pool" in found["error"]
    assert "full.pool/data" in found["error"]
    assert found["left"] == []


def test_no_room_to_grow_the_log(ask: Any, tmp_path: Path) -> None:
    """D6: a larger batch needs a larger log while training runs, and the disk is full.

    Persistent: the pool at the last commit. Lost: the batch that did not fit. The step fails before
    it changes anything; the same training goes on once there is room, with the same bits.
    """
    found = ask("growth_without_room", folder=str(tmp_path))
    assert found["error"].startswith("5 "), found["error"]
    assert "needs" in found["error"]
    assert found["after"] == {"same": True, "end": True}


def test_torn_tail_and_damage(ask: Any, tmpfs_folder: Path) -> None:
    """D7: a log as a kill in the middle of an update leaves it, then damaged.

    Persistent: rows of the batch in flight half stored, its frame complete, its flag set. Zeros
    where nothing was logged are no damage. A frame that is needed and damaged is refused with
    nothing changed: rolling back from it would put wrong bytes into the tables for good.
    """
    results = {one["what"]: one for one in ask("damaged", folder=str(tmpfs_folder))}
    committed, before = results["untouched"]["reference"]
    assert results["untouched"]["said"] == committed
    assert results["tail of the file zeroed"]["said"] == committed
    for what in ("one byte of a record", "frame zeroed", "last byte cut off"):
        assert results[what]["said"].startswith("refused: "), results[what]
        assert results[what]["unchanged"], what
        assert results[what]["found"] > 0, what
    assert results["newest slot"]["said"] in (committed, before) or results["newest slot"][
        "said"
    ].startswith("refused: ")
