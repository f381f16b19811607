"""Power failures, tried: `python tests/crash/crash_images.py` (or `make crash-images`).

Small trainings in the code for persistent memory (modes tso, weak) and for ordinary files (block)
are recorded; from each record the states that a power failure could leave are made and recovered
(power_rig.py). Prints one JSON line for each mode,
and one for the mutants where the build with faults is given (tools/fault_build.sh): each fault of
csrc/fault.h must be found, and the same build without one must pass between and after them. Exits 1
if anything is bad.
"""

import argparse
import importlib.machinery
import importlib.util
import json
import os
import re
import select
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

_FAULT_LIST = Path(__file__).parents[2] / "csrc" / "fault.h"
_SECONDS_MAX = 900  # of one child
_SHOWN = 20  # problems
# Per mode. Recoveries that are recorded, too, bring about more, in files most of all, where no
# moment at which a generation is completed is left out: about 41,000 distinct ones on persistent
# memory, 11,000 in files.
IMAGES = {"tso": 27_000, "weak": 27_000, "block": 700}
_BLOCK_CONTROL = 5  # part of the images of a control
# A fault is looked for in these, in this order ...
_MUTANT_PLANS = ("background", "fused", "relive", "relive fused", "alternating", "workers",
                 "workers fused", "rewind")  # fmt: skip
_BLOCK_PLANS = ("journal", "lag", "relived", "checkpoint", "same rows", "grown", "lag fused",
                "rewound", "behind base", "slow dense",
                "lag far")  # fmt: skip
# ... and first in the one that is known to show it, where that is another.
_SHOWN_BY = {
    "NoRowFence": "workers",
    "ReclaimEarly": "relive fused",
    "RelaxedReclaimEarly": "relaxed fused",
    "RecoveryWithoutEvidence": "relive",
    "RecoveryStaysClean": "closed",
    "JournalNoReannounce": "lag",
    "JournalNoPreviousWait": "lag",
    "JournalDenseOverNeeded": "lag",
    "JournalDenseAhead": "lag far",
    "JournalNoGrowSync": "grown",
    "JournalReleaseFirst": "grown",
    "JournalCutBeforeTables": "checkpoint",
    "JournalCutBeforeDense": "slow dense",
    "JournalDenseRewrittenEarly": "lag far",
    "JournalRingOverrun": "full ring",
    "JournalPreviousAlways": "slow dense",
    "JournalNoIdInCrc": "same rows",
    "JournalNoLife": "same rows",
    "RewindWithoutEvidence": "rewind",
    "RewindRowsNotPersisted": "rewind",
    "RewindNotGoneOnWith": "rewind",
    "RewindCutsFirst": "rewind",
    "DenseOverResumed": "rewind",
    "JournalRewindEvidenceLate": "rewound",
    "JournalRewindSlotLate": "behind base",
    "JournalRewindResumeLate": "behind base",
    "JournalRewindRowsLate": "behind base",
    "JournalRewindIgnored": "behind base",
}
_BLOCK_FAULT = "Journal"  # so begin the names of the journal's


def use_core(path: Path) -> None:
    """Makes the build at `path` the package's native core, before anything imports it."""
    name = "trainingcxl._core"
    loader = importlib.machinery.ExtensionFileLoader(name, str(path))
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    loader.exec_module(module)


def faults() -> list[str]:
    """Names of the faults, in the order of csrc/fault.h; the first is none."""
    return re.findall(r"^  k(\w+),$", _FAULT_LIST.read_text(), re.MULTILINE)[:-1]


