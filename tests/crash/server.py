"""Forks lives for the tests: reads [function, arguments] lines, answers with JSON lines.

Nothing here may run torch, open a pool or start a thread before it forks.
"""

import ctypes
import hashlib
import json
import os
import resource
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import numpy_trainer
from rewind_kills import rewinds_killed  # noqa: F401 - asked for by name

from trainingcxl.checkpoint import FaultTolerantRun
from trainingcxl.errors import PoolCorrupted, PoolFull, PoolLocked
from trainingcxl.pool import Pool, TableSpec, verify
from trainingcxl.torture import SCENARIOS, Torture
from trainingcxl.torture_model import Life, Scenario, live
from trainingcxl.torture_tally import Kill, Tally

_PR_SET_PDEATHSIG = 1


# --- the rig


def random_kills(folder: str, medium: str, kills: int, seed: int) -> dict[str, Any]:
    """Every scenario once, each with at most `kills` random kills."""
    tally = Tally()
    for scenario in SCENARIOS:
        rig = Torture(Path(folder), replace(scenario, medium=medium), seed=seed, tally=tally)
        rig.run(rig.random_kills(kills))
    return {**tally.summary(), "differences": tally.mismatches}


def power_cuts(folder: str, kills: int, seed: int) -> dict[str, Any]:
    """Every scenario once at level power on a file; each kill takes what was not synced along."""
    tally = Tally()
    for scenario in SCENARIOS:
        here = replace(scenario, medium="block", has_power_cuts=True)
        rig = Torture(Path(folder), here, seed=seed, tally=tally)
        rig.run(rig.random_kills(kills))
    return {
        **tally.summary(),
        "differences": tally.mismatches,
        "died_at": dict(tally.died_at),
    }


def planned_kills(
    folder: str, scenario: dict[str, Any], plans: list[list[dict[str, Any]]], spoil: str = ""
) -> dict[str, Any]:
    """One run for each plan."""
    rig = Torture(
        Path(folder),
        Scenario(name="planned", **scenario),
        spoil=_SPOILERS[spoil] if spoil else None,
    )
    for plan in plans:
        rig.run([Kill(**kill) for kill in plan])
    summary = rig.tally.summary()
    return {
        **summary,
        "differences": rig.tally.mismatches,
        "died_at": dict(rig.tally.died_at),
        "batches_found": sorted(rig.tally.batches_found),
        "points": rig.reference.points,
    }


def spoiled(folder: str, spoil: str, kills: int) -> dict[str, Any]:
    """Random kills of a training in which something is broken on purpose."""
    scenario = replace(SCENARIOS[1], name="spoiled")
    rig = Torture(Path(folder), scenario, seed=1, spoil=_SPOILERS[spoil])
    while rig.tally.kills < kills and not rig.tally.mismatches:
        rig.run()
    return {"kills": rig.tally.kills, "differences": rig.tally.mismatches}


def interrupted_skip(folder: str) -> list[str]:
    """One life is asked to end in the middle of skipping a batch; the next goes on."""
    marker = Path(folder, "interrupted")

    def interrupt_once() -> None:
        commit = FaultTolerantRun._commit_prepared

        def interrupt(run: FaultTolerantRun, **options: Any) -> None:
            if run.committed_batch == 4 and not marker.exists():  # batch 5 is skipped
                marker.touch()
                sys.exit()
            commit(run, **options)

        FaultTolerantRun._commit_prepared = interrupt

    scenario = Scenario(name="skip", skip_every=5, dense_every=3, epochs=1)
    rig = Torture(Path(folder), scenario, spoil=interrupt_once)
    rig.run([])
    return rig.tally.mismatches if rig.tally.requests == 1 else ["it was not interrupted"]


def _without_log() -> None:
    init = Pool.__init__
    Pool.__init__ = lambda self, *path, **options: init(self, *path, **options, _log=False)


def _without_generators() -> None:
    from trainingcxl import checkpoint

    checkpoint.set_rng_state = lambda state: None


def _one_batch_twice() -> None:
    from trainingcxl.torture_model import SmallBatches

    seek = SmallBatches.seek
    SmallBatches.seek = lambda self, epoch, batch: seek(self, epoch, max(0, batch - 1))


