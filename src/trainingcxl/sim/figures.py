"""Figures of the evaluation: colour-blind-safe colours, hatches beside them, readable in print."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from trainingcxl.sim.reproduce import Evaluation
from trainingcxl.sim.schedule import CATEGORIES
from trainingcxl.sim.simulate import Result

__all__ = ["FIGURES", "draw_figures"]

# Okabe and Ito's palette, told apart by the hatch as well.
_STYLE: dict[str, tuple[str, str]] = {
    "bottom MLP": ("#56B4E9", ""),
    "top MLP": ("#0072B2", "//"),
    "embedding": ("#E69F00", ""),
    "transfer": ("#009E73", "xx"),
    "checkpoint": ("#D55E00", "\\\\"),
    "stalls": ("#FFFFFF", ".."),
    "GPU": ("#0072B2", "//"),
    "host CPU": ("#E69F00", ""),
    "host DRAM": ("#F0E442", "xx"),
    "pool medium": ("#D55E00", "\\\\"),
    "near-memory logic": ("#009E73", ".."),
    "link": ("#000000", ""),
    "log on ssd": ("#CC79A7", "--"),
}
_LINES = ("o-", "s--", "^-.", "D:", "v-", "P--")
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000", "#E69F00")
_BARS = ("PMEM", "DRAM", "PCIe", "CXL-D", "CXL-B", "CXL")


def _stack(
    axes: Axes, names: Sequence[str], rows: Sequence[dict[str, float]], parts: Sequence[str]
) -> None:
    base = [0.0] * len(names)
    for part in parts:
        values = [row.get(part, 0.0) for row in rows]
        colour, hatch = _STYLE[part]
        axes.bar(
            range(len(names)),
            values,
            bottom=base,
            label=part,
            color=colour,
            hatch=hatch,
            edgecolor="black",
            linewidth=0.5,
        )
        base = [b + v for b, v in zip(base, values, strict=True)]
    axes.set_xticks(range(len(names)), names, rotation=45, ha="right")


def _grid_of_bars(
    evaluation: Evaluation,
    pick: Callable[[Result], dict[str, float]],
    parts: Sequence[str],
    ylabel: str,
    ssd_unit: Callable[[Result], str],
) -> Figure:
    figure = Figure(figsize=(11, 4), layout="constrained")
    panels = figure.subplots(1, len(evaluation.models), sharey=True)
    for axes, model in zip(panels, evaluation.models, strict=True):
        unit = sum(pick(evaluation.grid["PMEM", model.name]).values())
        rows = [
            {k: v / unit for k, v in pick(evaluation.grid[name, model.name]).items()}
            for name in _BARS
        ]
        _stack(axes, _BARS, rows, parts)
        ssd = evaluation.grid["SSD", model.name]
        ratio = sum(pick(ssd).values()) / unit
        axes.set_title(f"{model.name}\n(SSD: {ratio:.0f}x, {ssd_unit(ssd)})", fontsize=9)
        axes.grid(axis="y", linewidth=0.3)
    panels[0].set_ylabel(ylabel)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(parts), fontsize=8)
    return figure


def breakdown(evaluation: Evaluation) -> Figure:
    """Exposed time by phase, per system and model, PMEM = 1."""
    return _grid_of_bars(
        evaluation,
        lambda r: r.breakdown_s,
        ("embedding", "checkpoint", "transfer", "bottom MLP", "top MLP", "stalls"),
        "time a batch, PMEM = 1 (model)",
        lambda r: f"{r.seconds_per_batch:.0f} s a batch",
    )


def energy(evaluation: Evaluation) -> Figure:
    """Energy by component, per system and model, PMEM = 1."""
    parts = (
        "pool medium",
        "host CPU",
        "host DRAM",
        "near-memory logic",
        "GPU",
        "log on ssd",
        "link",
    )
    return _grid_of_bars(
        evaluation,
        lambda r: r.energy_j,
        parts,
        "energy a batch, PMEM = 1 (model)",
        lambda r: f"{r.total_energy_j / 1e3:.1f} kJ a batch",
    )


def utilisation(evaluation: Evaluation) -> Figure:
    """What runs on memory, link and GPU over three steady batches."""
    figure = Figure(figsize=(11, 7), layout="constrained")
    systems, models = ("PCIe", "CXL-D", "CXL-B", "CXL"), ("RM2", "RM4")
    panels = figure.subplots(len(systems), len(models))
    for row, system in enumerate(systems):
        for column, model in enumerate(models):
            axes = panels[row][column]
            _lanes(axes, evaluation.grid[system, model])
            axes.set_title(f"{system}, {model}", fontsize=9, loc="left")
    for axes in panels[-1]:
        axes.set_xlabel("ms (model)")
    handles = [
        mpl.patches.Patch(facecolor=c, hatch=h, edgecolor="black", label=name)
        for name, (c, h) in _STYLE.items()
        if name in CATEGORIES
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=5, fontsize=8)
    return figure


def _lanes(axes: Axes, result: Result) -> None:
    lanes = {"memory": 2.0, "link": 1.0, "GPU": 0.0}
    end = max(span.end_s for span in result.timeline)
    start = end - 3.0 * result.seconds_per_batch
    for span in result.timeline:
        lane, category = _lane(span.step)
        colour, hatch = _STYLE[category]
        pieces = [
            ((max(a, start) - start) * 1e3, (b - max(a, start)) * 1e3) for a, b in span.active
        ]
        pieces = [piece for piece in pieces if piece[1] > 0.0]
        if pieces:
            axes.broken_barh(
                pieces,
                (lanes[lane] - 0.4, 0.8),
                facecolors=colour,
                hatch=hatch,
                edgecolor="black",
                linewidth=0.3,
            )
    axes.set_yticks(list(lanes.values()), list(lanes))
    axes.set_xlim(0.0, (end - start) * 1e3)


def _lane(step: str) -> tuple[str, str]:
    if step in ("top", "bottom_forward", "bottom_backward"):
        return "GPU", "top MLP" if step == "top" else "bottom MLP"
    if step.startswith(("vectors", "gradients", "correct")):
        return "link", "transfer"
    if step.startswith("log"):
        on_link = step.endswith(("_out", "_back", "_host", "_memory", "_calls"))
        return ("link" if on_link else "memory"), "checkpoint"
    return "memory", "embedding"


def ladder(evaluation: Evaluation) -> Figure:
    """Ideas added one by one to PMEM, and taken alone out of CXL."""
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    for axes, (key, title, unit) in zip(
        figure.subplots(1, 2),
        (
            ("added", "ideas added one by one (PMEM = 1)", "PMEM"),
            ("removed", "one idea taken out of CXL (CXL = 1)", "CXL"),
        ),
        strict=True,
    ):
        rows = evaluation.ladder[key]
        width = 0.8 / len(evaluation.models)
        for index, model in enumerate(evaluation.models):
            base = evaluation.grid[unit, model.name].seconds_per_batch
            places = [i + (index - 1.5) * width for i in range(len(rows))]
            values = [row[model.name] / base for row in rows.values()]
            hatch = ("", "//", "xx", "..")[index % 4]
            axes.bar(
                places,
                values,
                width,
                color=_COLOURS[index],
                alpha=0.75,
                hatch=hatch,
                edgecolor="black",
                linewidth=0.5,
                label=model.name,
            )
        axes.set_xticks(range(len(rows)), list(rows), rotation=30, ha="right", fontsize=8)
        axes.set_title(title, fontsize=9)
        axes.set_ylabel("time a batch (model)")
        axes.legend(fontsize=8)
        axes.grid(axis="y", linewidth=0.3)
    return figure


def pools(evaluation: Evaluation) -> Figure:
    """Samples per second and the busiest unit over the number of expanders."""
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    for index, (gpus, points) in enumerate(evaluation.pools.items()):
        counts = [p.fabric.devices for p in points]
        style = _LINES[index]
        label = f"{gpus} GPU" + ("s" if gpus > 1 else "")
        rate = [p.samples_per_second for p in points]
        left.loglog(counts, rate, style, color=_COLOURS[index], label=label, markersize=4)
    left.set_xlabel("expanders in the pool")
    left.set_ylabel("samples a second (model)")
    left.legend(fontsize=8)
    left.grid(linewidth=0.3)
    gpus, points = list(evaluation.pools.items())[1]
    shown = ("channel", "gpu", "device link up", "uplink 0 up", "uplink 1 up", "GPU link up")
    for index, name in enumerate(shown):
        values = [100.0 * p.utilisation.get(name, 0.0) for p in points]
        counts = [p.fabric.devices for p in points]
        right.semilogx(
            counts, values, _LINES[index], color=_COLOURS[index], label=name, markersize=4
        )
    right.set_xlabel("expanders in the pool")
    right.set_ylabel(f"busy, {gpus} GPUs, % (model)")
    right.legend(fontsize=8)
    right.grid(linewidth=0.3)
    return figure


def goodput(evaluation: Evaluation) -> Figure:
    """Lasting batches per second over the mean time between failures."""
    figure = Figure(figsize=(9.5, 4.2), layout="constrained")
    axes = figure.subplots()
    for index, (name, curve) in enumerate(evaluation.goodput.items()):
        hours, rate = zip(*curve, strict=True)
        axes.loglog(hours, rate, _LINES[index], color=_COLOURS[index], label=name, markersize=4)
    axes.set_xlabel("mean time between failures, hours")
    axes.set_ylabel("lasting batches a second (model)")
    figure.legend(loc="outside right upper", fontsize=8)
    axes.grid(linewidth=0.3)
    return figure


FIGURES: dict[str, tuple[Callable[[Evaluation], Figure], str]] = {
    "breakdown": (
        breakdown,
        "Exposed time of a batch by phase. An instant at which several phases run counts for the "
        "MLPs, then transfer, embedding, checkpoint; a hidden checkpoint has no area.",
    ),
    "utilisation": (
        utilisation,
        "What memory, link and GPU do over three steady batches. The relaxed system keeps the "
        "memory (RM2) or the GPU (RM4) busy all the time.",
    ),
    "energy": (energy, "Energy of a batch by component, relative to PMEM."),
    "ladder": (ladder, "What each idea contributes, added in the paper's order and removed alone."),
    "pools": (
        pools,
        "Beyond the paper: RM2 on pools of up to 4,095 expanders behind switches of 32 ports with "
        "4 uplinks; each GPU trains a batch of its own.",
    ),
    "goodput": (
        goodput,
        "Beyond the paper: RM2 with tables that fill the 2 TB pool; batches that last failures. "
        "A log for every batch loses one batch a failure; snapshots lose half an interval.",
    ),
}


def draw_figures(evaluation: Evaluation, folder: Path) -> dict[str, str]:
    """Draw every figure as PNG and SVG into `folder`.

    Returns:
        The text of each SVG by figure name. Blocks; writes two files a figure.
    """
    found = {}
    settings: Any = {
        "svg.fonttype": "path",
        "svg.hashsalt": "trainingcxl",
        "hatch.linewidth": 0.6,
    }
    with mpl.rc_context(settings):
        for name, (draw, _) in FIGURES.items():
            figure = draw(evaluation)
            figure.savefig(folder / f"{name}.png", dpi=110)
            path = folder / f"{name}.svg"
            figure.savefig(path, metadata={"Date": None, "Creator": None})
            found[name] = path.read_text(encoding="utf-8")
    return found