def in_children(
    jobs: list[Callable[[], dict[str, Any]]], width: int, *, seconds_max: int = _SECONDS_MAX
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Runs each job in a forked child; yields its number and what it returned, or as "failed" what
    it died of.
    """
    running: dict[int, tuple[int, int]] = {}  # by the end of the pipe that a child answers through
    waiting = list(enumerate(jobs))
    while waiting or running:
        while waiting and len(running) < width:
            number, job = waiting.pop(0)
            reader, writer = os.pipe()
            pid = os.fork()
            if pid == 0:
                _answer(job, writer, seconds_max)
            os.close(writer)
            running[reader] = number, pid
        for reader in select.select(list(running), [], [])[0]:
            number, pid = running.pop(reader)
            with os.fdopen(reader) as pipe:
                said = pipe.read()
            _, status = os.waitpid(pid, 0)  # of this one: the caller may have children of its own
            yield number, json.loads(said) if said else {"failed": f"died with status {status}"}


def _answer(job: Callable[[], dict[str, Any]], writer: int, seconds_max: int) -> None:
    try:
        signal.alarm(seconds_max)
        answer = job()
    except BaseException:
        answer = {"failed": traceback.format_exc()}
    with os.fdopen(writer, "w") as pipe:
        json.dump(answer, pipe)
    os._exit(0)


def run_plan(
    name: str,
    mode: str,
    images: int,
    seed: int,
    problems_max: int = 5,
    *,
    only_damage: bool = False,
    traces: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """One plan in one mode; its record is taken from `traces`, or put there."""
    from power_plans import BLOCK_TRACES, TRACES
    from power_rig import Rig

    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="tcxl-images-") as folder:
        rig = Rig(
            (BLOCK_TRACES if mode == "block" else TRACES)[name], Path(folder, "rig"), mode=mode,
            seed=seed, images=images, problems_max=problems_max, only_damage=only_damage,
            trace=(traces or {}).get(name),
        )  # fmt: skip
        if traces is not None:
            traces[name] = rig.trace
        tally = rig.run()
    return {
        "images": len(tally.keys),
        "in_flight": len(tally.in_flight),
        "undone": tally.undone,
        "in_recovery": tally.in_recovery,
        "overlap": rig.trace.overlap,
        "problems": tally.problems,
    }


def run_images(mode: str, images: int, seed: int, width: int) -> tuple[dict[str, Any], list[str]]:
    """All plans in one mode: its JSON line, and the problems."""
    from power_plans import BLOCK_TRACES, TRACES

    traces = BLOCK_TRACES if mode == "block" else TRACES
    total = sum(plan.share for plan in traces.values())
    jobs = [
        lambda name=name, plan=plan, i=i: run_plan(
            name, mode, 1 + int(images * plan.share / total), seed + i
        )
        for i, (name, plan) in enumerate(traces.items())
    ]
    results = [result for _, result in in_children(jobs, width)]
    problems = [problem for result in results for problem in result.get("problems", [])]
    problems += [result["failed"] for result in results if "failed" in result]
    line = {"rig": "images", "mode": mode}
    totals = {
        key: sum(result.get(key, 0) for result in results)
        for key in ("images", "in_flight", "undone", "in_recovery")
    }
    line |= {"images": totals["images"], "needing_recovery": totals["in_flight"]}
    line |= {"undone": totals["undone"], "in_recovery": totals["in_recovery"]}
    return line | {"bad": len(problems)}, problems


def _timed(job: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """A job's result and the CPU time that it took."""
    began = time.process_time()
    return job() | {"seconds": round(time.process_time() - began, 1)}


def run_mutant(number: int, images: int, seed: int, problems_max: int) -> dict[str, Any]:
    """One fault, until it is found: first with few images, as most faults show at once.

    Found is lost or wrong bytes, a lost batch, a store outside the protocol, or an image that is
    refused: the controls show that the build without a fault recovers all of theirs. Anything else
    that goes wrong, in the training already say, is no finding.
    """
    from trainingcxl import _core

    _core.plant_fault(number)
    name = faults()[number]
    plans, modes = _MUTANT_PLANS, ("weak", "tso")
    if name.startswith(_BLOCK_FAULT):
        plans, modes = _BLOCK_PLANS, ("block",)
    first = _SHOWN_BY.get(name, plans[0])
    plans = (first, *(plan for plan in plans if plan != first))
    tried, notes = 0, set()
    traces: dict[str, Any] = {}
    for plan, mode, count in [
        *((first, mode, images // 8) for mode in modes),
        *((plan, mode, images) for plan in plans for mode in modes),
    ]:
        if count == images and mode == modes[0]:
            traces.clear()  # what threads do in which order is another in each record
        try:
            result = run_plan(
                plan, mode, count, seed + tried, problems_max, only_damage=True, traces=traces
            )
        except Exception as error:
            notes.add(f"{plan}: {type(error).__name__}: {str(error).splitlines()[0]}")
            continue
        tried += result["images"]
        if result["problems"]:
            return {"images": tried, "problems": result["problems"], "plan": plan}
    return {"images": tried, "problems": [], "notes": sorted(notes)}


def _controls(images: int, seed: int, part: int) -> list[Callable[[], dict[str, Any]]]:
    """The same build without a fault must pass: each plan a job, every other one in each part."""
    plans = [(plan, "weak", images) for plan in _MUTANT_PLANS]
    plans += [(plan, "block", images // _BLOCK_CONTROL) for plan in _BLOCK_PLANS]
    plans = plans[part::2]
    return [lambda plan=plan: _timed(lambda: run_plan(*plan, seed)) for plan in plans]


def run_mutants(
    images: int, controls: int, seed: int, width: int, problems_max: int, every: int
) -> tuple[dict[str, Any], list[str]]:
    """All faults, of the journal's every so many, and none between and after them."""
    names = faults()
    of_journal = [i for i, name in enumerate(names) if name.startswith(_BLOCK_FAULT)]
    left_out = set(of_journal) - set(of_journal[every > 1 :: every])
    numbers = [i for i in range(1, len(names)) if i not in left_out]
    order, jobs = [], []
    half = len(numbers) // 2
    for i, part in enumerate((numbers[:half], numbers[half:])):
        controls_of_part = _controls(controls, seed + len(order), i)
        order += [*part, *(0 for _ in controls_of_part)]
        jobs += [
            lambda number=number: _timed(
                lambda: run_mutant(number, images, seed + number, problems_max)
            )
            for number in part
        ]
        jobs += controls_of_part
    bad_images: dict[str, int] = {}
    problems = []
    for i, result in in_children(jobs, width):
        damage = result.get("problems", [])
        if order[i] == 0:
            print(f"control: {result.get('seconds')} s, {result.get('images')}", file=sys.stderr)
            damage += [result["failed"]] if "failed" in result else []
            problems += [f"without a fault: {problem}" for problem in damage]
        else:
            bad_images[names[order[i]]] = len(damage)
            notes = result.get("failed") or "; ".join(result.get("notes", []))
            shown = damage[0].splitlines()[0] if damage else f"NOT FOUND {notes}"
            where = f"{result.get('plan')}, {result.get('seconds')} s"
            print(f"{names[order[i]]}: {where}: {shown}", file=sys.stderr, flush=True)
    missed = [name for name, count in bad_images.items() if count == 0]
    line = {"rig": "mutants", "mutants": len(bad_images), "found": len(bad_images) - len(missed),
            "bad_images": dict(sorted(bad_images.items()))}  # fmt: skip
    return line, problems + [f"fault not found: {name}" for name in missed]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, help=f"per mode, about; usually {IMAGES}")
    parser.add_argument("--modes", default="tso,weak,block")
    parser.add_argument("--faults", type=Path, help="native core built by tools/fault_build.sh")
    parser.add_argument("--mutant-images", type=int, default=1500, help="per fault and plan")
    parser.add_argument("--control-images", type=int, default=2000, help="per plan, without fault")
    parser.add_argument("--bad-max", type=int, default=20, help="of a fault, before the next")
    parser.add_argument("--every-journal-fault", type=int, default=1, help="try every N-th alone")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=min(2, len(os.sched_getaffinity(0))))
    options = parser.parse_args()
    if options.faults is not None:
        use_core(options.faults)
    problems: list[str] = []
    for mode in filter(None, options.modes.split(",")):
        started = time.perf_counter()
        images = options.images or IMAGES[mode]
        line, found = run_images(mode, images, options.seed, options.jobs)
        print(json.dumps(line | {"seconds": round(time.perf_counter() - started, 1)}), flush=True)
        problems += found
    if options.faults is not None:
        line, found = run_mutants(
            options.mutant_images, options.control_images, options.seed, options.jobs,
            options.bad_max, options.every_journal_fault,
        )  # fmt: skip
        print(json.dumps(line), flush=True)
        problems += found
    for problem in problems[:_SHOWN]:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
