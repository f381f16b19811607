"""Every crash rig, a JSON line each: `make crash`.

    python tests/crash/make_crash.py [--only images,torture] [--scale 1]

Power failures tried on records (images), planted faults looked for (mutants), trainings killed
(torture), bits flipped (flips), invented orders of events (stateful), hostile bytes opened (fuzz).
Exits with 1 if anything is bad, or if less was tried than promised. Two processes at once, and as
many of the fuzzer, which runs beside the others: none of them waits for a slower one's end.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(Path(__file__).parent))

import crash_images  # noqa: E402
from crash_images import in_children  # noqa: E402

from trainingcxl.torture import torture  # noqa: E402
from trainingcxl.torture_tally import Tally  # noqa: E402

Line = dict[str, Any]
Lines = Iterator[tuple[Line, list[str]]]
"""What a rig prints, and what is wrong with it."""

_IMAGES_MIN, _IMAGES_MIN_ALL, _IN_FLIGHT_MIN = 10_000, 50_000, 0.4
_IN_TRANSACTION_MIN = 0.3
_SPECIAL_KILLS_MIN = 200  # in recovery, creation, growth, cut, over all media
_EXECUTIONS_MIN, _PAST_CHECKSUM_MIN = 1_000_000, 0.3
_EXAMPLES = 50
_RIGS = ("images", "torture", "mutants", "flips", "stateful", "fuzz")
# Media of the torture: medium, level, folder (of tmpfs or of this disk), kills at least, options.
_STREAMS: tuple[tuple[str, str, str, int, dict[str, Any]], ...] = (
    ("file", "power", "disk", 800, {"medium": "block", "has_power_cuts": True}),
    ("file", "process", "disk", 800, {"medium": "auto"}),
    ("tmpfs", "process", "tmpfs", 800, {"medium": "auto"}),
    ("fsdax", "power", "tmpfs", 200, {"medium": "fsdax"}),
)
_SECONDS_MAX = 3600  # of one child
_FAULTS = Path("build", "faults")


def images(options: argparse.Namespace) -> Lines:
    """Power failures, by mode."""
    total = 0
    for mode, count in crash_images.IMAGES.items():
        line, problems = crash_images.run_images(
            mode, round(count * options.scale), options.seed, options.jobs
        )
        total += line["images"]
        few = [] if line["images"] >= _IMAGES_MIN * options.scale else ["too few images"]
        if line["needing_recovery"] < _IN_FLIGHT_MIN * line["images"]:
            few.append("too few images with anything in flight")
        if mode == list(crash_images.IMAGES)[-1] and total < _IMAGES_MIN_ALL * options.scale:
            few.append(f"{total} images in all")
        yield line, problems + few


def mutants(options: argparse.Namespace) -> Lines:
    """The planted faults, in a build that has them: begun at once, waited for later."""
    building = subprocess.Popen(["bash", "tools/fault_build.sh", str(_FAULTS)], cwd=_ROOT)
    return _mutants(building, options)


def _mutants(building: subprocess.Popen[bytes], options: argparse.Namespace) -> Lines:
    if code := building.wait():
        yield {"rig": "mutants"}, [f"fault_build.sh ended with {code}"]
        return
    (core,) = (_ROOT / _FAULTS).glob("_core*.so")
    command = [
        sys.executable, str(Path(crash_images.__file__)), "--modes", "", "--seed",
        str(options.seed), "--jobs", str(options.jobs), "--faults", str(core),
        "--mutant-images", "1500", "--control-images", str(round(300 * options.scale)),
        "--bad-max", "1",
    ]  # fmt: skip
    yield from _ended(_begin(command))


def tortured(options: argparse.Namespace) -> Lines:
    """Killed trainings, by medium and level."""
    for module in ("torch", "torch._dynamo"):  # once, not in every stream
        import_module(module)
    jobs = [lambda stream=stream: _stream(*stream, options) for stream in _STREAMS]
    special, done = 0, 0
    for number, result in in_children(jobs, options.jobs, seconds_max=_SECONDS_MAX):
        done += 1
        if "failed" in result:
            yield {"rig": "torture", "medium": _STREAMS[number][0]}, [result["failed"]]
            continue
        line, problems = result["line"], result["problems"]
        special += sum(line[f"in_{what}"] for what in ("recovery", "creation", "growth", "cut"))
        if line["kills"] < _STREAMS[number][3] * options.scale:
            problems.append("too few kills")
        if line["mid_transaction"] < _IN_TRANSACTION_MIN:
            problems.append("too few kills in the middle of a transaction")
        if done == len(jobs) and special < _SPECIAL_KILLS_MIN * options.scale:
            problems.append(f"only {special} kills in recovery, creation, growth and cut")
        yield line, problems


def _stream(
    medium: str, level: str, where: str, kills: int, settings: dict[str, Any],
    options: argparse.Namespace,
) -> Line:  # fmt: skip
    parent = Path("/dev/shm") if where == "tmpfs" else _ROOT / "build"
    tally = Tally()
    with tempfile.TemporaryDirectory(dir=parent, prefix="torture-") as folder:
        for _ in torture(
            Path(folder), seconds=_SECONDS_MAX, seed=options.seed, tally=tally,
            kills=round(kills * options.scale), **settings,
        ):  # fmt: skip
            pass
    seen = tally.summary()
    line = {"rig": "torture", "medium": medium, "level": level, "kills": tally.kills}
    line |= {"mid_transaction": seen["share_in_transaction"], "mismatches": seen["mismatches"]}
    line["recovery_ms"] = {key: seen[f"recovery_ms_{key}"] for key in ("p50", "p99", "max")}
    line |= {f"in_{w}": seen[f"kills_in_{w}"] for w in ("recovery", "creation", "growth", "cut")}
    return {"line": line, "problems": tally.mismatches}


def flips(options: argparse.Namespace) -> Lines:
    """Each byte of small pools in turn."""
    every = max(1, round(1 / options.scale))
    command = [sys.executable, str(Path(__file__).with_name("flips.py")), "--every", str(every),
               "--seed", str(options.seed)]  # fmt: skip
    yield from _ended(_begin(command))


def stateful(options: argparse.Namespace) -> Lines:
    """Orders of events that hypothesis invents, half of them in each process."""
    share = max(1, round(_EXAMPLES * options.scale) // options.jobs)
    jobs = [
        lambda number=number: _examples(share, 2 * options.seed + number)
        for number in range(options.jobs)
    ]
    children = in_children(jobs, options.jobs, seconds_max=_SECONDS_MAX)
    results = [result for _, result in children]
    failed = [result["failed"] for result in results if "failed" in result]
    line = {"rig": "stateful", "examples": share * options.jobs, "failures": len(failed)}
    yield line, failed


def _examples(count: int, seed: int) -> Line:
    import test_stateful
    from hypothesis import seed as seeded
    from hypothesis.stateful import run_state_machine_as_test

    seeded(seed)(test_stateful.Training)
    run_state_machine_as_test(test_stateful.Training, settings=test_stateful.settings_for(count))
    return {}


def fuzz(options: argparse.Namespace) -> Lines:
    """Hostile bytes, under ASan and UBSan: begun at once, beside the other rigs."""
    wanted = round(_EXECUTIONS_MIN * options.scale)
    command = [sys.executable, str(_ROOT / "tools" / "fuzz.py"), "--executions", str(wanted),
               "--jobs", str(options.jobs)]  # fmt: skip
    return _fuzz(_begin(command), wanted)


def _fuzz(fuzzing: subprocess.Popen[str], wanted: int) -> Lines:
    for line, problems in _ended(fuzzing):
        if line.get("executions", 0) < wanted:
            problems.append("too few executions")
        if line.get("past_checksum", 0) < _PAST_CHECKSUM_MIN:
            problems.append("too few executions got past the superblock")
        yield line, problems


def _begin(command: list[str]) -> subprocess.Popen[str]:
    """A program that prints one line, and exits with 1 if anything is bad."""
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def _ended(program: subprocess.Popen[str]) -> Lines:
    said, _ = program.communicate()
    lines = [line for line in said.splitlines() if line.startswith("{")]
    assert isinstance(program.args, list)
    name, code = Path(program.args[1]).name, program.returncode
    problems = [] if code == 0 else [f"{name} ended with {code}"]
    yield (json.loads(lines[-1]) if lines else {}), problems


def _cpu_seconds() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def main() -> int:
    """Run the rigs; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default=",".join(_RIGS), help="rigs, with commas between")
    parser.add_argument("--scale", type=float, default=1.0, help="of all counts")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=2, help="processes at once")
    options = parser.parse_args()
    rigs: dict[str, Callable[[argparse.Namespace], Lines]] = {
        "images": images, "mutants": mutants, "torture": tortured, "flips": flips,
        "stateful": stateful, "fuzz": fuzz,
    }  # fmt: skip
    bad = False
    began = time.monotonic()
    for name, lines in [(name, rigs[name](options)) for name in options.only.split(",")]:
        used = _cpu_seconds()
        for line, problems in lines:
            print(json.dumps(line), flush=True)
            for problem in problems:
                bad = True
                print(f"{name}: {problem}", file=sys.stderr, flush=True)
        wall, cpu = time.monotonic() - began, _cpu_seconds() - used
        print(f"{name}: {cpu:.0f} s of CPU; {wall:.0f} s so far", file=sys.stderr, flush=True)
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