def _generation_of_live_tensors() -> None:
    """The dense part is captured a little off, as if its slices were read during the next step."""
    from trainingcxl.dense_part import DensePart

    capture = DensePart.capture

    def late(dense: Any, record: bytes) -> None:
        parameters = [p for p in dense.model.parameters() if p.numel()]
        for parameter in parameters:
            parameter.data.add_(1e-6)
        capture(dense, record)
        for parameter in parameters:
            parameter.data.sub_(1e-6)

    DensePart.capture = late


_SPOILERS: dict[str, Callable[[], None]] = {
    "no log": _without_log,
    "random generators not restored": _without_generators,
    "a batch trained twice": _one_batch_twice,
    "dense part of another moment": _generation_of_live_tensors,
}


# --- the independent oracle


def numpy_oracle(folder: str, medium: str, kills: int, seed: int) -> dict[str, Any]:
    """Kills a training of rows alone and compares each point with a trainer written in NumPy."""
    return numpy_trainer.torture(Path(folder), medium, kills, seed)


# --- two trainers


def race(folder: str, rounds: int) -> list[list[str]]:
    """Two lives begin at once on a pool that does not exist; how each ended."""
    scenario = Scenario(name="race", epochs=1, batches_per_epoch=4)
    results = []
    for i in range(rounds):
        path = f"{folder}/race{i}.pool"
        start = time.monotonic() + 0.05

        def contend(path: str = path, start: float = start) -> str:
            time.sleep(max(0.0, start - time.monotonic()))
            try:
                live(path, scenario, lambda what, life: None)
            except PoolLocked as error:
                return f"locked: {error}"
            return "trained"

        pids = [fork(contend) for _ in range(2)]
        results.append([join(*pid) for pid in pids] + [str(len(verify(path)))])
    return results


def lock_of_killed(folder: str) -> dict[str, Any]:
    """A second trainer is refused while the first lives, and let in once it is killed."""
    path = f"{folder}/lock.pool"
    scenario = Scenario(name="lock", epochs=50)
    pid, reader = fork(lambda: live(path, scenario, lambda what, life: None) or "")
    while not Path(path, "log").exists() or _core_slot(path) < 3:
        time.sleep(0.01)
    second = join(*fork(lambda: _try_open(path)))
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    os.close(reader)
    third = join(*fork(lambda: _try_open(path)))
    return {"pid": pid, "second": second, "third": third}


def _core_slot(path: str) -> int:
    from trainingcxl.pool import inspect

    try:
        return inspect(path)["committed_batch"] or 0
    except Exception:
        return 0


def _try_open(path: str) -> str:
    try:
        with Pool(path) as pool:
            return f"opened at {pool.committed_batch}"
    except PoolLocked as error:
        return str(error)


# --- full disks, torn and damaged logs


def creation_without_room(folder: str) -> dict[str, Any]:
    """Creates a pool of 20 MB where files may have 10 MB."""
    path = f"{folder}/full.pool"

    def create() -> str:
        _limit_files(10 << 20)
        pool = Pool(path)
        spec = TableSpec(
            name="t", num_embeddings=80_000, embedding_dim=64, optimizer="sgd", init_scale=0.1,
            init_seed=0,
        )  # fmt: skip
        try:
            pool.create_tables([spec])
        except PoolFull as error:
            return str(error)
        return "created"

    return {"error": join(*fork(create)), "left": sorted(p.name for p in Path(path).glob("*"))}


def growth_without_room(folder: str) -> dict[str, Any]:
    """The log must grow in the middle of training and cannot; then it can."""
    path = f"{folder}/grow.pool"
    scenario = Scenario(name="grow", epochs=1, batches_per_epoch=12, wide_batch=5)

    def train() -> str:
        batches = []

        def watch(what: str, life: Life) -> None:
            if what == "start":
                _limit_files(max(f.stat().st_size for f in Path(path).iterdir()) + (6 << 20))
            batches.append(life.pool.committed_batch)

        try:
            live(path, scenario, watch)
        except PoolFull as error:
            return f"{batches[-1]} {error}"
        return "trained"

    error = join(*fork(train))
    rig = Torture(Path(folder), scenario)
    digests = {}

    def go_on() -> str:
        def watch(what: str, life: Life) -> None:
            if what == "start":
                at = life.pool.committed_batch
                digests["same"] = rig.reference.tables[at] == life.tables_digest()
            if what == "end":
                digests["end"] = life.pool.digest() == rig.reference.digest

        live(path, scenario, watch)
        return json.dumps(digests)

    return {"error": error, "after": json.loads(join(*fork(go_on)))}


