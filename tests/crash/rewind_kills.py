"""Rewinds that are killed at every point: run by the fork server."""

import ctypes
import itertools
import json
import os
import shutil
import signal
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from trainingcxl import _core
from trainingcxl.checkpoint import FaultTolerantRun
from trainingcxl.nn import EmbeddingBagCollection, EmbeddingBagConfig
from trainingcxl.optim import Adagrad
from trainingcxl.pool import Pool, verify

_ROWS, _DIM, _BAGS = 60, 4, 8
_TRAINED, _END = 14, 18
_BACK = 6  # batches, at least
_PR_SET_PDEATHSIG = 1

_MEDIA: dict[str, dict[str, Any]] = {
    "process": {},
    "fsdax": {"durability": "power", "_medium": "fsdax"},
    "journal": {"durability": "power", "_medium": "block"},
}


class _Batches:
    def __init__(self, end: int) -> None:
        self._end = end
        self._next = 0

    def seek(self, epoch: int, batch: int) -> None:
        self._next = batch

    def __iter__(self) -> Iterator[torch.Tensor]:
        for batch in range(self._next, self._end):
            draw = torch.rand(_BAGS, 1, generator=torch.Generator().manual_seed(batch))
            yield (_ROWS * draw**3).long()


class _Rig:
    def __init__(self, folder: Path, medium: str) -> None:
        self.folder, self.options = folder, {"threads": 1, **_MEDIA[medium]}
        self.medium = medium
        self.problems: list[str] = []
        self.died_at: dict[str, int] = {}
        self.found: dict[str, int] = {"old": 0, "new": 0}

    def pool(self, path: Path, **options: Any) -> Pool:
        return Pool(path, **{**self.options, **options})

    def train(self, path: Path, end: int) -> str:
        with self.pool(path) as pool:
            config = EmbeddingBagConfig(
                name="t", num_embeddings=_ROWS, embedding_dim=_DIM, feature_names=["x"]
            )
            bags = EmbeddingBagCollection(pool, tables=[config], optimizer=Adagrad(lr=0.1))
            torch.manual_seed(0)
            model = torch.nn.Sequential(bags, torch.nn.Linear(_DIM, 1))
            dense = torch.optim.Adam(model.parameters())
            run = FaultTolerantRun(pool, model, dense, dense_every=2, sparse_of=lambda ids: ids)
            for ids in run.batches(_Batches(end)):
                run.step((model(ids) - 1.0).square().sum())
                pool.core.wait_dense()
            return pool.digest()

    def state(self, path: Path, **options: Any) -> list[Any]:
        """Where an opening comes to."""
        with self.pool(path, **options) as pool:
            return [pool.committed_batch, pool.digest()]

    def rewind(self, path: Path, countdown: int, point: str, writer: int, **options: Any) -> str:
        with self.pool(path, **options) as pool:
            if pool.recovery is not None and not pool.recovery.is_rewind:
                _core.kill_at_persist(countdown, point, writer)
                pool.rewind(batches=_BACK)
            _core.kill_at_persist(-1)
            return str(pool.committed_batch)

    def recover(self, path: Path, countdown: int, writer: int, **options: Any) -> str:
        _core.kill_at_persist(countdown, "", writer)
        pool = self.pool(path, **options)
        _core.kill_at_persist(-1)
        pool.close()
        return ""


def _forked(body: Callable[[int], Any]) -> tuple[bool, Any]:
    """Whether the child was killed, and what it answered or died at."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            os.write(writer, json.dumps({"answer": body(writer)}).encode())
        except BaseException:
            os.write(writer, json.dumps({"error": traceback.format_exc()}).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        said = pipe.read()
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        return True, said
    answer = json.loads(said)
    if "error" in answer:
        raise AssertionError(answer["error"])
    return False, answer["answer"]


def rewinds_killed(folder: str, medium: str, stride: int, point: str = "") -> dict[str, Any]:
    """A rewind dies at its k-th crash point, for each k until it lives; every second time the
    opening after it dies, too. Beside a journal each opening takes the machine for restarted.
    """
    rig = _Rig(Path(folder), medium)
    origin = rig.folder / "origin.pool"
    _forked(lambda writer: rig.train(origin, _TRAINED))
    old = _forked(lambda writer: rig.state(origin))[1]
    alone = rig.folder / "alone.pool"
    shutil.copytree(origin, alone)
    _forked(lambda writer: rig.rewind(alone, 0, "", writer))
    new = _forked(lambda writer: rig.state(alone))[1]
    expected = _forked(lambda writer: rig.train(rig.folder / "whole.pool", _END))[1]
    assert new[0] <= old[0] - _BACK
    restart = {"_assume_reboot": True} if medium == "journal" else {}
    kills = 0
    for countdown in itertools.count(1, stride):
        path = rig.folder / "killed.pool"
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(origin, path)
        k = countdown
        was_killed, said = _forked(lambda w: rig.rewind(path, k, point, w))  # noqa: B023
        if not was_killed:
            break
        kills += 1
        rig.died_at[said] = rig.died_at.get(said, 0) + 1
        if countdown // stride % 2:
            _forked(lambda w: rig.recover(path, 1 + k // 2, w, **restart))  # noqa: B023
        damage = _forked(lambda w: [str(d) for d in verify(path)])[1]  # noqa: B023
        found = _forked(lambda w: rig.state(path, **restart))[1]  # noqa: B023
        if found not in (old, new):
            rig.problems.append(f"killed at {countdown} ({said}): batch {found[0]}")
        if damage and medium != "journal":
            rig.problems.append(f"killed at {countdown} ({said}): {damage}")
        rig.found["new" if found == new else "old"] += 1
        if countdown // stride % 7 == 0:
            end = _forked(lambda w: rig.train(path, _END))[1]  # noqa: B023
            if end != expected:
                rig.problems.append(f"killed at {countdown} ({said}): another end")
    return {
        "problems": rig.problems,
        "kills": kills,
        "found": rig.found,
        "died_at": rig.died_at,
    }
