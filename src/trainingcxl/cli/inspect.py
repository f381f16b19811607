"""`trainingcxl inspect`: what a pool holds. Needs no torch and changes nothing."""

import json
from pathlib import Path

import click

from trainingcxl.cli.reporters import key_values

__all__ = ["command"]


@click.command("inspect")
@click.argument("pool", type=click.Path(path_type=Path))
@click.option("--digest", is_flag=True, help="Also read everything and show its sha256.")
@click.option("--device", default="", help="DAX device that holds the pool, or a copy of it.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(pool: Path, digest: bool, device: str, as_json: bool) -> None:
    """Show what POOL holds, where its training stands, and how durable it is.

    The digest is over the logical state (rows, optimizer state, dense part, position), not over
    identity or layout: two pools with equal digests train on alike.
    """
    from trainingcxl.pool import inspect

    found = inspect(pool, device=device, digest=digest)
    if as_json:
        click.echo(json.dumps(found))
        return
    if digest:
        found["digest_gbps"] = f"{found['digest_gbps']} GB/s"
    tables = found.pop("tables")
    for key, value in found.items():
        click.echo(f"{key:<18}{value}")
    click.echo(f"{'tables':<18}{len(tables)}")
    for table in tables:
        click.echo(f"  {key_values(table)}")