def damaged(folder: str) -> list[dict[str, Any]]:
    """Kills a commit half-way, then damages copies of the log; what opening each copy says."""
    scenario = Scenario(name="damaged", epochs=1, batches_per_epoch=8)
    rig = Torture(Path(folder), scenario)
    origin = Path(folder, "origin.pool")
    rig.path = str(origin)
    rig._life(Kill(countdown=17, point="update: handed over"))
    head = (origin / "log").read_bytes()
    batch = 1 + _core_slot(str(origin))
    flag = int.from_bytes(head[_DIRECTORY + 64 * batch + 24 :][:8], "little")  # the frame's offset
    frame_bytes = int.from_bytes(head[_DIRECTORY + 64 * batch + 32 :][:8], "little")
    results = []
    for name, change in {
        "untouched": lambda log: None,
        "tail of the file zeroed": lambda log: _zero(log, len(head) - 4096, 4096),
        "one byte of a record": lambda log: _flip(log, flag + frame_bytes - 200),
        "frame zeroed": lambda log: _zero(log, flag, frame_bytes),
        "last byte cut off": lambda log: os.truncate(log, len(head) - 1),
        "newest slot": partial(_flip_newest_slot),
    }.items():
        copy = Path(folder, "copy.pool")
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(origin, copy)
        change(copy / "log")
        before = _hash(copy)
        said = join(*fork(partial(_open_and_hash, str(copy))))
        results.append(
            {
                "what": name,
                "said": said,
                "unchanged": before == _hash(copy),
                "reference": [rig.reference.tables[batch - 1], rig.reference.tables[batch - 2]],
                "found": len(verify(str(copy))) if said.startswith("refused") else 0,
            }
        )
    return results


_DIRECTORY = 256 << 10  # docs/format.md
_SLOTS = (12288, 16384)


def _flip_newest_slot(log: Path) -> None:
    data = log.read_bytes()
    newest = max(_SLOTS, key=lambda at: int.from_bytes(data[at + 8 : at + 16], "little"))
    _flip(log, newest + 20)


def _flip(log: Path, at: int) -> None:
    with log.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 0x10]))


def _zero(log: Path, at: int, count: int) -> None:
    with log.open("r+b") as file:
        file.seek(at)
        file.write(bytes(count))


def _hash(folder: Path) -> str:
    return hashlib.sha256(
        b"".join((folder / name).read_bytes() for name in ("data", "log"))
    ).hexdigest()


def _open_and_hash(path: str) -> str:
    try:
        with Pool(path) as pool:
            digest = hashlib.blake2b(digest_size=16)
            for name, table in sorted(pool.tables.items()):
                digest.update(name.encode() + table.weight.tobytes() + table.state.tobytes())
            return digest.hexdigest()
    except PoolCorrupted as error:
        return f"refused: {error}"


# --- processes


def _limit_files(num_bytes: int) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, num_bytes))


def fork(body: Callable[[], str]) -> tuple[int, int]:
    reader, writer = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writer)
        return pid, reader
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # never outlive the tests
        os.write(writer, body().encode())
    except BaseException:
        os.write(writer, traceback.format_exc().encode())
    finally:
        os._exit(0)


def join(pid: int, reader: int) -> str:
    with os.fdopen(reader) as pipe:
        said = pipe.read()
    os.waitpid(pid, 0)
    return said


def serve(functions: Mapping[str, Any]) -> None:
    """Answers until the tests have ended."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what lives print is no answer
    import_module("torch._dynamo")  # optimizers import it when first made: not in every life
    for line in sys.stdin:
        name, arguments = json.loads(line)
        try:
            answer = {"result": functions[name](**arguments)}
        except BaseException:
            answer = {"error": traceback.format_exc()}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    serve(globals())
