"""Kills a training again and again and compares what it leaves with one that was left alone.

The parent imports torch and never runs it: it forks one child a life, before the child has any
thread, so that a life costs milliseconds and not an import. A life dies at a random time or, by a
hook in the native core, at the k-th fence or named place of the protocol. The next life checks the
recovery point against the undisturbed run: rows and their state, dense part, optimizer, schedule,
random generators, position.
"""

import json
import logging
import mmap
import os
import random
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, replace
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, NoReturn

from trainingcxl import _core
from trainingcxl.errors import TrainingCXLError
from trainingcxl.pool import Pool, inspect, verify
from trainingcxl.torture_model import Life, Scenario, live
from trainingcxl.torture_power import (
    PowerCut,
    forget_versions,
    is_in_transaction,
    keep_version,
)
from trainingcxl.torture_tally import GROWTH_POINTS, Kill, Reference, Tally

__all__ = ["SCENARIOS", "Torture", "torture"]

SCENARIOS = (
    Scenario(name="every"),
    Scenario(name="third", dense_every=3, skip_every=5),
    Scenario(name="seventh-growing", dense_every=7, wide_batch=9),
    Scenario(name="latest", dense_every=7, resume="latest"),
    Scenario(name="accumulated", accumulate=3, dense_every=2),
    Scenario(name="rows-only-latest", dense_every=3, resume="latest", has_dense=False),
    Scenario(name="fused", undo_log="fused", dense_every=2, skip_every=5),
    Scenario(name="alternating", undo_log="alternating", dense_every=4, wide_batch=10),
    Scenario(name="relaxed", lookup="relaxed", dense_every=3, skip_every=5, wide_batch=9),
    Scenario(
        name="relaxed-latest",
        lookup="relaxed",
        undo_log="alternating",
        dense_every=5,
        resume="latest",
    ),
    Scenario(name="relaxed-accumulated", lookup="relaxed", accumulate=3, undo_log="fused"),
    Scenario(
        name="short-epochs", threads=1, skip_every=4, wide_batch=3, epochs=9, batches_per_epoch=4
    ),
)

# Named places of csrc/crash_point.h that any life comes to.
_POINTS = (
    "dense: slice",
    "commit: flag set",
    "update: rows",
    "update: handed over",
    "commit: rows stored",
    "recovery: row",
)
_JOURNAL_POINTS = (
    "journal: frames written",
    "journal: synced",
    "journal: slot",
    "data: sync",
    "data: synced",
)
_POINTS_OF_CREATION = 60
_LIFE_SECONDS_MAX = 60.0
_LIVES_MAX = 400  # of one run; more means that it makes no progress
_KILLS_PER_RUN = 40
_NO_BATCH = -1
_LAG_MAX = 16  # of Pool


def torture(
    folder: Path,
    *,
    seconds: float,
    seed: int,
    medium: Literal["auto", "fsdax", "block"],
    tally: Tally,
    has_power_cuts: bool = False,
    kills: int | None = None,
) -> "Iterator[Torture]":
    """Goes round all scenarios until the time is over, something differs, or there were so many
    kills; yields after each run.

    Pools of runs that ended well are removed.
    """
    deadline = time.monotonic() + seconds
    made: dict[str, Torture] = {}
    while True:
        for scenario in SCENARIOS:
            if time.monotonic() >= deadline and tally.runs > 0:
                return
            if kills is not None and tally.kills >= kills:
                return
            if scenario.name not in made:
                here = replace(scenario, medium=medium, has_power_cuts=has_power_cuts)
                made[scenario.name] = Torture(folder, here, seed=seed, tally=tally)
            rig = made[scenario.name]
            is_well = rig.run()
            if is_well:
                Pool.discard(rig.path)
            yield rig
            if not is_well:
                return


class _Shared:
    """Memory that outlives the child: the batch it acknowledged, and digests by batch."""

    _DIGEST_BYTES = 32
    _BATCHES_MAX = 500

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 16 + 2 * self._BATCHES_MAX * self._DIGEST_BYTES)
        # One store: struct.pack_into clears its target first, and a kill may come in between.
        self._number = memoryview(self._memory)[:8].cast("q")

    def forget_batch(self) -> None:
        self._number[0] = _NO_BATCH

    @property
    def batch(self) -> int:
        """Where the life stands; _NO_BATCH while it has not opened the pool."""
        return self._number[0]

    def put(self, batch: int, *digests: str, acknowledged: int | None = None) -> None:
        """Digests of a batch's rows and of the rest, or none; acknowledges it, or an older one."""
        for kind, digest in enumerate(digests):
            self._memory[self._place(kind, batch)] = digest.encode()
        self._number[0] = batch if acknowledged is None else acknowledged

    def digest(self, kind: int, batch: int) -> str:
        """Of the rows (0) or of the rest (1) after a batch; empty: unknown."""
        return self._memory[self._place(kind, batch)].rstrip(b"\0").decode()

    def forget_digests_after(self, batch: int) -> None:
        """The course of the training may be another one from here."""
        for kind in (0, 1):
            begin = self._place(kind, batch + 1).start
            end = self._place(kind, self._BATCHES_MAX - 1).stop
            self._memory[begin:end] = bytes(end - begin)

    def _place(self, kind: int, batch: int) -> slice:
        begin = 16 + (kind * self._BATCHES_MAX + batch) * self._DIGEST_BYTES
        return slice(begin, begin + self._DIGEST_BYTES)


