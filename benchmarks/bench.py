"""Runs the benchmark scripts: all of them, a quick look, or the bars.

    python benchmarks/bench.py all|quick|check|table [--scripts step_peers.py,...] [--out FOLDER]

`all` makes every measurement once, `quick` a small part of each script. `check` prints one line a
bar; a bar passes if two undisturbed runs of its measurement hold it and fails if two miss it, so
three decide. Disturbed runs are made again, five in all. It exits with 1 unless every bar passes or
is skipped for a stated reason. Documents go to FOLDER (build/bench/results), the bars as a table to
check.md there. `table` prints the figures of the documents in FOLDER as Markdown.
"""

import argparse
import json
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from bars import BARS, HEAD, NOT_MEASURED, Bar, cells, judge, line, markdown
from report import find_figure

HERE = Path(__file__).resolve().parent
SCRIPTS = (  # in the order in which they run
    "step_peers.py",
    "floor.py",
    "dlrm_peers.py",
    "agreement.py",
    "gather.py",
    "scaling.py",
    "undo_log_cost.py",
    "power.py",
    "recovery.py",
    "ladder_schedule.py",
    "ladder_host.py",
    "protection.py",
)
# No bar looks at these, and their options are their own; {disk} is a folder on a disk.
OTHERS = {
    "relaxed.py": ("--shapes", "iii16", "--json", "{json}"),
    "host_prediction.py": ("--shapes", "iii16,iii128", "--json", "{json}"),
    "snapshot.py": ("{disk}", "--rounds", "3", "--json", "{json}"),
    "memory.py": ("{disk}",),
}
SECONDS_MAX = 1800  # of one run of a script


def run(script: str, target: Path, *options: str) -> dict[str, Any] | None:
    """Runs a script; its document, or None if it wrote none."""
    target.unlink(missing_ok=True)
    command = [sys.executable, str(HERE / script), "--json", str(target), *options]
    print(f"\n== {script} {' '.join(options)}", flush=True)
    try:
        code = subprocess.run(command, check=False, timeout=SECONDS_MAX).returncode
        if code != 0:
            print(f"{script} ended with {code}", flush=True)
    except subprocess.TimeoutExpired:
        print(f"{script} took more than {SECONDS_MAX} s", flush=True)
    if not target.exists():
        return None
    document: dict[str, Any] = json.loads(target.read_text())
    return document


def run_all(scripts: Iterable[str], out: Path, *options: str) -> int:
    """Every script once; how many failed."""
    failed = 0
    for script in scripts:
        started = time.monotonic()
        document = run(script, out / f"{Path(script).stem}.json", *options)
        failed += document is None or any(one["failed"] for one in document["measurements"])
        print(f"== {script}: {time.monotonic() - started:.0f} s", flush=True)
    return failed


def run_others(out: Path, disk: Path) -> int:
    """The scripts with options of their own; how many failed."""
    failed = 0
    disk.mkdir(parents=True, exist_ok=True)
    for script, options in OTHERS.items():
        filled = [o.format(json=out / f"{Path(script).stem}.json", disk=disk) for o in options]
        print(f"\n== {script} {' '.join(filled)}", flush=True)
        command = [sys.executable, str(HERE / script), *filled]
        code = subprocess.run(command, check=False, timeout=SECONDS_MAX).returncode
        if code != 0:
            print(f"{script} ended with {code}", flush=True)
        failed += code != 0
    return failed


def tables(out: Path) -> str:
    """The figures of all documents in a folder, for a page."""
    text = ""
    for path in sorted(out.glob("*.json")):
        document = json.loads(path.read_text())
        if not isinstance(document, dict) or "measurements" not in document:
            continue  # of a script with a form of its own
        rows = [
            (key, f"{figure['median']:.3g} [{figure['min']:.3g}, {figure['max']:.3g}]", note)
            for made in document["measurements"]
            for key, figure in made["figures"].items()
            if "median" in figure
            for note in [f"disturbed: {figure['disturbed']}" if figure["disturbed"] else ""]
        ]
        machine = f"{document['machine']['cpu']}, {document['machine']['cores']} cores"
        text += f"`{document['script']}` ({machine}, {document['rounds']} rounds)\n\n"
        text += markdown(rows, ("figure", "median [min, max]", "")) + "\n"
    return text


def check(scripts: Iterable[str], out: Path, *options: str) -> int:
    """Runs what the bars need until each is decided; prints them; how many are not passed."""
    runs: dict[Bar, list[dict[str, Any] | None]] = defaultdict(list)
    for script in scripts:
        bars = [bar for bar in BARS if bar.script == script]
        number = 0
        while pending := [bar for bar in bars if judge(bar, runs[bar]).word == "open"]:
            number += 1
            wanted = ",".join(dict.fromkeys(bar.measurement for bar in pending))
            target = out / f"{Path(script).stem}.run{number}.json"
            document = run(script, target, "--only", wanted, *options)
            for bar in pending:
                figure = document and find_figure(document, bar.measurement, bar.figure)
                runs[bar].append(figure)
    rows = [*(cells(bar, found) for bar, found in runs.items()), *NOT_MEASURED]
    verdicts = [row[4].partition(":")[0] for row in rows]
    counts = {word: verdicts.count(word) for word in ("pass", "fail", "undecided", "skipped")}
    summary = ", ".join(f"{count} {word}" for word, count in counts.items())
    print("\n" + "\n".join([*map(line, rows), summary]))
    (out / "check.md").write_text(markdown(rows, HEAD) + f"\n{summary}\n")
    return counts["fail"] + counts["undecided"]


def main() -> None:
    """Runs what the options choose."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("all", "quick", "check", "table"))
    parser.add_argument("--scripts", default=",".join(SCRIPTS), help="separated by commas")
    parser.add_argument("--out", type=Path, default=Path("build/bench/results"))
    args, options = parser.parse_known_args()  # the others are the scripts'
    scripts = args.scripts.split(",")
    if unknown := sorted(set(scripts) - set(SCRIPTS)):
        parser.error(f"--scripts {','.join(unknown)}: there are {', '.join(SCRIPTS)}")
    args.out.mkdir(parents=True, exist_ok=True)
    if args.what == "table":
        print(tables(args.out), end="")
        return
    if args.what == "check":
        sys.exit(min(1, check(scripts, args.out, *options)))
    if args.what == "quick":
        sys.exit(min(1, run_all(scripts, args.out, "--quick", "--rounds", "3", *options)))
    failed = run_all(scripts, args.out, *options)
    if scripts == list(SCRIPTS) and not options:
        failed += run_others(args.out, args.out.parent)
    sys.exit(min(1, failed))


if __name__ == "__main__":
    main()
