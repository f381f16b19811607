"""A profile as a JSON file (docs/simulator.md has its schema) and as a table for people.

The JSON file is a trace in Chrome's format as well: ui.perfetto.dev reads `traceEvents`, which
comes first, and passes over the rest.
"""

import io
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainingcxl.errors import ConfigError
from trainingcxl.profile.measured import TRAINER, BatchRecord, Span

if TYPE_CHECKING:
    from trainingcxl.profile.profile import Profile

__all__ = ["check_writable", "summary", "table_text", "write_profile"]

_TRACKS = (TRAINER, "log writer", "journal writer", "table sync")
_STEP_TRACK = "steps"
_DENSE = ("dense_forward", "loss", "dense_backward", "dense_update")
_NO_STEP = ("evaluation", "profile")  # within the loop over batches, but not of a step


def check_writable(path: Path) -> Path:
    """Refuse a file that cannot be written, before the time for it is spent.

    Raises:
        ConfigError: Its folder does not exist, or it is a folder itself.
    """
    if path.is_dir() or not path.parent.is_dir():
        what = "is a folder" if path.is_dir() else f"is in '{path.parent}', which is no folder"
        raise ConfigError(f"the profile '{path}' {what}\n  do:    name a file in a folder there is")
    return path


def write_profile(path: Path, profile: "Profile") -> None:
    """Write summary and trace."""
    tree = {"traceEvents": _trace_events(profile), "displayTimeUnit": "ms", **summary(profile)}
    path.write_text(json.dumps(tree, separators=(",", ":")) + "\n", encoding="utf-8")


def summary(profile: "Profile") -> dict[str, Any]:
    """Everything but the trace, as JSON data; `phases`, `spans` and `locality` are what the
    simulator takes.
    """
    totals = profile.totals
    count = max(1, totals.batches)
    pool = profile.run.pool
    step = {name: 1e-9 * totals.phases[name] / count for name in totals.ordered_phases()}
    seconds = 1e-9 * totals.step_ns - count * sum(step.get(name, 0.0) for name in _NO_STEP)
    counts = {name: value / count for name, value in totals.counts.items()}
    rows = counts.get("rows", 0.0)
    tree: dict[str, Any] = {
        "schema": 1,
        "kind": "measured",
        "system": "CXL" if pool.lookup == "relaxed" else "CXL-B",
        "medium": pool.medium,
        "durability": pool.durability,
        "log": "announced",
        "batches": totals.batches,
        "seconds": seconds,
        "phases": _simulator_phases(profile, step, counts),
        "spans": _simulator_spans(profile),
        "step": {"seconds": 1e-9 * totals.step_ns / count, "phases": step},
        "background": [
            {"track": track, "phase": name, "seconds": 1e-9 * spent / count}
            for (track, name), spent in sorted(totals.background.items())
        ],
        "rows": {
            "lookups": counts.get("lookups", 0.0),
            "distinct": rows,
            "recurring_share": _share(counts.get("recurring_rows"), rows),
            "first_touch_share": _share(counts.get("first_rows"), rows),
            "handed_over_share": _share(counts.get("rows_handed_over"), rows),
            "corrected_lookups_share": _share(
                counts.get("corrected_lookups"), counts.get("lookups", 0.0)
            ),
            "announced_batches_share": counts.get("is_announced", 0.0),
            "fused_batches_share": counts.get("is_fused", 0.0),
        },
        "bytes": _bytes(counts),
        "write_amplification": _amplification(counts),
        "per_batch": [_per_batch(record) for record in profile.kept],
        "dropped_spans": profile.dropped,
    }
    if profile.model is not None:
        tree["model"] = dict(profile.model)
    if rows and counts["lookups"]:
        tree["locality"] = {
            "reuse": counts["recurring_lookups"] / counts["lookups"],
            "unique_share": rows / counts["lookups"],
        }
    return tree


def _share(part: float | None, whole: float) -> float:
    return (part or 0.0) / whole if whole else 0.0


def _bytes(counts: dict[str, float]) -> dict[str, dict[str, float]]:
    """Of a batch. A fused log reads nothing of its own: its rows are in cache for the update."""
    rows = counts.get("row_bytes", 0.0)
    is_fused = counts.get("is_fused", 0.0)
    return {
        "read": {
            "lookup": counts.get("lookup_bytes", 0.0),
            "undo_log": rows * (1.0 - is_fused),
            "update": rows,
        },
        "written": {
            "rows": rows,
            "undo_log": counts.get("log_bytes", 0.0),
            "journal": counts.get("journal_bytes", 0.0),
            "slot": counts.get("slot_bytes", 0.0),
            "dense_log": counts.get("dense_bytes", 0.0),
        },
    }


