"""`trainingcxl verify`: all checksums and invariants of a pool. Needs no torch, changes nothing."""

import json
from dataclasses import asdict
from pathlib import Path

import click

__all__ = ["command"]


@click.command("verify")
@click.argument("pool", type=click.Path(path_type=Path))
@click.option("--device", default="", help="DAX device that holds the pool, or a copy of it.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_context
def command(ctx: click.Context, pool: Path, device: str, as_json: bool) -> None:
    """Check every checksum and invariant of POOL; exit with 3 if there is damage.

    Damage inside a table is found where rows have a checksum (--set pool.check_rows=true when the
    pool is created).
    """
    from trainingcxl.pool import inspect, verify

    damages = verify(pool, device=device)
    is_checked = not damages and inspect(pool, device=device)["tables_checked"]
    if as_json:
        click.echo(json.dumps({"pool": str(pool), "damage": [asdict(d) for d in damages]}))
    else:
        for damage in damages:
            click.echo(f"{damage.region}: {damage.what}\n  where: {damage.where}")
        click.echo(f"{pool}: {f'{len(damages)} damaged' if damages else 'no damage found'}")
        if damages:
            click.echo(f"do:    'trainingcxl repair {pool}' says what can be reached all the same")
        if not damages and not is_checked:
            click.echo("its rows have no checksums: damage in the tables would not be seen")
    if damages:
        ctx.exit(3)