class Torture:
    """One scenario in one folder.

    Args:
        folder: Where the pool is made; on the medium that is to be tested.
        scenario: The training.
        seed: Of the choice of kills.
        tally: Where to count; several scenarios may share one.
        spoil: Called in every life but the reference before it opens the pool. Tests break
            something there and see it found.

    Construct it in a process that has not yet used torch, a thread or a pool: it forks. The
    constructor trains once without a kill.

    Raises:
        TrainingCXLError: That training failed.
    """

    def __init__(
        self,
        folder: Path,
        scenario: Scenario,
        *,
        seed: int = 0,
        tally: Tally | None = None,
        spoil: Callable[[], None] | None = None,
    ) -> None:
        self.scenario = scenario
        self.path = str(folder / f"{scenario.name}.pool")
        self.tally = Tally() if tally is None else tally
        self._spoil = spoil
        self._random = random.Random(f"{scenario.name} {seed}")
        self._shared = _Shared()
        self._acknowledged = 0
        self._has_died_recovering = False
        self._was_cut = self._was_in_transaction = False
        self._cut = PowerCut(f"{scenario.name} {seed}") if scenario.has_power_cuts else None
        import_module("torch._dynamo")  # optimizers import it when first made: not in every life
        self.reference = self._leave_alone(str(folder / f"{scenario.name}.alone.pool"))

    # --- one run: from nothing to the end, over many lives ------------------------------------

    def run(self, plan: Iterable[Kill] | None = None) -> bool:
        """Trains from nothing to the end, killed as `plan` says; after the plan it is left alone.

        Without a plan kills are random. Differences go to `tally.mismatches`.

        Returns:
            Whether nothing differed.
        """
        Pool.discard(self.path)
        forget_versions(self.path)
        self._acknowledged = 0
        self._has_died_recovering = self._was_cut = False
        self._shared.forget_digests_after(_NO_BATCH)
        kills = iter(self.random_kills(_KILLS_PER_RUN) if plan is None else plan)
        for _ in range(_LIVES_MAX):
            self._shared.forget_batch()
            messages, has_ended = self._life(next(kills, None))
            self._judge(messages)
            self._advance(has_ended)
            if has_ended:
                self._judge_end(messages)
                self.tally.runs += 1
            if has_ended or self.tally.mismatches:
                return not self.tally.mismatches
        self._differ(f"no end after {_LIVES_MAX} lives")
        return False

    def random_kills(self, count: int) -> Iterator[Kill]:
        """Kills at random points, named places and times; each depends on how far the run is."""
        choose = self._random
        points, batches = self.reference.points, self.reference.committed
        for _ in range(count):
            if self._acknowledged == 0 and choose.random() < 0.5:
                yield Kill(countdown=choose.randint(1, _POINTS_OF_CREATION))
                continue
            # A life does more than it may have to do again, or the run would never end.
            reach = min(batches - self._acknowledged + 1, 2 * self.scenario.dense_every + 4)
            kill = Kill(countdown=choose.randint(1, sum(points.values()) * reach // batches))
            kind = choose.random()
            if 0 <= self.scenario.wide_batch - self._acknowledged < reach and choose.random() < 0.6:
                kill = Kill(countdown=1, point=choose.choice(GROWTH_POINTS))
            elif kind < 0.4:
                with_journal = self.scenario.medium == "block"
                name = choose.choice(_POINTS + with_journal * _JOURNAL_POINTS)
                passed = points.get(name, 100) * reach // batches
                kill = Kill(countdown=choose.randint(1, max(1, passed)), point=name)
            elif kind < 0.7:
                seconds = choose.random() * self.reference.seconds * reach / batches
                kill = Kill(seconds=seconds, after_opening=choose.random() < 0.8)
            elif kind < 0.75:
                kill = Kill(seconds=0.01 * choose.random(), after_opening=True, is_request=True)
            if self._has_own_course:  # undo frames of another course must never be taken
                kill = replace(kill, resume=choose.choice(("exact", "latest", "latest")))
            yield kill

    # --- one life -----------------------------------------------------------------------------

    def _life(self, kill: Kill | None) -> tuple[list[dict[str, Any]], bool]:
        """Forks a life and ends it as `kill` says; its messages, and whether it came to its end."""
        reader, writer = os.pipe()
        point_reader, point_writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(reader)
            os.close(point_reader)
            resume = (kill.resume if kill is not None else "") or self.scenario.resume
            scenario = replace(self.scenario, resume=resume, assumes_reboot=self._was_cut)

            def body() -> None:
                signal.signal(signal.SIGTERM, lambda *_: sys.exit())
                if kill is not None and kill.countdown > 0:
                    _core.kill_at_persist(kill.countdown, kill.point, point_writer)
                if self._spoil is not None:
                    self._spoil()
                live(self.path, scenario, self._watcher(writer))

            _run_child(body, writer)
        os.close(writer)
        os.close(point_writer)
        if kill is not None and kill.countdown == 0:
            self._kill_later(pid, kill, reader)
        messages = self._read_all(pid, reader)
        with os.fdopen(point_reader, "rb") as pipe:
            point = pipe.read().decode()
        _, status = os.waitpid(pid, 0)
        code = os.waitstatus_to_exitcode(status)
        self._note_end(code, point, messages)
        return messages, code == 0

    def _note_end(self, code: int, point: str, messages: list[dict[str, Any]]) -> None:
        """Counts how a life ended; a kill may stand for a power failure."""
        if messages:  # it had opened the pool, and recovered
            self._was_cut = False
        if code == -signal.SIGKILL:
            self.tally.count_kill(point, has_batch=self._acknowledged > 0)
            if self._cut is not None:
                self._was_in_transaction = is_in_transaction(self.path)
                self._cut.apply(self.path, point)
                self._was_cut = True
        elif code < 0:
            messages.append({"error": f"died of {signal.Signals(-code).name}"})
        elif code == _STOPPED:
            self.tally.requests += 1

    def _kill_later(self, pid: int, kill: Kill, reader: int) -> None:
        """Waits and kills; the child may have ended by itself before."""
        deadline = time.monotonic() + _LIFE_SECONDS_MAX
        while kill.after_opening and self._shared.batch == _NO_BATCH:
            has_spoken = bool(select.select([reader], [], [], 0.0005)[0])  # opened, or failed
            if has_spoken or time.monotonic() > deadline:
                break
        time.sleep(kill.seconds)
        os.kill(pid, signal.SIGTERM if kill.is_request else signal.SIGKILL)

    def _read_all(self, pid: int, reader: int) -> list[dict[str, Any]]:
        chunks: list[bytes] = []
        deadline = time.monotonic() + _LIFE_SECONDS_MAX
        while True:
            left = max(0.0, deadline - time.monotonic())
            if not select.select([reader], [], [], left)[0]:
                self._differ(f"a life hangs for {_LIFE_SECONDS_MAX:.0f} s")
                os.kill(pid, signal.SIGKILL)
            chunk = os.read(reader, 1 << 16)
            if not chunk:
                os.close(reader)
                lines = b"".join(chunks).splitlines(keepends=True)
                # A kill may cut the last line.
                return [json.loads(line) for line in lines if line.endswith(b"\n")]
            chunks.append(chunk)

    def _watcher(self, writer: int) -> Callable[[str, Life], None]:
        """What a life reports, in the child."""

        def watch(what: str, life: Life) -> None:
            batch = life.pool.committed_batch
            if self._cut is not None and what != "end":
                keep_version(self.path, life.pool, starts_anew=what == "start")
            if what == "start":
                report = None if life.pool.recovery is None else asdict(life.pool.recovery)
                tables, rest = life.tables_digest(), life.rest_digest()
                known = [self._shared.digest(kind, batch) for kind in (0, 1)]
                _send(writer, at="start", recovery=report, tables=tables, rest=rest, known=known)
                self._shared.forget_digests_after(batch)
                self._shared.put(batch, tables, rest)
            elif what == "commit":
                own = self._has_own_course
                digests = (life.tables_digest(), life.rest_digest()) if own else ()
                lost = self._cut is not None  # what is not durable may be gone
                durable = life.pool.durable_batch if lost else None
                self._shared.put(batch, *digests, acknowledged=durable)
            else:
                _send(writer, at="end", batch=batch, digest=life.pool.digest())

        return watch

    @property
    def _has_own_course(self) -> bool:
        """Whether rows depend on the kills: resume "latest" goes on with an older dense part."""
        return self.scenario.resume == "latest" and self.scenario.has_dense

    # --- judging ------------------------------------------------------------------------------

    def _differ(self, what: str) -> None:
        self.tally.mismatches.append(f"{self.scenario.name}: {what}")

    def _advance(self, has_ended: bool) -> None:
        """Takes note of what the life that has just ended acknowledged."""
        batch = self._shared.batch
        if batch != _NO_BATCH:
            self._acknowledged, self._has_died_recovering = batch, False
        elif not has_ended and self._acknowledged > 0:
            self._has_died_recovering = True
            self.tally.kills_in_recovery += 1
        elif not has_ended:
            self.tally.kills_in_creation += 1

    def _judge(self, messages: list[dict[str, Any]]) -> None:
        """Checks what a life found when it opened the pool."""
        for message in messages:
            if "error" in message:
                self._differ(message["error"])
        found = next((message for message in messages if message.get("at") == "start"), None)
        if found is None:
            return
        report, acknowledged = found["recovery"], self._acknowledged
        if report is None:
            if acknowledged > 0:
                self._differ(f"batch {acknowledged} was acknowledged, the pool is found empty")
            return
        slack = _LAG_MAX if self._cut is not None else 0
        lag_max = 2 * self.scenario.dense_every - 1 + slack
        committed, resumed = report["committed_batch"], report["resumed_batch"]
        # A recovery that was killed may have gone back to the dense part's batch already.
        lowest = acknowledged - (lag_max + 1 if self._has_died_recovering else 0)
        if not lowest <= committed <= acknowledged + 1 + slack:
            self._differ(f"batch {acknowledged} was acknowledged, {committed} is found")
        if not committed - lag_max <= report["dense_batch"] <= committed:
            self._differ(f"batch {committed} has a dense part of batch {report['dense_batch']}")
        if resumed != (committed if report["resume"] == "latest" else report["dense_batch"]):
            self._differ(f"resumed at {resumed} of {report}")
        self.tally.count_recovery(report, was_in_transaction=self._was_in_transaction)
        self._was_in_transaction = False
        self._compare_point(found, resumed)

    def _compare_point(self, found: dict[str, Any], resumed: int) -> None:
        for kind, what in enumerate(("tables", "rest")):
            if not self._has_own_course:
                expected = getattr(self.reference, what).get(resumed)
            elif kind == 1 and (
                found["recovery"]["dense_batch"] < resumed or self._has_died_recovering
            ):
                continue  # an older dense part, as it should be
            else:
                expected = found["known"][kind] or found[what]
            if found[what] != expected:
                self._differ(f"{what} at batch {resumed} are not those of the training so far")

    def _judge_end(self, messages: list[dict[str, Any]]) -> None:
        end = next((message for message in messages if message.get("at") == "end"), None)
        alone = self.reference
        if end is None:
            self._differ("a life ended without an end")
            return
        if end["batch"] != alone.committed:
            self._differ(f"ended at batch {end['batch']}, the run left alone at {alone.committed}")
        if end["digest"] != alone.digest and not self._has_own_course:
            self._differ("the end differs from the run that was left alone")
        if not inspect(self.path)["finished"]:
            self._differ("the end is not recorded")
        for damage in verify(self.path):
            self._differ(f"verify: {damage}")

    # --- the run that is left alone -----------------------------------------------------------

    def _leave_alone(self, path: str) -> Reference:
        Pool.discard(path)
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            _run_child(lambda: _watch_all(path, self.scenario, writer), writer)
        os.close(writer)
        messages = self._read_all(pid, reader)
        os.waitpid(pid, 0)
        Pool.discard(path)
        message: dict[str, Any] = messages[0] if messages else {"error": "it said nothing"}
        if "error" in message:
            raise TrainingCXLError(f"the undisturbed training failed: {message['error']}")
        for name in ("tables", "rest"):
            message[name] = {int(batch): digest for batch, digest in message[name].items()}
        return Reference(**message)


_STOPPED = 143  # the shell's code for an end on SIGTERM


def _run_child(body: Callable[[], None], writer: int) -> NoReturn:
    """Runs a life and leaves without any clean-up of the parent's."""
    code = 1
    try:
        logging.getLogger("trainingcxl").setLevel(logging.CRITICAL)
        body()
        code = 0
    except SystemExit:
        code = _STOPPED
    except BaseException:
        _send(writer, error=traceback.format_exc())
    finally:
        os._exit(code)


def _watch_all(path: str, scenario: Scenario, writer: int) -> None:
    tables: dict[int, str] = {}
    rest: dict[int, str] = {}
    started = time.perf_counter()
    _core.kill_at_persist(0)  # only counts

    def watch(what: str, life: Life) -> None:
        batch = life.pool.committed_batch
        if what != "end":
            tables[batch], rest[batch] = life.tables_digest(), life.rest_digest()
            return
        seconds = time.perf_counter() - started
        points = _core.crash_points_passed()
        digest = life.pool.digest()
        _send(
            writer, tables=tables, rest=rest, digest=digest, committed=batch, seconds=seconds,
            points=points,
        )  # fmt: skip

    live(path, scenario, watch)


def _send(writer: int, **message: Any) -> None:
    data = json.dumps(message).encode() + b"\n"
    while data:
        data = data[os.write(writer, data) :]
