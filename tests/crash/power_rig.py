"""Follows a record, stops at every moment that matters, and recovers the states that a power
failure could leave there; also inside recoveries, and after kills that a power failure follows.
"""

import json
import random
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from power_block import BlockMedium
from power_check import NO_DAMAGE, REFUSALS, Expect, Found, Scratch, check
from power_medium import (
    FENCE,
    FLUSH,
    FOLDER,
    IN_FLIGHT,
    MARK,
    PAGE_WORDS,
    SIZE,
    STORE,
    SYNC_BEGIN,
    SYNC_END,
    Image,
    Kinds,
    Medium,
)  # fmt: skip
from power_shadow import Shadow
from power_trace import Plan, Recorded, Trace, record, recording

__all__ = ["Rig", "Tally", "apply"]

_LEAST = 4  # images of a moment
_NESTED_EVERY = 60  # images; then power fails in a recovery
# Share of the moments at which the process is killed before the power fails. A slot that is only in
# the cache is what a recovery must not build on.
_KILLS, _KILLS_AT_SLOT = 0.04, 0.5
_RECORD_PAGES = 18
_HEAD_PAGES = 48  # up to the second resume record
_HEAD_WORDS = (4 << 20) // 8
_KILLS_BLOCK = 0.12  # there, every slot of the log is in the cache alone


@dataclass
class Tally:
    """What was tried, and what went wrong."""

    keys: set[int] = field(default_factory=set)
    in_flight: set[int] = field(default_factory=set)
    """Images of moments at which rows, frames or slots were not yet durable (of the journal, on a
    file)."""
    undone: int = 0
    """Images whose recovery took something back."""
    in_recovery: int = 0
    """Images of moments within a recovery."""
    problems: list[str] = field(default_factory=list)


