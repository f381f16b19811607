"""Fuzz the opening and recovery of pools: build with clang, run, print one line of JSON.

Run as `python tools/fuzz.py`; `make fuzz` passes its ARGS on. Exits 1 after a finding, or when too
few executions got past the superblock to mean anything. Findings are kept as bytes; the program
`replay_corpus --print FILE` shows one as text for tests/fuzz/corpus.
"""

import argparse
import json
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = "clang libclang-rt-14-dev"
COMPILERS = ("clang++", "clang++-19", "clang++-16", "clang++-15", "clang++-14")
INPUT_BYTES_MAX = 324  # 20 operations; more make an execution slower, and find no more
MEMORY_MB = 2048
HANG_S = 10
PAST_CHECKSUM_MIN = 0.3
# Stacks of allocations are kept short: findings are replayed, and then have whole ones.
ASAN_OPTIONS = "malloc_context_size=1:quarantine_size_mb=8:detect_stack_use_after_return=0"
# Recorded comparisons would only serve mutations that the fuzzer's own mutator does not make.
FLAGS = "-fno-sanitize-coverage=trace-cmp"


def find_compiler() -> str:
    """Path of a clang++ that has libFuzzer; installs it where that is possible."""
    if (found := working_compiler()) is not None:
        return found
    install = f"apt-get install -y --no-install-recommends {PACKAGES}"
    if os.geteuid() == 0 and shutil.which("apt-get"):
        print(f"fuzz: {install}", file=sys.stderr)
        subprocess.run(install.split(), stdout=sys.stderr, check=False)
        if (found := working_compiler()) is not None:
            return found
    sys.exit(f"fuzz: clang++ with libFuzzer is missing\n  do:    {install}")


def working_compiler() -> str | None:
    """The first compiler that links an empty fuzz target."""
    source = 'extern "C" int LLVMFuzzerTestOneInput(const char*, unsigned long) { return 0; }'
    for name in COMPILERS:
        command = [name, "-x", "c++", "-fsanitize=fuzzer,address,undefined", "-", "-o", "/dev/null"]
        if (
            shutil.which(name)
            and not subprocess.run(
                command, input=source, text=True, capture_output=True, check=False
            ).returncode
        ):
            return name
    return None


def build(folder: Path) -> None:
    """Build the fuzzer and the replay program in `folder`."""
    configure = [
        "cmake", "-S", str(ROOT), "-B", str(folder), "-G", "Ninja", "-DTCXL_FUZZ=ON",
        "-DCMAKE_BUILD_TYPE=RelWithDebInfo", f"-DCMAKE_CXX_COMPILER={find_compiler()}",
        "-DTCXL_SANITIZE=fuzzer-no-link,address,undefined", f"-DCMAKE_CXX_FLAGS={FLAGS}",
    ]  # fmt: skip
    subprocess.run(configure, stdout=subprocess.DEVNULL, check=True)
    subprocess.run(
        ["cmake", "--build", str(folder), "--", "--quiet"], stdout=sys.stderr, check=True
    )


def start(
    folder: Path, pools: str, number: int, args: argparse.Namespace
) -> subprocess.Popen[bytes]:
    """Start one fuzzer of `args.jobs`; they share the corpus and have a log each."""
    log = (folder / f"{number}.log").open("wb")
    command = [
        str(args.build / "fuzz_pool"), "-entropic=0", f"-runs={-(-args.executions // args.jobs)}",
        f"-max_total_time={args.seconds}", f"-seed={args.seed + number}", f"-timeout={HANG_S}",
        f"-rss_limit_mb={MEMORY_MB}", f"-max_len={INPUT_BYTES_MAX}", "-print_final_stats=1",
        # Leaks show in the replay and in the limit of memory: to look for them after an execution
        # stops all threads through ptrace, which may hang, and no time limit covers it.
        f"-artifact_prefix={folder / 'findings'}/", "-reload=20", "-detect_leaks=0",
        str(folder / "corpus"), str(folder / "attacks"),
    ]  # fmt: skip
    environment = os.environ | {
        "ASAN_OPTIONS": ASAN_OPTIONS,
        "TRAININGCXL_FUZZ_COUNTS": str(folder / f"{number}.counts"),
        "TRAININGCXL_FUZZ_FOLDER": pools,
    }
    return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)


def read_counts(path: Path) -> tuple[int, int, int]:
    """Executions, those past the superblock, those that opened the pool."""
    executions, past, opened = struct.unpack("3Q", path.read_bytes())
    return executions, past, opened


def run(args: argparse.Namespace) -> int:
    """Replay the attacks, fuzz, print the line; the exit status."""
    folder = args.build / "fuzz"
    shutil.rmtree(folder, ignore_errors=True)
    for name in ("corpus", "findings"):
        (folder / name).mkdir(parents=True)
    replay = [str(args.build / "replay_corpus"), "--encode", str(folder / "attacks")]
    subprocess.run([*replay, str(ROOT / "tests/fuzz/corpus")], stdout=sys.stderr, check=True)
    began = time.monotonic()
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="trainingcxl-fuzz-", dir=memory) as pools:
        fuzzers = [start(folder, pools, number, args) for number in range(args.jobs)]
        failed = sum(fuzzer.wait() != 0 for fuzzer in fuzzers)
    seconds = time.monotonic() - began
    counts = [read_counts(folder / f"{number}.counts") for number in range(args.jobs)]
    executions, past, opened = (sum(column) for column in zip(*counts, strict=True))
    share = past / max(1, executions)
    line = {
        "rig": "fuzz",
        "executions": executions,
        "past_checksum": round(share, 3),
        "opened": round(opened / max(1, executions), 3),
        "crashes": failed,
        "seconds": round(seconds),
    }
    for finding in sorted((folder / "findings").iterdir()):
        print(f"fuzz: finding {finding}; its log ends:", file=sys.stderr)
    for number, fuzzer in enumerate(fuzzers):
        if fuzzer.returncode != 0:
            print((folder / f"{number}.log").read_text(errors="replace")[-4000:], file=sys.stderr)
    print(json.dumps(line))
    return int(failed > 0 or share < PAST_CHECKSUM_MIN)


def main() -> int:
    """Parse the command line, build, run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--executions", type=int, default=1_000_000, help="in all")
    parser.add_argument("--seconds", type=int, default=0, help="stop after so many; 0: no limit")
    parser.add_argument("--jobs", type=int, default=2, help="fuzzers at once")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of the first fuzzer")
    parser.add_argument("--build", type=Path, default=ROOT / "build/fuzz", help="build folder")
    args = parser.parse_args()
    args.build = args.build.resolve()
    build(args.build)
    return run(args)


if __name__ == "__main__":
    sys.exit(main())
