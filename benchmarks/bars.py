"""The bars of docs/performance.md: what each demands, of which figure, and whether runs hold it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

RUNS_NEEDED = 2  # undisturbed runs that agree: two of three
RUNS_MAX = 5  # disturbed ones included; then there is no verdict

SHAPES = ("i", "ii", "iii16", "iii128")
DRAWS = ("uniform", "zipf")


@dataclass(frozen=True, kw_only=True, slots=True)
class Bar:
    """One line of `make bench-check`.

    `figure` names a figure of `script`, whose median must be at least (or at most) `bar`; `aim` is
    what we would like it to be. `measurement` is what --only of the script makes again.
    """

    name: str
    figure: str
    script: str
    measurement: str
    bar: float
    aim: float
    at_most: bool = False
    unit: str = "x"

    def holds(self, median: float) -> bool:
        """Whether a run's median is good enough."""
        return median <= self.bar if self.at_most else median >= self.bar

    def reached(self, median: float) -> bool:
        """Whether it is as good as we would like it."""
        return median <= self.aim if self.at_most else median >= self.aim


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What some runs say of a bar: pass, fail, open (more runs needed), skipped or undecided."""

    word: str
    note: str = ""


def judge(bar: Bar, runs: Sequence[Mapping[str, Any] | None]) -> Verdict:
    """Judge the figures that a bar's runs gave, None for a run without it.

    Two undisturbed runs that hold it pass, two that miss it fail. A figure with "skipped" has its
    reason there and is never passed.
    """
    for figure in runs:
        if figure is not None and figure.get("skipped"):
            return Verdict(word="skipped", note=figure["skipped"])
    if any(figure is None for figure in runs):
        return Verdict(word="fail", note="the script gave no such figure")
    good = [run for run in runs if run is not None and not run["disturbed"]]
    held = sum(bar.holds(run["median"]) for run in good)
    if held >= RUNS_NEEDED:
        is_aim = sum(bar.reached(run["median"]) for run in good) >= RUNS_NEEDED
        return Verdict(word="pass", note="aim reached" if is_aim else "")
    if len(good) - held >= RUNS_NEEDED:
        return Verdict(word="fail")
    if len(runs) >= RUNS_MAX:
        last = next((run["disturbed"] for run in reversed(runs) if run and run["disturbed"]), "")
        return Verdict(word="undecided", note=f"{len(runs) - len(good)} runs disturbed: {last}")
    return Verdict(word="open")


def shown_run(runs: Sequence[Mapping[str, Any] | None]) -> Mapping[str, Any] | None:
    """The run whose figures a line shows: the one with the middle median, undisturbed if any."""
    all_runs = [run for run in runs if run is not None and not run.get("skipped")]
    good = [run for run in all_runs if not run["disturbed"]] or all_runs
    return sorted(good, key=lambda run: run["median"])[len(good) // 2] if good else None


def cells(bar: Bar, runs: Sequence[Mapping[str, Any] | None]) -> tuple[str, ...]:
    """Name, bar, aim, median [min, max], verdict, script."""
    verdict, shown = judge(bar, runs), shown_run(runs)
    sign = "<=" if bar.at_most else ">="
    found = "-"
    if shown is not None:
        found = f"{shown['median']:.3g}{bar.unit} [{shown['min']:.3g}, {shown['max']:.3g}]"
    word = verdict.word + (f": {verdict.note}" if verdict.note else "")
    limits = f"{sign} {bar.bar:g}{bar.unit}", f"{bar.aim:g}{bar.unit}"
    return bar.name, *limits, found, word, bar.script


def line(row: Sequence[str]) -> str:
    """A bar's cells for a terminal."""
    name, bar, aim, found, word, script = row
    return f"{name:<64}{bar:<13}aim {aim:<10}{found:<32}{word}  ({script})"


