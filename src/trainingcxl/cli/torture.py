"""`trainingcxl torture`: do the promises hold on this disk, this kernel, this CPU?"""

import math
import tempfile
from pathlib import Path
from typing import Literal

import click

from trainingcxl.cli.reporters import make_reporter
from trainingcxl.errors import TrainingCXLError

__all__ = ["command"]


@click.command("torture")
@click.argument("path", type=click.Path(path_type=Path, file_okay=False))
@click.option(
    "--minutes", type=click.FloatRange(min=0), default=1.0, show_default=True, help="How long."
)
@click.option("--seed", type=int, default=0, show_default=True, help="Of the choice of kills.")
@click.option(
    "--medium",
    type=click.Choice(["auto", "fsdax", "block"]),
    default="auto",
    show_default=True,
    help="fsdax runs the code for persistent memory (flush and fence), whatever PATH lies on.",
)
@click.option(
    "--power-cuts",
    is_flag=True,
    help="With --medium block: a kill takes along, as a power failure would, any part of what was "
    "not synced.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON lines.")
def command(
    path: Path,
    minutes: float,
    seed: int,
    medium: Literal["auto", "fsdax", "block"],
    power_cuts: bool,
    as_json: bool,
) -> None:
    """Kill small trainings in the folder PATH and compare what they leave with one left alone.

    Lives die by SIGKILL: at random times and at chosen steps of the protocol, in creation, commit
    and recovery. Each next life must find a committed batch, with the bits of the training that was
    left alone. Exit code 1 if anything differs; the pool in question is then kept. This shows what
    survives the end of a process; nothing here cuts the power.
    """
    if not math.isfinite(minutes):
        raise click.BadParameter(f"{minutes} is no time", param_hint="--minutes")
    if power_cuts and medium != "block":
        raise click.UsageError("--power-cuts needs --medium block: level 'power' on ordinary files")
    from trainingcxl.torture import torture
    from trainingcxl.torture_tally import Tally

    path.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="torture-", dir=path))
    tally = Tally()
    with make_reporter(as_json=as_json) as report:
        for rig in torture(
            folder,
            seconds=60 * minutes,
            seed=seed,
            medium=medium,
            tally=tally,
            has_power_cuts=power_cuts,
        ):
            report.event(
                "run",
                scenario=rig.scenario.name,
                kills=tally.kills,
                mismatches=len(tally.mismatches),
            )
        for text in tally.mismatches:
            report.event("mismatch", text=text)
        report.event("torture", folder=str(folder), seed=seed, medium=medium, **tally.summary())
    if tally.mismatches:
        raise TrainingCXLError(
            f"something differs after {tally.kills} kills: {tally.mismatches[0]}\n"
            f"  where: {str(folder)!r}, kept\n"
            "  do:    report it, with the folder and the seed"
        )
    for left in folder.iterdir():
        for file in left.iterdir():
            file.unlink()
        left.rmdir()
    folder.rmdir()