def _amplification(counts: dict[str, float]) -> dict[str, float]:
    """Bytes written over the bytes of the distinct rows (weights and optimizer state)."""
    written = _bytes(counts)["written"]
    rows = written["rows"]
    log = written["undo_log"] + written["journal"]
    return {
        "undo_log": _share(written["undo_log"], rows),
        "journal": _share(written["journal"], rows),
        "rows_and_logs": _share(rows + log, rows),
        "all": _share(sum(written.values()), rows),
    }


def _per_batch(record: BatchRecord) -> dict[str, Any]:
    counts, rows = record.counts, record.counts["rows"]
    return {
        "batch": record.batch,
        "seconds": 1e-9 * (record.end - record.begin),
        "phases": {name: 1e-9 * spent for name, spent in record.phases.items()},
        "rows": rows,
        "recurring_share": _share(counts["recurring_rows"], rows),
        "first_touch_share": _share(counts["first_rows"], rows),
        "bytes": _bytes(counts),
        "write_amplification": _amplification(counts)["all"],
    }


# --- what the simulator takes


def _simulator_phases(
    profile: "Profile", step: dict[str, float], counts: dict[str, float]
) -> list[dict[str, Any]]:
    """The step's phases under the names of the paper's schedule, per batch."""
    count = max(1, profile.totals.batches)
    beside = {name: 1e-9 * spent / count for (_, name), spent in profile.totals.background.items()}
    moved = _bytes(counts)
    is_relaxed = profile.run.pool.lookup == "relaxed"
    early = step.get("early_wait", 0.0) + beside.get("early_lookup", 0.0)
    now = step.get("lookup", 0.0) + step.get("correct", 0.0)
    phases = {
        "lookup": (early if is_relaxed else now, moved["read"]["lookup"], 0.0),
        **({"correct": (now, 0.0, 0.0)} if is_relaxed else {}),
        "dense": (sum(step.get(name, 0.0) for name in _DENSE), 0.0, 0.0),
        "log_rows": (
            step.get("log", 0.0) + beside.get("undo_log", 0.0) + beside.get("first_log", 0.0),
            moved["read"]["undo_log"],
            moved["written"]["undo_log"] + moved["written"]["journal"],
        ),
        "log_dense": (
            step.get("dense_capture", 0.0) + beside.get("dense_log", 0.0),
            moved["written"]["dense_log"],
            moved["written"]["dense_log"],
        ),
        "update": (
            step.get("reduce", 0.0) + step.get("update", 0.0),
            moved["read"]["update"],
            moved["written"]["rows"],
        ),
    }
    return [
        {"name": name, "seconds": seconds, "bytes_read": read, "bytes_written": written}
        for name, (seconds, read, written) in phases.items()
    ]


def _simulator_spans(profile: "Profile") -> list[dict[str, Any]]:
    """When lookup, dense part, row log and update of each kept batch ran.

    The dense part counts from the end of the lookup, or of its correction. A relaxed log of the
    dense part belongs to no single batch and has no spans.
    """
    if not profile.spans:
        return []
    origin = min(span.begin for span in profile.spans)
    kept = {record.batch for record in profile.kept}
    evaluations = [span for span in profile.spans if span.phase == "evaluation"]
    ranges: dict[tuple[int, str], tuple[int, int]] = {}
    names = {"lookup": "lookup", "update": "update", "undo_log": "log_rows"}
    if profile.run.pool.lookup == "relaxed":
        names |= {"early_lookup": "lookup", "early_wait": "lookup", "lookup": "correct"}

    def extend(batch: int, phase: str, begin: int, end: int) -> None:
        old = ranges.get((batch, phase), (begin, end))
        ranges[batch, phase] = min(old[0], begin), max(old[1], end)

    for span in profile.spans:
        if span.batch not in kept or any(e.begin <= span.begin < e.end for e in evaluations):
            continue
        if span.phase in names:
            extend(span.batch, names[span.phase], span.begin, span.end)
    looked_up = names["lookup"]
    for span in profile.spans:
        if span.phase in _DENSE and (span.batch, looked_up) in ranges:
            begin = max(span.begin, ranges[span.batch, looked_up][1])
            extend(span.batch, "dense", begin, max(begin, span.end))
    return [
        {"batch": batch, "phase": name, "start": 1e-9 * (b - origin), "end": 1e-9 * (e - origin)}
        for (batch, name), (b, e) in sorted(ranges.items())
    ]


