"""The evaluation as one self-contained HTML page: no script, no font, no request."""

import base64
import html
import math
from collections.abc import Iterable, Sequence

from trainingcxl.sim.calibration import frozen_calibration
from trainingcxl.sim.figures import FIGURES
from trainingcxl.sim.reproduce import Evaluation, error_percent, order_violations
from trainingcxl.sim.systems import SYSTEMS
from trainingcxl.sim.targets import TARGETS
from trainingcxl.sim.variants import Variant

__all__ = ["render_page"]

_STYLE = """
:root { color-scheme: light; }
body { font: 15px/1.45 system-ui, sans-serif; color: #111; background: #fff;
       max-width: 70rem; margin: 2rem auto; padding: 0 1rem; }
h1, h2 { line-height: 1.2; } h2 { margin-top: 2.2rem; border-bottom: 1px solid #999; }
table { border-collapse: collapse; margin: 0.8rem 0; font-variant-numeric: tabular-nums; }
th, td { border: 1px solid #999; padding: 0.2rem 0.5rem; text-align: right; }
th.text, td.text { text-align: left; }
td { white-space: nowrap; } td.text { white-space: normal; }
thead th { background: #eee; } .scroll { overflow-x: auto; } .small { font-size: 0.8em; }
tr.missed td { font-weight: bold; }
figure { margin: 1rem 0; } figure img { max-width: 100%; height: auto; }
figcaption { color: #333; } small { font-size: 0.85em; }
@media print { body { max-width: none; margin: 0; font-size: 10pt; }
  figure, tr { break-inside: avoid; } h2 { break-after: avoid; }
  thead { display: table-header-group; } }
"""
_MISSED_PERCENT = 10.0


def _table(
    head: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    text: Sequence[int] = (0,),
    missed: Sequence[int] = (),
    style: str = "",
) -> str:
    """Build a table; cells are escaped here. `text` are the columns that hold words."""

    def cells(tag: str, row: Sequence[str]) -> list[str]:
        kinds = [f'<{tag} class="text">' if i in text else f"<{tag}>" for i in range(len(row))]
        return [f"{kind}{html.escape(cell)}</{tag}>" for kind, cell in zip(kinds, row, strict=True)]

    lines = [f'<div class="scroll {style}"><table><thead><tr>', *cells("th", head)]
    lines.append("</tr></thead><tbody>")
    for index, row in enumerate(rows):
        lines.append('<tr class="missed">' if index in missed else "<tr>")
        lines += [*cells("td", row), "</tr>"]
    return "".join([*lines, "</tbody></table></div>"])


def _targets(evaluation: Evaluation) -> str:
    rows, missed = [], []
    for index, (name, target) in enumerate(TARGETS.items()):
        value, bare = evaluation.targets[name], evaluation.unfitted[name]
        error = error_percent(name, value)
        if abs(error) > _MISSED_PERCENT:
            missed.append(index)
        rows.append(
            [
                name,
                target.meaning,
                f"{target.paper:g} {target.unit}",
                f"{value:.1f} {target.unit}",
                f"{error:+.1f} %",
                "fitted" if target.is_fitted else "predicted",
                f"{bare:.1f} {target.unit}",
                f"{error_percent(name, bare):+.1f} %",
                target.note + ("; MISSED" if abs(error) > _MISSED_PERCENT else ""),
            ]
        )
    head = (
        "target",
        "meaning",
        "paper",
        "model",
        "error",
        "kind",
        "nothing fitted",
        "its error",
        "note",
    )
    return _table(head, rows, text=(0, 1, 5, 8), missed=missed)


def _times(evaluation: Evaluation) -> str:
    blocks = []
    for grid, models in (
        (evaluation.grid, evaluation.models),
        (evaluation.other_grid, evaluation.other_models),
    ):
        rows = []
        for model in models:
            times = [grid[name, model.name].seconds_per_batch for name in SYSTEMS]
            speedup = (
                grid["PMEM", model.name].seconds_per_batch
                / grid["CXL", model.name].seconds_per_batch
            )
            rows.append([model.name, *(f"{t * 1e3:,.1f}" for t in times), f"{speedup:.2f}x"])
        blocks.append(_table(("ms a batch", *SYSTEMS, "CXL over PMEM"), rows))
    return "".join(blocks)


def _variants(variants: Sequence[Variant], base: dict[str, float]) -> str:
    rows = [["(default)", "", *(f"{base[n]:.1f}" for n in TARGETS), ""]]
    rows += [
        [v.name, v.why, *(f"{v.values[n]:.1f}" for n in TARGETS), "yes" if v.is_refitted else "no"]
        for v in variants
    ]
    return _table(("variant", "why", *TARGETS, "K fitted again"), rows, text=(0, 1))


