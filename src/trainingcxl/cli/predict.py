"""`trainingcxl predict`: scores of the model in a pool as a Parquet file."""

from pathlib import Path
from typing import Any

import click

from trainingcxl.cli.reporters import key_values, make_reporter
from trainingcxl.cli.scoring import model_options, trained_pool
from trainingcxl.cli.signals import StopSignals
from trainingcxl.errors import ConfigError

__all__ = ["command"]


@click.command("predict")
@model_options
@click.option(
    "--out", required=True, type=click.Path(path_type=Path, dir_okay=False), help="Parquet file."
)
def command(
    pool: Path,
    held_out: bool,
    wrap_ids: bool,
    out: Path,
    assignments: tuple[str, ...],
    as_json: bool,
    **flags: Any,
) -> None:
    """Score data with the model in POOL and write a Parquet file.

    All rows of --data; without it what training held out of its own data. Columns: row (number of
    the sample in the data, from 0; bad lines that are passed over do not count), score (probability
    of a click), and label where the data has one. POOL is only read, as by 'trainingcxl evaluate'.
    """
    if out.exists():
        raise ConfigError(f"'{out}' exists\n  do:    name another file, or remove it")
    with StopSignals(), make_reporter(as_json=as_json) as report:
        report.event("start", pool=str(pool))
        with trained_pool(pool, assignments, flags, report) as model:
            from trainingcxl.data.export import write_scores
            from trainingcxl.data.parquet_source import import_polars
            from trainingcxl.evaluation import refuse_inside

            refuse_inside(pool, out, "--out")
            import_polars()  # before the work, if it is not there
            samples = model.samples(held_out=held_out, wrap_ids=wrap_ids, require_labels=False)
            scores = model.score(samples)
            write_scores(out, rows=scores.rows, logits=scores.logits, labels=scores.labels)
            result = {
                **model.position,
                "data": samples.source,
                "part": samples.part,
                "num_samples": len(scores.rows),
                "out": str(out),
            }
        if as_json:
            report.event("result", pool=str(pool), **result)
    if not as_json:
        click.echo(f"result {key_values({'pool': str(pool), **result})}")
