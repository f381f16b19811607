"""`trainingcxl evaluate`: how good the model in a pool is, on data it has not seen."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from trainingcxl.cli.reporters import key_values, make_reporter
from trainingcxl.cli.scoring import model_options, trained_pool
from trainingcxl.cli.signals import StopSignals

__all__ = ["command"]


@click.command("evaluate")
@model_options
def command(
    pool: Path,
    held_out: bool,
    wrap_ids: bool,
    assignments: tuple[str, ...],
    as_json: bool,
    **flags: Any,
) -> None:
    """Judge the model in POOL: exact AUC, log loss, normalized entropy, calibration.

    On all rows of --data; without it on what training held out of its own data. POOL is a pool of
    'trainingcxl train' that no training has open. It is only read: a pool whose process died is
    judged at the batch that its next training would go on from, and stays as it is.
    """
    with StopSignals(), make_reporter(as_json=as_json) as report:
        report.event("start", pool=str(pool))
        with trained_pool(pool, assignments, flags, report) as model:
            samples = model.samples(held_out=held_out, wrap_ids=wrap_ids)
            metrics = asdict(model.score(samples).metrics())
            result = {
                **model.position,
                "data": samples.source,
                "part": samples.part,
                **metrics,
            }
        if as_json:
            report.event("result", pool=str(pool), **result)
    if not as_json:
        click.echo(f"result {key_values({'pool': str(pool), **result})}")