def _shift(move: dict[str, float] | None, name: str) -> str:
    """Show how one target moved; "-" where the constant's range ends."""
    if move is None:
        return "-"
    return "0" if abs(move[name]) < 0.005 else f"{move[name]:+.2f}"


def _sensitivity(evaluation: Evaluation) -> str:
    rows = []
    for key, moves in evaluation.sensitivity.items():
        cells = []
        for name in TARGETS:
            pair = [_shift(moves.get(label), name) for label in ("-20 %", "+20 %")]
            cells.append(" / ".join(pair) if any(p not in ("0", "-") for p in pair) else "")
        note = evaluation.hardware.notes[key]
        rows.append([key, f"{evaluation.hardware.values()[key]:g}", note.tag, *cells])
    return _table(("constant", "value", "tag", *TARGETS), rows, style="small")


def _costs(evaluation: Evaluation) -> str:
    rows = []
    for name, row in evaluation.costs.items():
        years = row["lifetime_years"]
        rows.append(
            [
                name,
                row["medium"],
                f"{row['price_ratio']:g}x",
                f"{row['written_gb_per_day']:,.0f}",
                "not limited" if years == math.inf or years > 1e3 else f"{years:.2f}",
                f"{row['recovery_s']:.1f}",
            ]
        )
    head = (
        "system, RM2",
        "medium",
        "price per GB, DRAM = 1",
        "GB written a day",
        "years to rated writes",
        "recovery, s",
    )
    return _table(head, rows)


def _figure(name: str, svg: str) -> str:
    data = base64.b64encode(svg.encode()).decode()
    caption = html.escape(FIGURES[name][1])
    return (
        f'<figure><img id="figure-{name}" alt="{caption}" '
        f'src="data:image/svg+xml;base64,{data}"><figcaption>{caption}</figcaption></figure>'
    )


def _calibration() -> str:
    calibration = frozen_calibration()
    rows = [
        [key, f"{value:g}", calibration.fitted_on[key]]
        for key, value in calibration.constants.items()
    ]
    return _table(("constant", "value", "fitted on"), rows, text=(0, 2))


def render_page(evaluation: Evaluation, svgs: dict[str, str]) -> str:
    """Return the whole page as text.

    Args:
        evaluation: Results, all of them a model.
        svgs: Text of each figure, by name of `FIGURES`.
    """
    violations = order_violations(evaluation.grid, evaluation.models)
    order = (
        "holds for every model"
        if not violations
        else "is violated: " + html.escape("; ".join(violations))
    )
    worst = max(abs(d) for d in evaluation.engines_differ.values())
    pictures = {name: _figure(name, svg) for name, svg in svgs.items()}
    sections = [
        "<h1>The evaluation, as a model</h1>",
        "<p>Every number below comes from a model of the hardware, never from a measurement. "
        "Fitted targets (T1, T3, T4) have one constant each and prove nothing; predicted ones "
        "(T2, T5, T6, T7) are not used to choose any constant. A row in bold is a miss of more "
        f"than {_MISSED_PERCENT:g} %.</p>",
        "<h2>Targets</h2>",
        _targets(evaluation),
        f"<p>The order CXL &lt;= CXL-B &lt;= CXL-D &lt;= PCIe &lt; PMEM &lt; SSD {order}. "
        f"The event-driven engine differs from the closed form by at most {worst:.3%}.</p>",
        f"<p>Calibration version {frozen_calibration().version}:</p>",
        _calibration(),
        "<h2>Time of a batch</h2>",
        _times(evaluation),
        pictures["breakdown"],
        "<h2>Utilisation over time</h2>",
        pictures["utilisation"],
        "<h2>Energy</h2>",
        pictures["energy"],
        "<h2>The ideas one by one</h2>",
        pictures["ladder"],
        "<h2>Ablations of structural assumptions, and ideas that would explain misses</h2>",
        "<p>None of these is in the default.</p>",
        _variants(evaluation.structural_variants, evaluation.targets),
        "<h2>Other workloads and media</h2>",
        _variants(evaluation.workload_variants, evaluation.targets),
        "<h2>Sensitivity</h2>",
        "<p>Change of each target, in its own unit, when one constant moves by -20 % / +20 % "
        "(whole numbers by at least one); empty where it does not move. Nothing is fitted again."
        "</p>",
        _sensitivity(evaluation),
        "<h2>Beyond the paper</h2>",
        pictures["pools"],
        pictures["goodput"],
        _costs(evaluation),
        f"<p><small>Computed in {evaluation.seconds:.1f} s.</small></p>",
    ]
    policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
    head = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<link rel="icon" href="data:,">'
        f"<title>TrainingCXL: the evaluation, as a model</title><style>{_STYLE}</style></head>"
    )
    return f"{head}<body>{''.join(sections)}</body></html>\n"