class Rig:
    """One plan, recorded once.

    Args:
        plan: What to train.
        folder: A folder on tmpfs for the pools; emptied.
        mode: "tso" or "weak", "block" for plans on that medium.
        seed: Of all choices.
        images: How many to recover, about.
        problems_max: Stop after so many.
        only_damage: Leave out problems that begin with NO_DAMAGE.
        trace: A record of the plan, of another mode say; else it is recorded.
    """

    def __init__(
        self,
        plan: Plan,
        folder: Path,
        *,
        mode: str,
        seed: int,
        images: int,
        problems_max: int = 3,
        only_damage: bool = False,
        trace: Trace | None = None,
    ) -> None:
        self.folder, self.mode, self.images, self.problems_max = folder, mode, images, problems_max
        self._only_damage = only_damage
        shutil.rmtree(folder, ignore_errors=True)
        (folder / "origin").mkdir(parents=True)
        self.choose = random.Random(seed)
        self.trace = trace or record(plan, folder / "origin")
        shutil.rmtree(folder / "origin")
        self._is_block = mode == "block"
        self._in_flight = BlockMedium.IN_FLIGHT if self._is_block else IN_FLIGHT
        self._pages = [_pages_of(self.trace, number) for number in range(len(plan.files))]
        self.tally = Tally()
        self._tried: set[tuple[int, Any]] = set()
        self._scratches: dict[str, Scratch] = {}
        self._since_nested = 0
        self._moments = 1.0  # share of them that is tried

    def run(self) -> Tally:
        medium = self._medium([None for _ in self.trace.plan.files])
        expect = Expect(self.trace.plan, self.trace.histories)
        events = self.trace.events
        stops = (SYNC_END, MARK) if self._is_block else (FENCE, SYNC_END, MARK)
        moments = int(np.isin(events["kind"], stops).sum())
        per_moment = self.images / moments
        self._moments = min(1.0, per_moment / _LEAST)
        shadow = Shadow(self.trace.plan)
        count = max(_LEAST, round(per_moment))
        self._explore(self.trace, medium, expect, count, shadow, is_nested=False)
        return self.tally

    def _medium(self, contents: list[bytes | None]) -> Medium:
        return BlockMedium(contents) if self._is_block else Medium(contents)

    def _scratch(self, folder: str, medium: Medium) -> Scratch:
        scratch = self._scratches.get(folder)
        if scratch is None:
            scratch = Scratch(self.folder / folder, self._pages, self.trace.plan.files)
            self._scratches[folder] = scratch
        scratch.begin(medium)
        return scratch

    @property
    def is_over(self) -> bool:
        return len(self.tally.problems) >= self.problems_max

    def _explore(
        self,
        trace: Trace,
        medium: Medium,
        expect: Expect,
        per_moment: int,
        shadow: Shadow | None,
        *,
        is_nested: bool,
    ) -> None:
        scratch = self._scratch("nested" if is_nested else "images", medium)
        kinds = Kinds()
        for event, mark, following in _with_marks(trace):
            if self.is_over:
                return
            is_moment = event["kind"] in (FENCE, SYNC_END)
            if is_moment and (event["kind"] != FENCE or medium.would_change(int(event["thread"]))):
                self._try_all(scratch, medium, expect, kinds, per_moment, is_nested=is_nested)
            if shadow is not None and event["kind"] == STORE:
                self._note(shadow.stored(trace, event))
            apply(trace, medium, event)
            if mark is None:
                continue
            expect.note(mark, following, is_all_durable=not medium.pending)
            kinds.learn(medium.files[0].memory)
            if shadow is not None:
                self._note(shadow.noted(mark, medium, kinds))
            self._try_all(scratch, medium, expect, kinds, per_moment, is_nested=is_nested)
        self._note(NO_DAMAGE + stray for stray in scratch.stray)
        scratch.stray = []

    def _note(self, problems: Iterable[str]) -> None:
        for problem in problems:
            if not (self._only_damage and problem.startswith(NO_DAMAGE)):
                self.tally.problems.append(problem)

    # --- one moment

    def _try_all(
        self,
        scratch: Scratch,
        medium: Medium,
        expect: Expect,
        kinds: Kinds,
        count: int,
        *,
        is_nested: bool,
    ) -> None:
        scratch.follow()
        pending = {kinds.of(f, g * medium.granule_words * 8) for f, g in medium.pending}
        # On a file a rewind is decided, and a dense generation completed, by few syncs: none is
        # left out.
        is_deciding = expect.is_rewinding and self._is_block
        is_completing = "dense header" in pending and self._is_block
        is_left_out = self.choose.random() > self._moments
        if is_left_out and not (is_nested or is_deciding or is_completing):
            return
        for image in medium.images(self.mode, count, self.choose, kinds):
            mark = image.key, expect.acked, expect.started, expect.point
            if mark in self._tried:
                continue
            self._tried.add(mark)
            self.tally.keys.add(image.key)
            if pending & self._in_flight:
                self.tally.in_flight.add(image.key)
            self.tally.in_recovery += is_nested
            found = self._try(scratch, image, expect)
            self.tally.undone += found.has_undone
            where = f"{self.trace.plan.name}, acked {expect.acked}, pending {sorted(pending)}"
            self._note(f"{problem} [{where}]" for problem in found.problems)
            if self.is_over:
                return
            self._since_nested += 1
            # A slot without its record: what the recovery stores may complete it.
            is_telling = is_deciding and image.alone == "slot"
            if (
                not is_nested
                and found.has_undone
                and (is_telling or self._since_nested >= _NESTED_EVERY)
            ):
                self._since_nested = 0
                self._crash_in_recovery(medium, image, expect)
        share = _KILLS_BLOCK if self._is_block else _KILLS
        if expect.is_recovering or ("slot" in pending and not self._is_block):
            share = _KILLS_AT_SLOT
        if not is_nested and (is_completing or self.choose.random() < share):
            self._kill_then_cut(medium, expect)

    def _try(self, scratch: Scratch, image: Image, expect: Expect) -> Found:
        scratch.put(image)
        goes_on = self.choose.random() < 0.04
        found = check(scratch.path, expect, self.choose, goes_on=goes_on)
        scratch.restore(was_trained=goes_on)
        return found

    # --- crashes in recovery

    def _crash_in_recovery(self, medium: Medium, image: Image, expect: Expect) -> None:
        """Power fails, the image is recovered, power fails again."""
        self._recover_recorded(medium.after(image), expect, is_rebooted=True)

    def _kill_then_cut(self, medium: Medium, expect: Expect) -> None:
        """The process is killed, a recovery builds on what was only in the cache, power fails."""
        if expect.acked is not None:
            killed = medium.copy()
            killed.forget_flushes()
            self._recover_recorded(killed, expect, is_rebooted=False)

    def _recover_recorded(self, medium: Medium, expect: Expect, *, is_rebooted: bool) -> None:
        scratch = self._scratch("recovered", medium)
        scratch.put(medium.everything())
        exact = self.choose.random() < 0.6
        found: dict[str, Any] = {}
        with recording(expect.plan, scratch.path) as recorded:
            try:
                core = expect.open(scratch.path, is_rebooted=is_rebooted)
                found = core.recover(exact)
                core.close(False)
            except Exception as error:
                kind = "" if isinstance(error, REFUSALS) else NO_DAMAGE
                self._note([f"{kind}{type(error).__name__}: {error} [recovery after a kill]"])
                return
        if not found["has_point"]:
            return
        trace = Trace(self.trace.plan, *recorded[0], self.trace.histories, 0, 0)
        names = ("resumed_batch", "dense_batch", "is_exact")
        expect = expect.copy()
        expect.recovering({name: found[name] for name in names}, is_all_durable=not medium.pending)
        self._explore(trace, medium, expect, 10, None, is_nested=True)
        expect.recovered()
        scratch = self._scratch("nested", medium)
        kinds = Kinds()
        kinds.learn(medium.files[0].memory)
        self._try_all(scratch, medium, expect, kinds, 16, is_nested=True)


