"""`trainingcxl inspect`: what a pool holds. Needs no torch and changes nothing."""

import json
from pathlib import Path

import click

__all__ = ["command"]


@click.command("inspect")
@click.argument("pool", type=click.Path(path_type=Path))
@click.option("--digest", is_flag=True, help="Also read everything and show its sha256.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(pool: Path, digest: bool, as_json: bool) -> None:
    """Show what POOL holds, where its training stands, and how durable it is.

    The digest is over the logical state (rows, optimizer state, dense part, position), not over
    identity or layout: two pools with equal digests train on alike.
    """
    from trainingcxl.pool import inspect

    found = inspect(pool, digest=digest)
    if as_json:
        click.echo(json.dumps(found))
        return
    for key, value in found.items():
        if key != "tables":
            click.echo(f"{key:<17}{value}")
            continue
        click.echo(f"{key:<17}{len(value)}")
        for table in value:
            click.echo("  " + " ".join(f"{name}={text}" for name, text in table.items()))
