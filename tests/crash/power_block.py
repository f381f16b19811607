"""What an ordinary file may hold when the power fails (level power with a journal).

A sector of 512 bytes has, whole, any version that it had since the last sync that covered it was
begun. Bytes of `log` and `data` are mapped: versions of a sector are what memory held at some
instant, and of the stores between two looks at it (recording.h) any may have come first. Bytes of
`journal` are written by system calls, a version each.
"""

import itertools
import math
import random
from collections.abc import Iterator
from typing import ClassVar

from power_medium import Granule, Image, Kinds, Medium, Step, chosen_steps

__all__ = ["BlockMedium"]

_SECTOR_WORDS = 64
_JOURNAL = 2
# Never synced while training goes on, and not believed after a power failure.
_DISBELIEVED = {"slot", "resume", "flag", "frame"}
_ENUMERATED_MAX = 64
_RUNS_MAX = 2


class BlockMedium(Medium):
    """As Medium: flushes and fences do nothing, syncs may be of a range."""

    IN_FLIGHT: ClassVar = {"rows", "journal frame", "journal slot"}

    def __init__(self, contents: list[bytes | None]) -> None:
        super().__init__(contents, _SECTOR_WORDS)
        self._kinds = Kinds()
        self._split: tuple[list[Granule], list[Granule], list[Granule]] = ([], [], [])

    def flush(self, thread: int, number: int, offset: int, num_bytes: int) -> None:
        """Reaches the page cache alone."""

    def would_change(self, thread: int) -> bool:
        return False

    def images(self, mode: str, count: int, choose: random.Random, kinds: Kinds) -> Iterator[Image]:
        """All where they are few; else all states of the journal, or samples of them."""
        self._kinds = kinds
        versions = {key: len(steps) + 1 for key, steps in self.pending.items()}
        if self._is_settled() and _product(versions) <= min(count, _ENUMERATED_MAX):
            yield from self._all_of(list(versions), [], mode, choose)
            return
        journal = [key for key in versions if key[0] == _JOURNAL]
        others = [key for key in versions if key[0] != _JOURNAL]
        if journal and _product({key: versions[key] for key in journal}) <= count // 2:
            yield from self._all_of(journal, others, mode, choose)
            count //= 2
        for run in _runs(journal)[-_RUNS_MAX:]:
            for part in (run[:1], run[1:], run[: choose.randrange(len(run))]):
                arrived = part + (self._subset(others, choose) if others else [])
                yield self._image(arrived, mode if choose.random() < 0.5 else "all", choose)
        yield from super().images(mode, count, choose, kinds)

    def _all_of(
        self, keys: list[Granule], others: list[Granule], mode: str, choose: random.Random
    ) -> Iterator[Image]:
        """Each combination of the versions of `keys`, each with any of the others."""
        for numbers in itertools.product(*(range(len(self.pending[key]) + 1) for key in keys)):
            steps = [
                (key[0], places, values)
                for key, number in zip(keys, numbers, strict=True)
                for _, places, values in self.pending[key][:number]
            ]
            for key in self._subset(others, choose) if others else []:
                steps += [(key[0], *step[1:]) for step in self._chosen(key, mode, choose)]
            yield self._made(steps, choose, are_sizes_new=False)

    def _subset(self, keys: list[Granule], choose: random.Random) -> list[Granule]:
        """What is not believed counts as one: of the rest one may be alone, or missing."""
        if self._split[0] is not keys:
            parts: tuple[list[Granule], list[Granule]] = ([], [])
            for key in keys:
                parts[self._is_disbelieved(key)].append(key)
            self._split = (keys, *parts)
        _, rest, others = self._split
        share = choose.choice((0.0, 0.5, 1.0))
        some = [key for key in others if choose.random() < share]
        return some + (super()._subset(rest, choose) if rest else [])

    def _is_disbelieved(self, key: Granule) -> bool:
        return key[0] == 0 and self._kinds.of(0, key[1] * 8 * _SECTOR_WORDS) in _DISBELIEVED

    def _chosen(self, key: Granule, mode: str, choose: random.Random) -> list[Step]:
        steps = self.pending[key]
        if mode == "block":
            if key[0] != _JOURNAL and choose.random() < 0.5:
                return chosen_steps(steps, "tso", choose)
            return steps[: choose.randint(0, len(steps))]
        return chosen_steps(steps, mode, choose)


def _runs(keys: list[Granule]) -> list[list[Granule]]:
    """Neighbours: what was written as one, and may reach the medium from its begin on."""
    runs: list[list[Granule]] = []
    for key in sorted(keys):
        if not runs or key[1] != runs[-1][-1][1] + 1:
            runs.append([])
        runs[-1].append(key)
    return runs


def _product(versions: dict[Granule, int]) -> int:
    return math.prod(versions.values())
