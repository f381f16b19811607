"""What `evaluate` and `predict` share: their options, and opening the pool's model."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from trainingcxl.cli.reporters import Reporter
from trainingcxl.cli.train import let_threads_sleep
from trainingcxl.config import Value, load_settings

if TYPE_CHECKING:
    from trainingcxl.evaluation import TrainedPool

__all__ = ["model_options", "trained_pool"]

F = TypeVar("F", bound=Callable[..., Any])

_FLAGS = {"data": "data.source", "threads": "run.threads", "device": "run.device"}
_OPTIONS = (
    click.argument("pool", type=click.Path(path_type=Path)),
    click.option("--data", metavar="KIND:FILE[,FILE...]", help="Take all rows of this data."),
    click.option("--held-out", is_flag=True, help="Of --data, only what training held out."),
    click.option("--wrap-ids", is_flag=True, help="Take ids beyond a table modulo its rows."),
    click.option("--threads", type=int, help="Threads; default as in training."),
    click.option("--device", metavar="NAME", help="Of the dense part: auto, cpu, cuda."),
    click.option(
        "--set", "assignments", metavar="KEY=VALUE", multiple=True,
        help="data.schema, data.max_bad_lines, cache.dir, pool.device, pool.resume, ...",
    ),
    click.option("--json", "as_json", is_flag=True, help="Print JSON, one event a line."),
)  # fmt: skip


def model_options(command: F) -> F:
    """Add the options that choose a pool and its data."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


@contextmanager
def trained_pool(
    pool: Path, assignments: tuple[str, ...], flags: dict[str, Any], report: Reporter
) -> Iterator["TrainedPool"]:
    """Open the model of a pool for reading only.

    Args:
        pool: Path of the pool.
        assignments: Texts of --set.
        flags: Values of the flags that stand for settings; None where one was not given.
        report: Told what is found.
    """
    given = {setting: flags[flag] for flag, setting in _FLAGS.items()}
    settings = load_settings(assignments=assignments, flags=given).flat()
    names = [text.partition("=")[0].strip() for text in assignments]
    names += [name for name, value in given.items() if value is not None]
    changes: dict[str, Value] = {name: settings[name] for name in names}
    let_threads_sleep()
    # Torch takes seconds to import: only now, when the command line is known to be right.
    from trainingcxl.evaluation import TrainedPool

    with TrainedPool(pool, changes, report) as model:
        yield model
