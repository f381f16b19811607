"""The harness of the benchmarks: statistics, the rule of disturbance, bars, JSON documents.

Wrong here, and a bar would pass that does not hold, or a disturbed run would be believed.
"""

import argparse
import importlib
import json
import sys
import time
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.append(str(BENCHMARKS))

import bars  # noqa: E402
import bench  # noqa: E402
import report  # noqa: E402
import rounds  # noqa: E402

BAR = bars.Bar(name="b", figure="f", script="s.py", measurement="m", bar=1.5, aim=2.0)
COST = bars.Bar(
    name="c", figure="f", script="s.py", measurement="m", bar=1.1, aim=1.0, at_most=True
)


def figure(median: float, disturbed: str = "") -> dict[str, object]:
    return {"median": median, "min": median / 2, "max": median * 2, "disturbed": disturbed}


def test_spread_and_ratios():
    """Ratios are taken within a round: a slow round of both sides says nothing."""
    assert rounds.ratios([10.0, 40.0], [5.0, 20.0]) == [2.0, 2.0]
    found = rounds.spread([3.0, 1.0, 2.0])
    assert (found["median"], found["min"], found["max"]) == (2.0, 1.0, 3.0)


def test_rounds_are_interleaved_and_the_warm_up_is_left_out():
    """A candidate that ran alone would have the machine's quiet minutes for itself."""
    calls = []
    candidates = {name: (lambda k, name=name: calls.append((name, k))) for name in ("a", "b")}
    times = rounds.interleave(candidates, rounds=2, repeats=2, warm_up=1)
    assert calls[:4] == [("a", 0), ("a", 1), ("b", 0), ("b", 1)]
    assert [k for name, k in calls if name == "b"] == list(range(6))  # fresh batches each round
    assert len(times["a"].wall_ms) == len(times["b"].cpu_ms) == 2


def test_a_candidate_may_time_itself():
    """Only part of a call may be the candidate's work."""
    times = rounds.interleave({"a": lambda k: 0.25}, rounds=1, repeats=2)
    assert times["a"].wall_ms == [250.0]


def test_one_thread_that_waits_is_disturbed():
    """Wall beyond 1.1 of CPU time with one thread: the core was somebody else's."""
    slept = rounds.interleave({"ours": lambda k: time.sleep(0.01)}, rounds=3)
    assert "ours" in rounds.disturbance(slept, threads=1, foreign=0.0)
    assert rounds.disturbance(slept, threads=None, foreign=0.0) == ""
    assert "others" in rounds.disturbance(slept, threads=2, foreign=0.5)
    calm = {"ours": rounds.Times(wall_ms=[1.0, 1.05, 9.0], cpu_ms=[1.0, 1.0, 1.0])}
    assert rounds.disturbance(calm, threads=1, foreign=0.0) == ""  # the median decides


def test_foreign_load_is_what_others_took(tmp_path):
    """Own work does not count as a neighbour's."""
    stat = tmp_path / "stat"
    stat.write_text("cpu  100 0 100 1000 0 0 0 0 0 0\n")
    load = rounds.ForeignLoad(stat)
    ends = time.process_time() + 0.05
    while time.process_time() < ends:
        pass
    assert load.share() == 0.0
    stat.write_text("cpu  9100 0 100 1000 0 0 0 0 0 0\n")
    assert load.share() > 1.0


@pytest.mark.parametrize(
    ("medians", "word"),
    [
        ([], "open"),
        ([1.6], "open"),
        ([1.6, 1.5], "pass"),
        ([1.6, 1.4], "open"),
        ([1.6, 1.4, 1.7], "pass"),
        ([1.6, 1.4, 1.3], "fail"),
        ([1.4, 1.4], "fail"),
    ],
)
def test_two_of_three_decide(medians, word):
    """One lucky run is no pass, one unlucky run no failure."""
    assert bars.judge(BAR, [figure(median) for median in medians]).word == word


def test_disturbed_runs_decide_nothing():
    """Neither good nor bad luck of a disturbed run counts, and they come to an end."""
    bad, good = figure(9.0, "others"), figure(1.6)
    assert bars.judge(BAR, [bad, bad, good]).word == "open"
    assert bars.judge(BAR, [bad, bad, good, good]).word == "pass"
    undecided = bars.judge(BAR, [bad] * bars.RUNS_MAX)
    assert undecided.word == "undecided"
    assert "others" in undecided.note


def test_missing_and_skipped_never_pass():
    """A peer that is not installed, or a script that failed, proves nothing."""
    assert bars.judge(BAR, [{"skipped": "no FBGEMM"}]) == bars.Verdict(
        word="skipped", note="no FBGEMM"
    )
    assert bars.judge(BAR, [figure(1.6), None]).word == "fail"


def test_costs_are_bounded_from_above():
    """A ratio of costs passes by being small."""
    assert bars.judge(COST, [figure(1.05), figure(1.1)]).word == "pass"
    assert bars.judge(COST, [figure(1.2), figure(1.2)]).word == "fail"
    assert bars.judge(COST, [figure(0.9), figure(1.0)]).note == "aim reached"


