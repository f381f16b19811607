"""`trainingcxl repair`: a damaged pool at a batch that its sound parts reach. Needs no torch."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from trainingcxl.cli.reporters import key_values
from trainingcxl.cli.signals import StopSignals
from trainingcxl.pool.repair import Examination, RepairPoint, examine, repair

__all__ = ["command"]


@click.command("repair")
@click.argument("pool", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("--to", type=click.IntRange(min=0), metavar="BATCH", help="Go to this batch.")
@click.option("--yes", is_flag=True, help="Do it. Without, nothing is changed.")
@click.option("--device", default="", help="DAX device that holds POOL.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_context
def command(
    ctx: click.Context, pool: Path, to: int | None, yes: bool, device: str, as_json: bool
) -> None:
    """Say what of the damaged POOL can be reached and what is lost; with --yes go there.

    For damage alone, as `verify` reports it or an opening refuses it: a sound pool is refused. By
    default the newest exact point is chosen, and none if POOL opens as it is: then what is damaged
    is cleared. The head of the log is kept in the pool's folder first. Rows with a
    wrong checksum stay as they are; of pools without checksums of rows such damage is not seen.

    Exits with 3 if nothing was changed.
    """
    with StopSignals() as stop, stop.deferred():
        found = examine(pool, device=device)
        point = found.choose(pool, to)
        result = _describe(pool, found, point)
        if yes:
            result["head_kept"] = str(repair(pool, point, device=device))
        result["repaired"] = yes
    if as_json:
        click.echo(json.dumps(result))
    else:
        _show(result)
    if not yes:
        ctx.exit(3)


def _describe(pool: Path, found: Examination, point: RepairPoint | None) -> dict[str, Any]:
    lost = []
    if point is None:
        lost.append("dense parts that are damaged: no rewind goes there")
    elif found.committed_batch is not None and point.batch < found.committed_batch:
        lost.append(
            f"batches {point.batch + 1} to {found.committed_batch}: training does them again"
        )
    if any(damage.region == "table" for damage in found.damage):
        lost.append(
            "rows with a wrong checksum: nothing tells what they held, they stay as they are"
        )
    if point is not None and not point.is_exact:
        lost.append(
            f"the dense part after batch {point.dense_batch}: rows of batch {point.batch} go on "
            "with that older one"
        )
    return {
        "pool": str(pool),
        "damage": [asdict(damage) for damage in found.damage],
        "refusal": found.refusal,
        "committed_batch": found.committed_batch,
        "reachable": [
            {**asdict(one), "kind": "exact" if one.is_exact else "latest"} for one in found.points
        ],
        "chosen": None if point is None else point.batch,
        "lost": lost,
    }


def _show(result: dict[str, Any]) -> None:
    for damage in result["damage"]:
        click.echo(f"{damage['region']}: {damage['what']}\n  where: {damage['where']}")
    if result["refusal"]:
        click.echo(f"refused: {result['refusal']}")
    for point in result["reachable"]:
        click.echo(f"reachable: {key_values(point)}")
    for text in result["lost"]:
        click.echo(f"lost: {text}")
    chosen = result["chosen"]
    where = "the batch that any opening finds" if chosen is None else f"batch {chosen}"
    if result["repaired"]:
        click.echo(f"repaired: at {where}; the head as it was: {result['head_kept']}")
    else:
        click.echo(f"nothing was changed; --yes goes to {where}")