# --- the trace


def _trace_events(profile: "Profile") -> list[dict[str, Any]]:
    """Spans as complete events; a track for each thread and one for whole steps."""
    if not profile.kept:
        return []
    origin = profile.kept[0].begin
    tracks = [_STEP_TRACK, *_TRACKS]
    events: list[dict[str, Any]] = [_named("process_name", 0, name="trainingcxl")]
    for number, track in enumerate(tracks):
        events.append(_named("thread_name", number, name=track))
        events.append(_named("thread_sort_index", number, sort_index=number))
    for record in profile.kept:
        whole = Span(f"batch {record.batch}", _STEP_TRACK, record.batch, record.begin, record.end)
        events.append(_complete(whole, 0, origin))
    events += [
        _complete(span, tracks.index(span.track), origin)
        for span in sorted(profile.spans, key=lambda span: (span.begin, -span.end))
        if span.begin >= origin and span.end > span.begin
    ]
    for record in profile.kept:
        at = 1e-3 * (record.end - origin)
        shares = {
            "recurring": _share(record.counts["recurring_rows"], record.counts["rows"]),
            "first touch": _share(record.counts["first_rows"], record.counts["rows"]),
        }
        written = _bytes(record.counts)["written"]
        for name, values in (("share of rows", shares), ("bytes written", written)):
            events.append({"name": name, "ph": "C", "pid": 1, "tid": 0, "ts": at, "args": values})
    return events


def _named(kind: str, track: int, **values: Any) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": 1, "tid": track, "args": values}


def _complete(span: Span, track: int, origin: int) -> dict[str, Any]:
    return {
        "name": span.phase,
        "ph": "X",
        "pid": 1,
        "tid": track,
        "ts": 1e-3 * (span.begin - origin),  # microseconds, as the format has them
        "dur": 1e-3 * (span.end - span.begin),
        "args": {"batch": span.batch},
    }


# --- for people


def table_text(profile: "Profile") -> str:
    """Time of each phase a batch, what ran beside, rows and bytes."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    tree = summary(profile)
    step = tree["step"]
    if not profile.totals.batches:
        return "profile: no batch was committed\n"
    times = Table(box=box.SIMPLE_HEAD, title=f"profile of {tree['batches']} batches")
    for name in ("phase", "ms a batch", "share of the step"):
        times.add_column(name, justify="left" if name == "phase" else "right")
    for name, seconds in step["phases"].items():
        times.add_row(name, f"{1e3 * seconds:.3f}", f"{seconds / step['seconds']:.1%}")
    times.add_section()
    times.add_row("step", f"{1e3 * step['seconds']:.3f}", "100.0%")
    for one in tree["background"]:
        name = f"beside it: {one['track']}, {one['phase']}"
        share = f"{one['seconds'] / step['seconds']:.1%}"
        times.add_row(name, f"{1e3 * one['seconds']:.3f}", share)
    rows, moved, amplified = tree["rows"], tree["bytes"], tree["write_amplification"]
    lines = [
        f"rows a batch     {rows['distinct']:,.0f} distinct of {rows['lookups']:,.0f} lookups; "
        f"{rows['recurring_share']:.1%} recur from the batch before, "
        f"{rows['first_touch_share']:.1%} change for the first time",
        "bytes read       " + _bytes_text(moved["read"]),
        "bytes written    " + _bytes_text(moved["written"]),
        f"for each byte of a distinct row {amplified['rows_and_logs']:.2f} are written for rows "
        f"and their logs, {amplified['all']:.2f} with the dense part",
    ]
    if profile.dropped:
        lines.append(f"{profile.dropped} spans did not fit: times of nested phases are too low")
    text = io.StringIO()
    Console(file=text, width=100).print(times)
    return text.getvalue() + "\n".join(lines) + "\n"


def _bytes_text(moved: dict[str, float]) -> str:
    parts = [f"{name} {value / 1e6:.3f} MB" for name, value in moved.items() if value]
    return f"{sum(moved.values()) / 1e6:.3f} MB a batch" + (
        f" ({', '.join(parts)})" if parts else ""
    )