def _pages_of(trace: Trace, number: int) -> set[int]:
    """Pages of a file that a recovery may store into."""
    pages = set(range(_HEAD_PAGES)) if number == 0 else set()
    words = np.zeros(_HEAD_WORDS, np.uint64)
    for event in trace.events[(trace.events["kind"] == STORE) & (trace.events["file"] == number)]:
        part = slice(int(event["first"]), int(event["first"]) + int(event["words"]))
        places = trace.places[part]
        pages.update((places // PAGE_WORDS).tolist())
        in_head = places < _HEAD_WORDS
        words[places[in_head]] = trace.values[part][in_head]
    if number == 0:  # a generation that a recovery rewrites has another place, and a longer record
        further = _RECORD_PAGES + 1 + trace.plan.blob_bytes // 4096
        for area in _dense_areas(words):
            pages.update(range(area, area + further))
    return pages


def _dense_areas(head: np.ndarray) -> set[int]:
    """Their first pages (docs/format.md, "Geometry")."""
    offsets = [head[at + 8 : at + 24].tolist() for at in ((1 << 20) // 8, (2 << 20) // 8)]
    return {offset // 4096 for some in offsets for offset in some if offset}


def _with_marks(
    trace: Trace,
) -> Iterator[tuple[np.void, dict[str, Any] | None, dict[str, Any] | None]]:
    """Events; for marks what they say, and what the next one says."""
    marks = [json.loads(trace.names[e["name"]]) for e in trace.events if e["kind"] == MARK]
    number = 0
    for event in trace.events:
        if event["kind"] != MARK:
            yield event, None, None
            continue
        number += 1
        yield event, marks[number - 1], marks[number] if number < len(marks) else None


def apply(trace: Trace | Recorded, medium: Medium, event: np.void) -> None:
    """The medium follows the record by one event."""
    _, thread, file, name, offset, num_bytes, first, words = event.tolist()
    match event["kind"]:
        case kind if kind == STORE:
            part = slice(first, first + words)
            medium.store(file, trace.places[part], trace.values[part])
        case kind if kind == FLUSH:
            medium.flush(thread, file, offset, num_bytes)
        case kind if kind == FENCE:
            medium.fence(thread)
        case kind if kind == SIZE:
            medium.resize(file, num_bytes)
        case kind if kind == SYNC_BEGIN:
            medium.sync_begin(thread, file, offset, num_bytes)
        case kind if kind == SYNC_END:
            medium.sync_end(thread, file)
        case kind if kind == FOLDER:
            medium.folder(is_pool=trace.names[name].endswith("/pool"))
