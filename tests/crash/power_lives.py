"""Lives of a pool, recorded one after the other: what a kill or a power failure leaves of them."""

import itertools
import json
import random
from pathlib import Path

import numpy as np
from power_block import BlockMedium
from power_medium import PAGE_WORDS, FileState, Kinds, Medium
from power_rig import apply
from power_trace import stop_recording

from trainingcxl import _core

__all__ = ["Lives"]

_IMAGES = 12  # of which a power failure takes one
_FILES = ("log", "data", "journal")


class Lives:
    """What the medium surely holds, and may hold, after what its processes did.

    Args:
        is_block: An ordinary file with a journal; else persistent memory.
        seed: Of what arrives.
    """

    def __init__(self, *, is_block: bool, seed: int) -> None:
        self._names = _FILES if is_block else _FILES[:2]
        none: list[bytes | None] = [None for _ in self._names]
        self._medium: Medium = BlockMedium(none) if is_block else Medium(none)
        self._modes = ("block",) if is_block else ("tso", "weak")
        self._random = random.Random(seed)

    def begin(self, path: Path) -> None:
        """A process is about to open the pool, whose folder must be called "pool"."""
        assert path.name == "pool"
        _core.record_start([str(path / name) for name in self._names], [])

    def end(self, share: float = 1.0) -> None:
        """It ended here, or after this share of what it did."""
        _core.record_mark(json.dumps({"what": "end"}))
        recorded = stop_recording()
        for event in recorded.events[: round(share * len(recorded.events))]:
            apply(recorded, self._medium, event)
        self._medium.forget_flushes()

    def cut(self) -> None:
        """The power fails."""
        kinds = Kinds()
        kinds.learn(self._medium.files[0].memory)
        mode = self._random.choice(self._modes)
        images = self._medium.images(mode, _IMAGES, self._random, kinds)
        number = self._random.randrange(_IMAGES)
        image = list(itertools.islice(images, number + 1))[-1]
        self._medium = self._medium.after(image)

    def write(self, path: Path) -> None:
        """The files as the next process finds them, in a new folder."""
        path.mkdir(parents=True)
        (path / "lock").touch()  # a reader makes none
        for name, file in zip(self._names, self._medium.files, strict=True):
            if file.size >= 0:
                _write(path / name, file)


def _write(path: Path, file: FileState) -> None:
    with path.open("wb") as out:
        out.truncate(file.size)
        if file.size == 0:
            return
        home = np.memmap(path, np.uint64, "r+", shape=(file.size // 8,))
        for page in sorted(file.pages):
            part = slice(page * PAGE_WORDS, (page + 1) * PAGE_WORDS)
            home[part] = file.memory[part][: home[part].size]
