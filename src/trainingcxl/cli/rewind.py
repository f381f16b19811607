"""`trainingcxl rewind`: back to an earlier batch of a pool. Needs no torch."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from trainingcxl.cli.reporters import key_values
from trainingcxl.cli.signals import StopSignals
from trainingcxl.pool import Pool, RewindPoint
from trainingcxl.pool.inspection import level_of

__all__ = ["command"]


@click.command("rewind")
@click.argument("pool", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("--list", "as_list", is_flag=True, help="List the batches that can be reached.")
@click.option("--exact", "only_exact", is_flag=True, help="Of these the exact points alone.")
@click.option("--batches", type=click.IntRange(min=1), help="Go back by at least so many batches.")
@click.option("--to", type=click.IntRange(min=0), metavar="BATCH", help="Go back to this batch.")
@click.option("--device", default="", help="DAX device that holds the pool.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(
    pool: Path,
    as_list: bool,
    only_exact: bool,
    batches: int | None,
    to: int | None,
    device: str,
    as_json: bool,
) -> None:
    """Take POOL back to an earlier batch; the batches after it are gone for good.

    Training goes on from an exact point bit for bit: dense part, optimizers, position and random
    generators are those of that batch. Of other batches within the undo log's reach the tables
    alone are known; they are listed, no rewind goes there.

    Killed at any instant, the next opening finds POOL at the old batch or at the new one. A rewind
    that had been decided is completed by whatever opens POOL next, this command included, which
    then goes back no further.
    """
    if only_exact and not as_list:
        raise click.UsageError("--exact belongs to --list: every rewind goes to an exact point")
    if sum((as_list, batches is not None, to is not None)) != 1:
        raise click.UsageError("give one of --list, --batches N, --to BATCH")
    if as_list:
        with Pool(pool, read_only=True, device=device) as source:
            committed, points = source.committed_batch, source.rewind_points()
        points = [point for point in points if point.is_exact or not only_exact]
        _show(pool, committed, points, only_exact=only_exact, as_json=as_json)
        return
    with (
        StopSignals() as stop,
        Pool(pool, durability=level_of(pool, device), device=device) as taken,
        stop.deferred(),
    ):
        before = taken.committed_batch
        result: dict[str, Any] = {"pool": str(pool)}
        if taken.recovery is not None and taken.recovery.is_rewind:
            before = taken.recovery.committed_batch
            result["completed"] = "a rewind that had been interrupted"
        elif to != before:  # a script may say it again
            taken.rewind(batches=batches, to=to)
        result |= {"from_batch": before, "batch": taken.committed_batch}
    click.echo(json.dumps(result) if as_json else f"rewind {key_values(result)}")


def _show(
    pool: Path, committed: int, points: list[RewindPoint], *, only_exact: bool, as_json: bool
) -> None:
    if as_json:
        rows = [
            {**asdict(point), "kind": "exact" if point.is_exact else "tables only"}
            for point in points
        ]
        click.echo(json.dumps({"pool": str(pool), "committed_batch": committed, "points": rows}))
        return
    click.echo(f"{pool}: at batch {committed}")
    if not points:
        click.echo(f"no earlier {'exact point' if only_exact else 'batch'} can be reached")
        return
    click.echo(f"{'batch':>10}  {'back':>6}  {'epoch':>6}  {'position':>8}  kind")
    for point in points:
        epoch = "" if point.epoch is None else point.epoch
        position = "" if point.position is None else point.position
        kind = "exact" if point.is_exact else "tables only"
        click.echo(f"{point.batch:>10}  {point.batches_back:>6}  {epoch:>6}  {position:>8}  {kind}")
