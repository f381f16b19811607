"""Recovers one image and says what is wrong with the result (invariants I1 to I5)."""

import json
import os
import random
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from power_medium import PAGE_WORDS, Image, Medium
from power_trace import Plan, State, Training, dense_blob, open_core

from trainingcxl.errors import PoolCorrupted, PoolVersionError, RecoveryError

__all__ = ["NO_DAMAGE", "REFUSALS", "Expect", "Scratch", "check"]

NO_DAMAGE = "no damage: "
"""So begin problems that show no lost and no wrong bytes. They are problems all the same, but no
planted fault counts as found by one.
"""
REFUSALS = (PoolCorrupted, PoolVersionError, RecoveryError)


@dataclass
class Expect:
    """What may be found at one moment of a record."""

    plan: Plan
    histories: list[list[State]]
    states: list[State] = field(default_factory=list)
    acked: tuple[int, int] | None = None
    """Batch and revision that were announced durable."""
    started: tuple[int, int] | None = None
    """Newest batch and revision that may have become durable."""
    point: int | None = None
    """Batch that a recovery has announced, or is about to."""
    is_recovering: bool = False
    is_exact_point: bool = True
    is_rewinding: bool = False
    is_point_fixed: bool = True
    """Not while a recovery goes on that builds on what so far only a kill was survived by."""
    aliases: dict[int, int] = field(default_factory=dict)
    """The dense part of this batch is that of an older one: it was resumed as "latest"."""

    def note(
        self, mark: dict[str, Any], following: dict[str, Any] | None, *, is_all_durable: bool
    ) -> None:
        """Follows the record; `following` is the next mark, which says where a recovery ends."""
        match mark["what"]:
            case "history":
                self.states = self.histories[mark["history"]]
            case "started":
                self.started, self.point = (mark["batch"], mark["revision"]), None
                self.aliases.pop(mark["batch"], None)
            case "acked":
                self.acked = mark["batch"], mark["revision"]
            case "recovering" if following is not None:
                self.recovering(following, is_all_durable=is_all_durable)
            case "rewinding" if following is not None:
                self.recovering(following, is_all_durable=False)  # or where it stood before
                self.is_rewinding = True
            case "recovered":
                self.recovered()

    def recovering(self, found: dict[str, Any], *, is_all_durable: bool) -> None:
        self.point, self.is_recovering = found["resumed_batch"], True
        # On a file a recovery from the journal may go on where one from the undo log had begun.
        self.is_point_fixed = is_all_durable and not self.plan.is_block
        self.is_exact_point = found["is_exact"]
        if found["dense_batch"] != self.point:
            dense = found["dense_batch"]
            self.aliases = {**self.aliases, self.point: self.aliases.get(dense, dense)}

    def recovered(self) -> None:
        assert self.point is not None
        self.acked, self.started = (self.point, 0), (self.point, 99)
        self.is_recovering, self.is_point_fixed, self.is_rewinding = False, True, False

    def committed(self) -> set[int]:
        """Batches that the newest slot may name."""
        if self.acked is None or self.started is None:
            return {0} if self.started is not None else set()
        batches = set(range(self.acked[0], self.started[0] + 1))
        return batches | {self.point} if self.is_recovering and self.point is not None else batches

    def copy(self) -> "Expect":
        return replace(self)

    def open(self, path: Path | str, *, is_rebooted: bool = True) -> Any:
        """The pool, as after a power failure where that makes a difference."""
        after_reboot = is_rebooted and self.plan.is_block
        return open_core(self.plan, str(path), after_reboot=after_reboot)


