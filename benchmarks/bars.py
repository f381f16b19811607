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


def line(bar: Bar, runs: Sequence[Mapping[str, Any] | None]) -> str:
    """Name, bar, aim, median [min, max], verdict, script."""
    verdict, shown = judge(bar, runs), shown_run(runs)
    sign = "<=" if bar.at_most else ">="
    number = f"{sign} {bar.bar:g}{bar.unit}"
    aim = f"aim {bar.aim:g}{bar.unit}"
    found = "-"
    if shown is not None:
        found = f"{shown['median']:.3g}{bar.unit} [{shown['min']:.3g}, {shown['max']:.3g}]"
    word = verdict.word + (f": {verdict.note}" if verdict.note else "")
    return f"{bar.name:<58}{number:<11}{aim:<11}{found:<26}{word}  ({bar.script})"


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


BARS: tuple[Bar, ...] = (*_step_bars(),)
