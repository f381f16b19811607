"""kill -9 at random and at chosen moments (cases D1, D3, A1, A2, A5).

Level process: what a store wrote is in the page cache and outlives the process; what a register,
a Python object or the staging buffer held does not.
"""

from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(params=["tmpfs", "file", "fsdax"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, str]:
    """Folder and medium; fsdax is the code for persistent memory, forced on tmpfs."""
    if request.param == "file":
        return str(tmp_path), "auto"
    return str(request.getfixturevalue("tmpfs_folder")), "fsdax" * (
        request.param == "fsdax"
    ) or "auto"


def test_random_kills(ask: Any, place: tuple[str, str]) -> None:
    """D1: any moment of any of nine trainings.

    Persistent at the kill: tables with some rows of the batch in flight stored and some not, the
    undo frame of that batch, slots, dense generations, of which one may be half written. Lost: the
    engine's queue, sorted batches, gradients, Adam's step, the random generators. Without recovery
    the torn batch would stay in the rows, and with a wrong one rows would be of another batch than
    the dense part, a batch be trained twice, or another dropout mask be drawn.
    """
    folder, medium = place
    found = ask("random_kills", folder=folder, medium=medium, kills=6, seed=1)
    assert found["differences"] == []
    assert found["kills"] >= 25
    assert found["share_in_transaction"] >= 0.3
    assert found["rows_rolled_back"] > 0


@pytest.mark.parametrize("epoch", [24, 2])
def test_every_point_after_an_opening(ask: Any, tmpfs_folder: Path, epoch: int) -> None:
    """Each life dies one crash point later than the one before it, so all orders of stores occur.

    Persistent: everything stored before the point; every point is a fence or lies between two
    stores whose order the protocol fixes. Lost: everything that was to come after it. A missing
    order would show as a flag without its records, a slot without its rows, or a header without
    its body; at the end of an epoch, whose slot has the batch of the one before, as a lost commit.
    """
    plan = [{"countdown": k} for k in range(1, 100)]
    found = ask(
        "planned_kills",
        folder=str(tmpfs_folder),
        scenario={"dense_every": 2, "epochs": 192 // epoch, "batches_per_epoch": epoch},
        plans=[plan],
    )
    assert found["differences"] == []
    assert found["kills"] == len(plan)
    assert {"fence", "fenced", "update: rows"} <= set(found["died_at"])


def test_creation_killed_at_each_point(ask: Any, tmpfs_folder: Path) -> None:
    """Creation is killed again and again, each time one step further; and once, anywhere.

    Persistent: files of any size up to the final one, geometry and session before the superblock,
    tables in part. Lost: that a creation was under way. A pool that is refused as damaged, or taken
    for complete with half-filled tables, would need the user's hands.
    """
    found = ask(
        "planned_kills",
        folder=str(tmpfs_folder),
        scenario={"epochs": 1, "batches_per_epoch": 3},
        plans=[[{"countdown": k} for k in range(1, 40)]]
        + [[{"countdown": k}] for k in range(8, 50, 4)],
    )
    assert found["differences"] == []
    assert found["kills_in_creation"] >= 20
    assert "create: head cleared" in found["died_at"]


def test_recovery_killed_again_and_again(ask: Any, tmpfs_folder: Path) -> None:
    """Recovery that takes back several batches dies at each of its points, then succeeds.

    Persistent: tables some of whose rows are of batch M, some of M + 1, ..., some torn; all undo
    frames; the slot of C. Lost: how far the last recovery came. If recovery were not idempotent, or
    gave up a frame before its rows were back, the second attempt would end elsewhere.
    """
    found = ask(
        "planned_kills",
        folder=str(tmpfs_folder),
        scenario={"dense_every": 7, "epochs": 1},
        plans=[
            [{"countdown": 13, "point": "commit: rows stored"}]
            + [{"countdown": k, "point": "recovery: row"} for k in range(1, 500, 17)]
            + [{"countdown": k} for k in range(1, 20)]
        ],
    )
    assert found["differences"] == []
    assert found["kills_in_recovery"] >= 30


def test_generation_of_a_killed_recovery_is_never_taken(ask: Any, tmpfs_folder: Path) -> None:
    """A recovery "latest" is killed anywhere, then one "exact" follows, and a kill of its training.

    Persistent: a dense generation that says batch C and holds the dense part of the older batch M,
    complete but not yet named by a slot. Lost: that it was meant for a slot that was never written.
    Taken for batch C's once training has come to C again, it would give C's rows M's dense part.
    """
    plans = [
        [
            {"countdown": 13, "point": "commit: rows stored"},
            {"countdown": k, "point": "fence", "resume": "latest"},
            {"countdown": 6, "point": "commit: rows stored", "resume": "exact"},
        ]
        for k in range(8, 13)
    ]
    found = ask(
        "planned_kills",
        folder=str(tmpfs_folder),
        scenario={"dense_every": 7, "epochs": 1, "batches_per_epoch": 20},
        plans=plans,
    )
    assert found["differences"] == []
    assert found["kills_in_recovery"] >= 4


def test_latest_after_a_killed_exact_recovery(ask: Any, tmpfs_folder: Path) -> None:
    """An exact recovery dies while it takes committed batches back, and one "latest" follows.

    Persistent: the slot of C, and rows of which some are of C already and some of an older batch.
    Lost: that an exact recovery had begun. "Latest" would undo nothing but the open transaction,
    and train on with rows of no batch at all.
    """
    plans = [
        [
            {"countdown": 13, "point": "commit: rows stored"},
            {"countdown": k, "point": "recovery: row", "resume": "exact"},
            {"countdown": 3, "point": "commit: rows stored", "resume": "latest"},
        ]
        for k in (1, 250, 450)
    ]
    found = ask(
        "planned_kills",
        folder=str(tmpfs_folder),
        scenario={"dense_every": 7, "epochs": 1, "batches_per_epoch": 20},
        plans=plans,
    )
    assert found["differences"] == []
    assert found["died_at"]["recovery: row"] == len(plans)


def test_positions_in_an_epoch(ask: Any, tmpfs_folder: Path) -> None:
    """A1, A2, A5: kills at 20 %, 40 % and at the last batch of an epoch, before the first batch,
    after one batch of a resumed life, and at the end of the last epoch.

    Persistent: the position in the resume record of the last slot. Lost: the loader and what it had
    fetched ahead. An epoch would be skipped, begun again, or lose the batch that was fetched.
    """
    epoch, point = 10, "commit: rows stored"
    plans = [
        [{"countdown": k, "point": point}] * n
        for k, n in ((2, 1), (4, 1), (epoch, 2), (epoch + 1, 1), (1, 1), (3 * epoch, 1))
    ]
    plans.append([{"countdown": 5, "point": point}, *([{"countdown": 2, "point": point}] * 3)])
    found = ask(
        "planned_kills",
        folder=str(tmpfs_folder),
        scenario={"epochs": 3, "batches_per_epoch": epoch},
        plans=plans,
    )
    assert found["differences"] == []
    assert found["runs"] == len(plans)
    assert {epoch - 1, epoch, 3 * epoch - 1} <= set(found["batches_found"])


def test_request_to_end_in_the_middle_of_a_step(ask: Any, tmpfs_folder: Path) -> None:
    """SIGTERM raises somewhere in a step, and the pool is closed on the way out.

    Persistent: the last commit, and what close() writes. Lost: the step under way, of which the
    dense optimizer may have done its part already. Closing must not take that half step for a dense
    generation of the committed batch.
    """
    plan = [{"seconds": 0.004 * k, "after_opening": True, "is_request": True} for k in range(12)]
    found = ask(
        "planned_kills",
        folder=str(tmpfs_folder),
        scenario={"epochs": 8, "dense_every": 3},
        plans=[plan],
    )
    assert found["differences"] == []
    assert found["requests"] >= 8


def test_request_to_end_while_a_batch_is_skipped(ask: Any, tmpfs_folder: Path) -> None:
    """SIGTERM comes in run.skip(), and the pool is closed on the way out.

    Persistent: the last commit, and what close() writes. Lost: the skip. The forward before it has
    drawn a dropout mask, and the schedule has moved on: a generation written now would be of no
    batch, although no row and no parameter has changed.
    """
    assert ask("interrupted_skip", folder=str(tmpfs_folder)) == []


@pytest.mark.parametrize(
    "spoil",
    [
        "no log",
        "random generators not restored",
        "a batch trained twice",
        "dense part of another moment",
    ],
)
def test_the_rig_finds_what_is_broken(ask: Any, tmpfs_folder: Path, spoil: str) -> None:
    """A checker that never failed proves nothing: each fault is seen within 100 kills (D3)."""
    found = ask("spoiled", folder=str(tmpfs_folder), spoil=spoil, kills=100)
    assert found["differences"], f"{spoil}: not seen in {found['kills']} kills"
    assert "AttributeError" not in found["differences"][0]  # the spoiler itself would be broken


@pytest.mark.parametrize("medium", ["auto", "fsdax"])
def test_rows_equal_an_independent_trainer(ask: Any, tmpfs_folder: Path, medium: str) -> None:
    """The recovered rows equal, bit for bit, those of a trainer in NumPy that shares no code.

    Persistent: as above. A fault that training and recovery share, such as a wrong row number in
    both, would escape a comparison of the package with itself.
    """
    found = ask("numpy_oracle", folder=str(tmpfs_folder), medium=medium, kills=25, seed=5)
    assert found["differences"] == []
    assert found["points_compared"] >= 50