def markdown(rows: Sequence[Sequence[str]], head: Sequence[str]) -> str:
    """Rows of cells as a table for a page."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in lines) + "\n"


def _step_bars() -> list[Bar]:
    torch_sgd = {"i": 5.0, "ii": 5.0, "iii16": 4.0, "iii128": 3.0}
    bars = []
    for shape in SHAPES:
        for draw in DRAWS:
            bars += [
                Bar(
                    name=f"step {shape} {draw}, row-wise Adagrad, FBGEMM / ours, 1 thread",
                    figure=f"fbgemm/{shape}/{draw}/rowwise-adagrad",
                    script="step_peers.py",
                    measurement=f"{shape}/rowwise-adagrad",
                    bar=1.15 if shape == "i" else 1.3,
                    aim=2.0,
                ),
                Bar(
                    name=f"step {shape} {draw}, SGD, FBGEMM / ours, 1 thread",
                    figure=f"fbgemm/{shape}/{draw}/sgd",
                    script="step_peers.py",
                    measurement=f"{shape}/sgd",
                    bar=1.8,
                    aim=3.0,
                ),
                Bar(
                    name=f"step {shape} {draw}, SGD, nn.EmbeddingBag / ours, 1 thread",
                    figure=f"torch/{shape}/{draw}/sgd",
                    script="step_peers.py",
                    measurement=f"{shape}/sgd",
                    bar=torch_sgd[shape],
                    aim=8.0,
                ),
            ]
    return bars


def _beside_bars() -> list[Bar]:
    """Agreement with FBGEMM, equal bits, threads."""
    bars = [
        Bar(
            name=f"weights from FBGEMM's, {optimizer}: largest difference",
            figure=f"agreement/{optimizer}",
            script="agreement.py",
            measurement=optimizer,
            bar=1e-6,
            aim=1e-6,
            at_most=True,
            unit="",
        )
        for optimizer in ("sgd", "rowwise-adagrad")
    ]
    bars.append(
        Bar(
            name="different bits over threads 1, 2 and vector widths",
            figure="agreement/bits",
            script="agreement.py",
            measurement="bits",
            bar=1,
            aim=1,
            at_most=True,
            unit="",
        )
    )
    bars += [
        Bar(
            name=f"step i {draw}, {optimizer}, 2 threads / 1 thread",
            figure=f"threads/{draw}/{optimizer}",
            script="scaling.py",
            measurement=f"threads/{optimizer}",
            bar=1.5,
            aim=1.9,
        )
        for optimizer in ("rowwise-adagrad", "sgd")
        for draw in DRAWS
    ]
    return bars


def _gather_bars() -> list[Bar]:
    places = (("memory", "small", 30.0, "4K"), ("disk", "huge", 45.0, "2M"))
    bars = []
    for place, size, share, pages in places:
        bars += [
            Bar(
                name=f"forward gather, {pages} pages, of sequential read",
                figure=f"gather/{place}/of-read-{size}",
                script="gather.py",
                measurement=place,
                bar=share,
                aim=60.0,
                unit=" %",
            ),
            Bar(
                name=f"forward gather, {place}, bare loop / ours",
                figure=f"gather/{place}/of-bare",
                script="gather.py",
                measurement=place,
                bar=0.8,
                aim=0.95,
            ),
        ]
    return bars


def _cost(name: str, figure: str, place: tuple[str, str], bar: float, aim: float) -> Bar:
    script, measurement = place
    return Bar(
        name=name,
        figure=figure,
        script=script,
        measurement=measurement,
        bar=bar,
        aim=aim,
        at_most=True,
    )


def _log_bars() -> list[Bar]:
    script = "undo_log_cost.py"
    steps = [(name, draw) for name in ("iii16", "iii128", "i") for draw in DRAWS]
    bars = [
        _cost(
            f"undo log on / off, embedding step {name} {draw}",
            f"log/{name}/{draw}",
            (script, f"step/{name}"),
            1.15,
            1.05,
        )
        for name, draw in steps
        if (name, draw) != ("i", "uniform")  # reported: its log is all of the medium's bandwidth
    ]
    bars.append(
        _cost("undo log on / off, DLRM step iii16", "log/dlrm", (script, "dlrm"), 1.03, 1.01)
    )
    bars += [
        _cost(
            f"bytes of the undo log / of distinct rows, {name} {draw}",
            f"log-bytes/{name}/{draw}",
            (script, f"step/{name}"),
            1.5,
            1.1,
        )
        for name, draw in steps
    ]
    bars += [
        _cost("power / process, DLRM step iii16", "power/dlrm", ("power.py", "dlrm"), 1.1, 1.03),
        _cost(
            "power / process, step of 10 to 20 ms", "power/light", ("power.py", "light"), 1.1, 1.03
        ),
        _cost(
            "bytes of the journal / of distinct rows, iii16",
            "power/journal-bytes",
            ("power.py", "dlrm"),
            1.6,
            1.25,
        ),
    ]
    return bars


def _recovery_bars() -> list[Bar]:
    return [
        Bar(
            name="open 2 GB after a kill, one batch rolled back",
            figure="recovery/rollback/seconds",
            script="recovery.py",
            measurement="rollback",
            bar=0.3,
            aim=0.05,
            at_most=True,
            unit=" s",
        ),
        Bar(
            name="DCP load of the same bytes / that",
            figure="recovery/rollback/dcp",
            script="recovery.py",
            measurement="rollback",
            bar=20.0,
            aim=20.0,
        ),
        Bar(
            name="open after a power loss: bytes of the ring a second",
            figure="recovery/ring-gbps",
            script="recovery.py",
            measurement="power-loss",
            bar=1.0,
            aim=1.0,
            unit=" GB/s",
        ),
    ]


def _ladder_bars() -> list[Bar]:
    bars = []
    for rung in ("batch-aware", "relaxed"):
        bars += [
            Bar(
                name=f"ladder (a), {rung}: of the step, waits for a flag",
                figure=f"ladder-a/{rung}/flag-wait",
                script="ladder_schedule.py",
                measurement="dlrm",
                bar=2.0,
                aim=0.1,
                at_most=True,
                unit=" %",
            ),
            Bar(
                name=f"ladder (a), {rung}: of the log's work, hidden",
                figure=f"ladder-a/{rung}/hidden",
                script="ladder_schedule.py",
                measurement="dlrm",
                bar=80.0,
                aim=95.0,
                unit=" %",
            ),
        ]
    bars += [
        Bar(
            name=f"ladder (b), {model}: host-driven software PMEM / ours",
            figure=f"ladder-b/{model}",
            script="ladder_host.py",
            measurement=model,
            bar=2.0,
            aim=5.2,
        )
        for model in ("i", "RM1", "RM2")
    ]
    bars += [
        Bar(
            name=f"every batch protected is cheaper than {saver} every N <=",
            figure=f"protection/{figure}",
            script="protection.py",
            measurement="dlrm",
            bar=300.0,
            aim=3000.0,
            unit="",
        )
        for saver, figure in (("torch.save + fsync", "torch.save"), ("DCP async_save", "dcp-async"))
    ]
    return bars


BARS: tuple[Bar, ...] = (
    *_step_bars(),
    *_beside_bars(),
    *_gather_bars(),
    *_log_bars(),
    *_recovery_bars(),
    *_ladder_bars(),
)
# Bars of what does not exist yet: the cells of their lines.
NOT_MEASURED = (
    (
        "protect on an nn.EmbeddingBag(sparse) model / its own step",
        *("<= 1.15x", "1.05x", "-", "skipped: there is no protect() yet", "-"),
    ),
)
HEAD = ("bar", "demanded", "aim", "median [min, max]", "verdict", "script")