def test_line_shows_what_was_measured():
    """Name, bar, aim, median with spread, verdict, script: everything to check it by."""
    text = bars.line(bars.cells(BAR, [figure(1.8), figure(1.6), figure(9.0, "others")]))
    for part in ("b ", ">= 1.5x", "aim 2x", "1.8x [0.9, 3.6]", "pass", "s.py"):
        assert part in text
    assert "skipped: no FBGEMM" in bars.line(bars.cells(BAR, [{"skipped": "no FBGEMM"}]))


def test_bars_are_well_formed():
    """A bar of a script that does not run, or with an aim below it, would mean nothing."""
    assert len({bar.name for bar in bars.BARS}) == len(bars.BARS)
    for bar in bars.BARS:
        assert bar.script in bench.SCRIPTS
        assert (BENCHMARKS / bar.script).is_file()
        assert bar.aim <= bar.bar if bar.at_most else bar.aim >= bar.bar, bar.name


def arguments(**changed: object) -> argparse.Namespace:
    return argparse.Namespace(**{"rounds": 3, "quick": False, "new_buffers": False, **changed})


def test_document_has_all_that_a_figure_depends_on():
    """A figure without machine, versions or spread cannot be judged later."""

    def measurement(args: argparse.Namespace) -> report.Result:
        times = {"ours": rounds.Times(wall_ms=[1.0, 1.2, 1.1], cpu_ms=[1.0, 1.2, 1.1])}
        return report.Result(
            times=times, figures={"f": [2.0, 3.0, 2.5]}, facts={"medium": "tmpfs"}, threads=1
        )

    made = report.measure("m", measurement, arguments())
    text = json.dumps(report.document("s.py", [made], arguments()))
    document = json.loads(text)
    assert set(document) == {
        *("schema", "script", "rounds", "quick", "new_buffers"),
        *("machine", "versions", "measurements"),
    }
    assert {"cpu", "cores", "memory_gib", "kernel", "page_bytes"} <= set(document["machine"])
    assert {"python", "torch", "trainingcxl"} <= set(document["versions"])
    found = report.find_figure(document, "m", "f")
    assert found is not None
    assert found["median"] == 2.5
    assert found["values"] == [2.0, 3.0, 2.5]
    assert isinstance(found["disturbed"], str)
    assert document["measurements"][0]["times"]["ours"]["wall_ms"]["median"] == 1.1


def test_tables_are_made_of_documents(tmp_path):
    """A page quotes what the scripts found, and says what was disturbed."""

    def measurement(args: argparse.Namespace) -> report.Result:
        return report.Result(figures={"f": [2.0, 3.0]}, doubt="two threads")

    made = report.measure("m", measurement, arguments())
    document = report.document("s.py", [made], arguments())
    (tmp_path / "s.json").write_text(json.dumps(document))
    (tmp_path / "other.json").write_text("[]")
    assert "| f | 2.5 [2, 3] | disturbed: two threads |" in bench.tables(tmp_path)


def test_a_skipped_measurement_says_why(capsys):
    """The reason reaches the document and the reader."""

    def measurement(args: argparse.Namespace) -> report.Result:
        raise report.Skipped("no FBGEMM")

    made = report.measure("m", measurement, arguments())
    document = report.document("s.py", [made], arguments())
    assert report.find_figure(document, "m", "f") == {"skipped": "no FBGEMM"}
    assert "no FBGEMM" in capsys.readouterr().out


def test_a_failed_measurement_leaves_the_others(capsys):
    """One broken measurement must not cost an hour of others, nor pass for nothing."""

    def measurement(args: argparse.Namespace) -> report.Result:
        raise ValueError("broken")

    made = report.measure("m", measurement, arguments())
    document = report.document("s.py", [made], arguments())
    assert "broken" in made["failed"]
    found = report.find_figure(document, "m", "f")
    assert bars.judge(BAR, [found]).word == "fail"
    assert "broken" in capsys.readouterr().out


@pytest.mark.parametrize(("medians", "code"), [([1.6, 1.6], 0), ([1.0, 1.0], 1)])
def test_check_exits_by_the_bars(medians, code, tmp_path, monkeypatch, capsys):
    """`make bench-check` in a script must notice a bar that fails."""
    left = list(medians)

    def run(script: str, target: Path, *options: str) -> dict[str, object]:
        made = {"name": "m", "skipped": "", "figures": {"f": figure(left.pop(0))}}
        return {"measurements": [made]}

    monkeypatch.setattr(bench, "run", run)
    monkeypatch.setattr(bench, "BARS", (BAR,))
    assert bench.check(["s.py"], tmp_path) == code
    assert not left
    assert BAR.name in capsys.readouterr().out
    assert f"| {BAR.name} |" in (tmp_path / "check.md").read_text()


@pytest.mark.parametrize("script", bench.SCRIPTS)
def test_every_bar_names_a_measurement_that_exists(script):
    """A renamed measurement would turn its bars into failures on the day of the benchmark."""
    module = importlib.import_module(Path(script).stem)
    wanted = {bar.measurement for bar in bars.BARS if bar.script == script}
    assert wanted <= set(module.MEASUREMENTS)
