"""Snapshots: a copy of one committed batch while training goes on, and how another process asks
for one.

The trainer looks for `snapshot.request` in the pool's folder at each commit, takes the snapshot and
answers in `snapshot.reply`. Both are small JSON files, written under another name and renamed; what
is left of a process that died is removed by the next one.
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

__all__ = ["Snapshot", "SnapshotDesk", "ask_for_snapshot"]

_REQUEST, _REPLY = "snapshot.request", "snapshot.reply"
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
            _remove_unfinished(self.path)
            raise


def _remove_unfinished(path: Path) -> None:
    for name in ("log", "data", "lock", "records"):
        (path / name).unlink(missing_ok=True)
    if path.is_dir() and not any(path.iterdir()):
        path.rmdir()


def _write(path: Path, content: dict[str, Any]) -> None:
    part = path.with_suffix(f".{os.getpid()}")
    part.write_text(json.dumps(content))
    part.rename(path)


class SnapshotDesk:
    """The trainer's side: serves requests of other processes between two batches.

    Args:
        folder: The pool's.
        take: Takes a snapshot without waiting for it.
    """

    def __init__(self, folder: Path, take: Callable[[str], Snapshot]) -> None:
        self._request, self._reply = folder / _REQUEST, folder / _REPLY
        self._take = take
        self._running: Snapshot | None = None

    def serve(self) -> None:
        """Called after each commit; costs a look into the folder."""
        if self._running is not None and self._running.is_done:
            self._answer(self._running)
            self._running = None
        if self._running is None and self._request.exists():
            path = json.loads(self._request.read_text())["path"]
            self._request.unlink()
            self._reply.unlink(missing_ok=True)
            try:
                self._running = self._take(path)
            except (TrainingCXLError, OSError) as error:
                _write(self._reply, {"path": path, "error": str(error)})

    def finish(self) -> None:
        """Before the pool closes: waits for what is being taken."""
        if self._running is not None:
            self._answer(self._running)
            self._running = None
        self._request.unlink(missing_ok=True)

    def _answer(self, snapshot: Snapshot) -> None:
        answer: dict[str, Any] = {"path": str(snapshot.path), "batch": snapshot.batch}
        try:
            snapshot.wait()
        except (TrainingCXLError, OSError) as error:
            answer["error"] = str(error)
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
    request, reply = pool / _REQUEST, pool / _REPLY
    reply.unlink(missing_ok=True)
    _write(request, {"path": str(path), "pid": os.getpid()})
    deadline = time.monotonic() + _ANSWER_SECONDS
    try:
        while not reply.exists():
            if not is_trained() and not reply.exists():
                raise PoolError(
                    f"the training of pool '{pool}' ended before the snapshot was taken\n"
                    "  do:    ask again: the pool is closed now"
                )
            if request.exists() and time.monotonic() > deadline:
                raise PoolError(
                    f"the training of pool '{pool}' did not answer for {_ANSWER_SECONDS:.0f} s: it "
                    "looks for requests after each batch\n"
                    "  do:    ask again, or take the snapshot in its own loop: pool.snapshot(PATH)"
                )
            time.sleep(_POLL_SECONDS)
    finally:
        request.unlink(missing_ok=True)
    answer = json.loads(reply.read_text())
    reply.unlink(missing_ok=True)
    if "error" in answer:
        raise PoolError(answer["error"])
    return int(answer["batch"])
