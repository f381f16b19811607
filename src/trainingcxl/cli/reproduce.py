"""`trainingcxl reproduce`: the paper's evaluation as a model. Needs no torch, no native core."""

import json
from pathlib import Path

import click

from trainingcxl.cli.simulate import wrong_use

__all__ = ["command"]


@click.command("reproduce")
@click.option("--out", type=click.Path(path_type=Path), help="Folder for figures and page.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(out: Path | None, as_json: bool) -> None:
    """Model everything the paper reports and compare: targets, figures, sensitivity, ablations.

    Writes evaluation.json, index.html and each figure as PNG and SVG into the folder of --out.
    All results are a model, not a measurement.
    """
    from trainingcxl.sim.reproduce import evaluate, summary

    if out is None and not as_json:
        raise click.UsageError("give --out DIR, --json, or both")
    with wrong_use():
        evaluation = evaluate()
    found = summary(evaluation)
    if out is not None:
        from trainingcxl.sim.figures import draw_figures
        from trainingcxl.sim.page import render_page

        out.mkdir(parents=True, exist_ok=True)
        page = render_page(evaluation, draw_figures(evaluation, out))
        (out / "index.html").write_text(page, encoding="utf-8")
        text = json.dumps(found, indent=1, allow_nan=False)
        (out / "evaluation.json").write_text(text + "\n", encoding="utf-8")
    if as_json:
        click.echo(json.dumps(found, allow_nan=False))
        return
    click.echo("target      paper      model    error  kind       nothing fitted   (model)")
    for name, row in found["targets"].items():
        click.echo(
            f"{name:<8}{row['paper']:>7g} {row['unit']}{row['model']:>9.2f} {row['unit']}"
            f"{row['error_pct']:>+7.1f} %  {row['kind']:<11}{row['unfitted_model']:>9.2f} "
            f"{row['unit']}   {row['meaning']}"
        )
    click.echo(f"computed in {found['seconds']:.1f} s; page: {out}/index.html")


if __name__ == "__main__":
    command()
