"""Snapshots: a copy of one committed batch while training goes on, and how another process asks
for one.

The trainer looks for files `request.PID` in the pool's folder `snapshots` at each commit, takes one
snapshot after the other and answers each in `reply.PID`. They are small JSON files, written under
another name and renamed. A trainer that opens the pool forgets those of a life before.
"""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainingcxl.errors import PoolError, TrainingCXLError

if TYPE_CHECKING:
    from trainingcxl import _core

__all__ = ["Snapshot", "SnapshotDesk", "ask_for_snapshot", "remove_unfinished"]

_DESK = "snapshots"
_POLL_SECONDS = 0.05
_ANSWER_SECONDS = 600.0


class Snapshot:
    """A snapshot that is being taken.

    Attributes:
        path: The new pool.
        batch: Its committed batch.
    """

    def __init__(self, core: "_core.Pool", path: Path) -> None:
        self._core = core
        self.path = path
        self.batch = self._progress()[0]

    def _progress(self) -> tuple[int, int, int, bool]:
        progress = self._core.snapshot_progress()
        assert progress is not None
        return progress

    @property
    def is_done(self) -> bool:
        """Whether wait() would return at once."""
        return self._progress()[3]

    @property
    def share_copied(self) -> float:
        """Of the tables' bytes, 0 to 1."""
        _, done, total, _ = self._progress()
        return done / max(1, total)

    def wait(self) -> None:
        """Blocks until the snapshot is a complete pool, synced and closed.

        Raises:
            PoolError: It could not be completed; what is left at its path is no pool.
        """
        try:
            self._core.wait_snapshot()
        except (TrainingCXLError, OSError):
            remove_unfinished(self.path)
            raise


def remove_unfinished(path: Path) -> None:
    """Leaves nothing of a snapshot that failed."""
    for name in ("log", "data", "lock", "snapshot.incomplete"):
        (path / name).unlink(missing_ok=True)
    if path.is_dir() and not any(path.iterdir()):
        path.rmdir()


def _write(path: Path, content: dict[str, Any]) -> None:
    part = path.with_name(f"part.{path.name}")
    part.write_text(json.dumps(content))
    part.rename(path)


class SnapshotDesk:
    """The trainer's side: serves requests of other processes between two batches.

    Args:
        folder: The pool's.
        take: Takes a snapshot without waiting for it.
        is_trainer: Forget what was asked of an earlier trainer.
    """

    def __init__(self, folder: Path, take: Callable[[str], Snapshot], *, is_trainer: bool) -> None:
        self._folder = folder / _DESK
        self._take = take
        self._running: Snapshot | None = None
        self._reply = self._folder  # of the request that is served
        if is_trainer:
            self.forget()

    def forget(self) -> None:
        """Removes what was asked of an earlier trainer; who asked has been told by its end."""
        for left in self._folder.glob("*.*"):
            left.unlink(missing_ok=True)

    def serve(self) -> None:
        """Called after each commit; costs a look for the folder."""
        if self._running is not None and self._running.is_done:
            self._answer(self._running)
        if self._running is None and self._folder.exists():
            self._begin_next()

    def _begin_next(self) -> None:
        for request in sorted(self._folder.glob("request.*")):
            path = json.loads(request.read_text())["path"]
            request.unlink()
            self._reply = request.with_name(request.name.replace("request", "reply"))
            try:
                self._running = self._take(path)
            except (TrainingCXLError, OSError) as error:
                _write(self._reply, {"error": str(error)})
            else:
                return

    def finish(self) -> None:
        """Before the pool closes: waits for what is being taken."""
        if self._running is not None:
            self._answer(self._running)

    def _answer(self, snapshot: Snapshot) -> None:
        self._running = None
        answer: dict[str, Any] = {"batch": snapshot.batch}
        try:
            snapshot.wait()
        except (TrainingCXLError, OSError) as error:
            answer = {"error": str(error)}
        _write(self._reply, answer)


def ask_for_snapshot(pool: Path, path: Path, is_trained: Callable[[], bool]) -> int:
    """Asks the trainer of a pool for a snapshot and waits for it.

    Args:
        pool: The pool's folder.
        path: Where the snapshot goes.
        is_trained: Whether the trainer still lives.

    Returns:
        The snapshot's batch.

    Raises:
        PoolError: The trainer ended, did not answer for ten minutes, or could not take it.
    """
    folder = pool / _DESK
    folder.mkdir(exist_ok=True)
    request, reply = folder / f"request.{os.getpid()}", folder / f"reply.{os.getpid()}"
    reply.unlink(missing_ok=True)
    _write(request, {"path": str(path)})
    deadline = time.monotonic() + _ANSWER_SECONDS
    try:
        while not reply.exists():
            if not is_trained() and not reply.exists():
                raise PoolError(
                    f"the training of pool '{pool}' ended before the snapshot was taken\n"
                    f"  do:    remove '{path}' if it is there, and ask again"
                )
            if request.exists() and time.monotonic() > deadline:
                raise PoolError(
                    f"the training of pool '{pool}' did not answer for {_ANSWER_SECONDS:.0f} s: it "
                    "looks for requests after each batch, one after the other\n"
                    "  do:    ask again, or take the snapshot in its own loop: pool.snapshot(PATH)"
                )
            time.sleep(_POLL_SECONDS)
        answer = json.loads(reply.read_text())
    finally:
        request.unlink(missing_ok=True)
        reply.unlink(missing_ok=True)
    if "error" in answer:
        raise PoolError(answer["error"])
    return int(answer["batch"])