class Scratch:
    """A pool's files that hold one image after the other.

    Args:
        folder: Where; on tmpfs.
        pages: Pages of each file that a recovery may store into.
        names: Of the files.
    """

    def __init__(self, folder: Path, pages: list[set[int]], names: tuple[str, ...]) -> None:
        self.path = folder / "pool"
        self.path.mkdir(parents=True, exist_ok=True)
        self._names, self._pages = names, pages
        self._maps: list[np.ndarray | None] = [None for _ in names]
        self._stored: list[np.ndarray] = [np.zeros(0, np.int64) for _ in names]
        self._touched: list[set[int]] = [set() for _ in names]
        self._puts = 0
        self.stray: list[str] = []

    def begin(self, medium: Medium) -> None:
        """From now on images differ from this medium's durable state."""
        self.medium = medium
        medium.changed.clear()
        for number, (file, pages) in enumerate(zip(medium.files, self._pages, strict=True)):
            self._touched[number] |= pages | file.pages
            self._stored[number] = np.fromiter(pages, np.int64, len(pages))
            self._bring_back(number)

    def follow(self) -> None:
        """The durable state has moved on."""
        for number, page in self.medium.changed:
            self._touched[number].add(page)
        for number, file in enumerate(self.medium.files):
            home = self._maps[number]
            if home is None or file.durable.size != home.size:
                self._bring_back(number)
        for number, page in self.medium.changed:
            if page * PAGE_WORDS < self._home(number).size:
                part = slice(page * PAGE_WORDS, (page + 1) * PAGE_WORDS)
                self._home(number)[part] = self.medium.files[number].durable[part]
        self.medium.changed.clear()

    def put(self, image: Image) -> None:
        self._patched: list[list[np.ndarray]] = [[] for _ in self._names]
        for number, places, values in image.patch:
            self._home(number)[places] = values
            pages = places // PAGE_WORDS  # in order
            pages = pages[np.flatnonzero(np.diff(pages, prepend=-1))]
            self._patched[number].append(pages)
            self._touched[number].update(pages.tolist())
        for number, size in enumerate(image.sizes):
            file = self.path / self._names[number]
            if size < 0:
                file.unlink()
                self._maps[number] = None
            elif size != 8 * self._home(number).size:
                os.truncate(file, size)

    def restore(self, *, was_trained: bool) -> None:
        """Back to the durable state, whatever recovery did, or training after it."""
        self._puts += 1
        for number, file in enumerate(self.medium.files):
            path = self.path / self._names[number]
            if self._maps[number] is None or path.stat().st_size != 8 * file.durable.size:
                self._bring_back(number)
            elif was_trained:
                self._copy_all(number)
            else:
                self._copy(number, np.concatenate([self._stored[number], *self._patched[number]]))
                home = self._home(number)
                if self._puts % 64 == 0 and not np.array_equal(home, file.durable):
                    page = int(np.flatnonzero(home != file.durable)[0]) // PAGE_WORDS
                    name = self._names[number]
                    self.stray.append(f"recovery stored into page {page} of '{name}'")
                    self._copy_all(number)

    def _home(self, number: int) -> np.ndarray:
        home = self._maps[number]
        assert home is not None
        return home

    def _copy(self, number: int, pages: np.ndarray) -> None:
        home, durable = self._home(number), self.medium.files[number].durable
        pages = pages[pages < home.size // PAGE_WORDS]
        now = home.reshape(-1, PAGE_WORDS)
        now[pages] = durable.reshape(-1, PAGE_WORDS)[pages]

    def _copy_all(self, number: int) -> None:
        home, durable = self._home(number), self.medium.files[number].durable
        differs = (home.reshape(-1, PAGE_WORDS) != durable.reshape(-1, PAGE_WORDS)).any(1)
        self._copy(number, np.flatnonzero(differs))

    def _bring_back(self, number: int) -> None:
        """The file, with the durable state's size and bytes."""
        path, durable = self.path / self._names[number], self.medium.files[number].durable
        home = self._maps[number]
        if home is None or home.size != durable.size or path.stat().st_size != 8 * durable.size:
            self._maps[number] = None
            path.write_bytes(b"")
            os.truncate(path, 8 * durable.size)
            self._maps[number] = np.zeros(0, np.uint64)
            if not durable.size:
                return
            self._maps[number] = np.memmap(path, np.uint64, "r+")
            self._touched[number] = self._pages[number] | self.medium.files[number].pages
        self._copy(number, np.fromiter(self._touched[number], np.int64))


@dataclass
class Found:
    """What recovering an image came to."""

    problems: list[str]
    has_undone: bool = False
    point: int | None = None
    report: dict[str, Any] = field(default_factory=dict)


def check(path: Path, expect: Expect, choose: random.Random, *, goes_on: bool) -> Found:
    """Recovers the image at `path`, twice, and goes on with it if asked."""
    found = Found([])
    exact = choose.random() < 0.6
    try:
        report = _recover(path, expect, found, exact=exact)
        if report is None:
            if goes_on:
                _create_anew(path, expect, found)
            return found
        found.point, found.report = report["resumed_batch"], report
        is_back = found.point != report["committed_batch"]
        found.has_undone = is_back or bool(report["batches_undone"] or report["rows_changed"])
        if not found.problems:
            _recover_again(path, expect, found, choose)
        if goes_on and not found.problems:
            _go_on(path, expect, found)
    except Exception as error:  # whatever it is, the image was not recovered
        if not found.problems:
            found.problems.append(f"{NO_DAMAGE}{type(error).__name__}: {error}")
    return found


def _opened(
    expect: Expect, path: Path, found: Found, *, exact: bool, is_rebooted: bool = True
) -> tuple[Any, dict[str, Any]]:
    """The recovered pool. An image that no sound build leaves is refused, which is damage."""
    try:
        core = expect.open(path, is_rebooted=is_rebooted)
        try:
            return core, core.recover(exact)
        except BaseException:
            core.close(False)
            raise
    except REFUSALS as error:
        found.problems.append(f"{type(error).__name__}: {error}")
        raise


def _recover(path: Path, expect: Expect, found: Found, *, exact: bool) -> dict[str, Any] | None:
    core, report = _opened(expect, path, found, exact=exact)
    try:
        if not report["has_point"]:
            if expect.acked is not None:
                found.problems.append(f"nothing was found, batch {expect.acked[0]} was promised")
            return None
        _compare(core, report, expect, found)
        return report
    finally:
        core.close(False)


def _compare(core: Any, report: dict[str, Any], expect: Expect, found: Found) -> None:
    say = found.problems.append
    committed, point, dense = (report[f"{n}_batch"] for n in ("committed", "resumed", "dense"))
    allowed = expect.committed()
    if committed not in allowed:
        say(f"committed batch {committed}, not one of {sorted(allowed)}")
        return
    if report["is_exact"]:
        is_fixed = expect.point is not None and expect.is_exact_point and expect.is_point_fixed
        if is_fixed and point != expect.point:
            say(f"exact point {point}, an earlier recovery announced {expect.point}")
        lag = 2 * expect.plan.dense_every - 1
        is_taken_back = expect.is_rewinding and point == expect.point
        if not is_taken_back and not committed - lag <= point <= committed:
            say(f"exact point {point} for committed batch {committed}")
    elif point != committed:
        say(f"latest point {point}, committed batch {committed}")
    _compare_record(report, expect, found)
    for index, shape in enumerate(expect.plan.shapes):
        weight, state = expect.states[point].rows[shape.name]
        if core.weight(index).tobytes() != weight:
            say(f"weights of '{shape.name}' are not those of batch {point}")
        if state and core.state(index).tobytes() != state:
            say(f"states of '{shape.name}' are not those of batch {point}")
    blob = core.dense_blob()
    batch = expect.aliases.get(dense, dense)
    wanted = dense_blob(expect.plan, expect.states[batch].source, batch)
    if blob is None or blob.tobytes() != wanted:
        say(f"the dense part is not that of batch {batch}")


def _compare_record(report: dict[str, Any], expect: Expect, found: Found) -> None:
    """The record is of the point's batch, and not older than the one that was promised."""
    record, point = json.loads(report["resume"]), report["resumed_batch"]
    source = expect.states[point].source
    if (record["batch"], record["source"]) != (point, source):
        found.problems.append(f"the record {record} is not that of batch {point}")
    if report["is_exact"] or expect.is_recovering or expect.acked is None:
        return
    promised, revision = expect.acked
    if point == promised and record["revision"] < revision:
        found.problems.append(f"the record is older than revision {revision}")


def _recover_again(path: Path, expect: Expect, found: Found, choose: random.Random) -> None:
    """I4: a second recovery finds the same point, whatever it is asked for, and changes nothing."""
    is_rebooted, exact = choose.random() < 0.5, choose.random() < 0.5
    core, report = _opened(expect, path, found, exact=exact, is_rebooted=is_rebooted)
    try:
        if report["resumed_batch"] != found.point or report["rows_changed"]:
            found.problems.append(
                f"a second recovery came to {report['resumed_batch']} and changed "
                f"{report['rows_changed']} rows, the first had come to {found.point}"
            )
            return
        assert found.point is not None
        rows = expect.states[found.point].rows
        for index, shape in enumerate(expect.plan.shapes):
            if core.weight(index).tobytes() != rows[shape.name][0]:
                found.problems.append("a second recovery changed weights")
    finally:
        core.close(False)


def _go_on(path: Path, expect: Expect, found: Found) -> None:
    """I5: training goes on to the same bits."""
    assert found.point is not None
    training = Training(expect.plan, str(path))
    training.histories = [expect.states]
    training.history = max(state.source for state in expect.states)
    training.core = expect.open(path, is_rebooted=False)
    training.core.recover(True)
    try:
        training.go_on(found.point, new_data=False)
    except REFUSALS as error:
        found.problems.append(f"{type(error).__name__}: {error}")
        training.core.close(False)
        return
    training.train(min(expect.plan.batches, found.point + 5))
    _compare_end(training, expect, found)


def _create_anew(path: Path, expect: Expect, found: Found) -> None:
    training = Training(expect.plan, str(path))
    training.create()
    training.train(2)
    _compare_end(training, expect, found)


def _compare_end(training: Training, expect: Expect, found: Found) -> None:
    assert training.trainer is not None
    for index, (name, (weight, _)) in enumerate(training.trainer.rows().items()):
        if training.core.weight(index).tobytes() != weight:
            found.problems.append(f"weights of '{name}' differ after going on")
    training.close(clean=False)
    core = expect.open(training.path)
    report = core.recover(False)
    if report["resumed_batch"] != training.batch:
        found.problems.append(f"batch {training.batch} was lost after going on")
    core.close(False)
