"""`trainingcxl snapshot`: a copy of one batch, of a pool that is trained or closed."""

import fcntl
import time
from pathlib import Path

import click

from trainingcxl.cli.reporters import key_values, make_reporter
from trainingcxl.cli.signals import StopSignals
from trainingcxl.errors import PoolLocked
from trainingcxl.pool import Pool, ask_for_snapshot

__all__ = ["command"]


@click.command("snapshot")
@click.argument("pool", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.argument("path", type=click.Path(path_type=Path, file_okay=False))
@click.option("--device", default="", help="DAX device that holds POOL.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON lines.")
def command(pool: Path, path: Path, device: str, as_json: bool) -> None:
    """Copy one committed batch of POOL to the new pool PATH.

    While POOL is trained its trainer makes the copy, in the background, after the batch in hand.
    The copy is a pool: evaluate it, predict with it, or train it further.
    """
    with StopSignals(), make_reporter(as_json=as_json) as report:
        try:
            with Pool(pool, read_only=True, device=device) as source:
                snapshot = source.snapshot(path, wait=False)
                while not snapshot.is_done:
                    report.progress("copy", int(100 * snapshot.share_copied), 100)
                    time.sleep(0.1)
                snapshot.wait()
                batch = snapshot.batch
        except PoolLocked:
            report.event("asked", pool=str(pool), waiting="for the end of the batch in training")
            batch = ask_for_snapshot(pool, path.absolute(), lambda: _is_locked(pool))
        result = {"pool": str(pool), "path": str(path), "batch": batch}
        if as_json:
            report.event("snapshot", **result)
    if not as_json:
        click.echo(f"snapshot {key_values(result)}")


def _is_locked(pool: Path) -> bool:
    with (pool / "lock").open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
