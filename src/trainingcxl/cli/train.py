"""`trainingcxl train`: train a DLRM in a pool; the same command again resumes."""

import os
from pathlib import Path
from typing import Any

import click

from trainingcxl.cli.reporters import make_reporter
from trainingcxl.cli.signals import StopSignals
from trainingcxl.config import load_settings, show_settings

__all__ = ["command", "let_threads_sleep"]

# Flags that stand for a setting. All other settings are set by --set or in a file.
_FLAGS = {
    "data": "data.source",
    "pool": "pool.path",
    "epochs": "run.epochs",
    "batch_size": "run.batch_size",
    "embedding_dim": "model.embedding_dim",
    "optimizer": "rows.optimizer",
    "lr": "rows.lr",
    "seed": "run.seed",
    "threads": "run.threads",
    "durability": "pool.durability",
    "dense_every": "run.dense_every",
    "device": "run.device",
    "dense_gemm": "dense.gemm",
}


def let_threads_sleep() -> None:
    """Have torch's threads wait without spinning; call it before torch is imported.

    A thread that spins holds its core while the one it waits for has none: where other work shares
    the machine, two threads were seen to be 20 times slower than one.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


@click.command("train")
@click.option("--data", metavar="KIND:FILE[,FILE...]", help="What to train on.")
@click.option("--pool", metavar="DIR", help="Pool to create or to go on with.")
@click.option("--epochs", type=int, help="Passes over the data; more continue a run.")
@click.option("--batch-size", type=int, help="Samples of a batch.")
@click.option("--embedding-dim", type=int, help="Width of an embedding row.")
@click.option("--optimizer", metavar="NAME", help="Row optimizer: rowwise-adagrad, adagrad, sgd.")
@click.option("--lr", type=float, help="Learning rate of the rows.")
@click.option("--seed", type=int, help="Seed of everything that is drawn.")
@click.option("--threads", type=int, help="Threads; 0 is one a core.")
@click.option("--durability", metavar="LEVEL", help="process (kill -9) or power.")
@click.option("--dense-every", metavar="K", help="Batches between logs of the dense part, or auto.")
@click.option("--device", metavar="NAME", help="Of the dense part: auto, cpu, cuda.")
@click.option("--dense-gemm", metavar="NAME", help="Matrix products on a CPU: auto, mkl, onednn.")
@click.option(
    "--config",
    "config_file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="TOML file of settings.",
)
@click.option("--set", "assignments", metavar="KEY=VALUE", multiple=True, help="Any setting.")
@click.option("--fresh", is_flag=True, help="Discard what the pool holds and start over.")
@click.option(
    "--profile",
    "profile_file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write where time and bytes go: JSON, and a trace for ui.perfetto.dev.",
)
@click.option(
    "--profile-batches",
    type=click.IntRange(min=0),
    default=100,
    show_default=True,
    help="Batches the profile keeps one by one; later ones are summed up.",
)
@click.option(
    "--tensorboard",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder for scalars of the profile.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON, one event a line.")
@click.option("--show-config", is_flag=True, help="Print every setting and its meaning, and stop.")
def command(
    config_file: Path | None,
    assignments: tuple[str, ...],
    fresh: bool,
    profile_file: Path | None,
    profile_batches: int,
    tensorboard: Path | None,
    as_json: bool,
    show_config: bool,
    **flags: Any,
) -> None:
    """Train a DLRM whose embedding rows live in a pool; every batch is durable.

    The same command again goes on after the last committed batch, bit for bit. A finished run is
    left untouched; more --epochs continue it; only --fresh discards.

    A setting's value is its default, unless the file of --config has it, unless --set has it,
    unless its flag has it.
    """
    settings = load_settings(
        config_file=config_file,
        assignments=assignments,
        flags={setting: flags[flag] for flag, setting in _FLAGS.items()},
    )
    if show_config:
        click.echo(show_settings(settings))
        return
    with StopSignals() as stop, make_reporter(as_json=as_json) as report:
        report.event("start", data=settings.data.source, pool=settings.pool.path)
        let_threads_sleep()
        # Torch takes seconds to import: only now, when everything that could be wrong with the
        # command line has been said, and a word is on the screen.
        from trainingcxl.pool import Pool
        from trainingcxl.profile import ProfileRequest
        from trainingcxl.train import train

        profile = ProfileRequest(out=profile_file, batches=profile_batches, tensorboard=tensorboard)
        if fresh:
            Pool.discard(settings.pool.path)
        train(settings, report, stop, profile if profile_file or tensorboard else None)
