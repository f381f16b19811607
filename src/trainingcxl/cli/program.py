"""The command `trainingcxl`: its subcommands, and what the user sees of a failure.

A subcommand is the object `command` of the module of its name and is imported only when it runs, so
that `--help`, `inspect`, `verify` and `simulate` need not wait for torch.

Exit codes: 0 done, 1 failure, 2 wrong use, 3 damage found, 130 after SIGINT, 143 after SIGTERM.
"""

import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import click

from trainingcxl import __version__
from trainingcxl.cli.signals import Interrupted
from trainingcxl.errors import ConfigError, PoolCorrupted, TrainingCXLError

__all__ = ["main"]

_SUBCOMMANDS = {
    "train": "Train a DLRM in a pool, every batch durable; the same command again resumes.",
    "demo": "Train on built-in data, kill the training half-way, resume, and compare.",
    "evaluate": "Judge the model in a pool on held-out data, or on any other.",
    "predict": "Score data with the model in a pool; writes Parquet.",
    "snapshot": "Copy one committed batch of a pool, also while it is trained.",
    "rewind": "Take a pool back to an earlier batch, or list those it can go back to.",
    "inspect": "Show what a pool holds and where its training stands.",
    "verify": "Check all checksums and invariants of a pool.",
    "repair": "Say what of a damaged pool can be reached, and go there.",
    "doctor": "Say what a pool at a path would get: medium, speed, durability, limits.",
    "torture": "Kill a small training again and again, on your own disk, and compare.",
    "schema": "Guess the schema of a CSV or Parquet file.",
    "export-data": "Write the built-in data set as Criteo text or npy files.",
    "simulate": "Run the hardware model of the paper's systems.",
    "reproduce": "Compare the hardware model with the paper's evaluation.",
}
_FAILURE, _WRONG_USE, _DAMAGE = 1, 2, 3
# Raised with a message for the user; anything else is a fault of ours and shows its traceback.
_EXPECTED = (TrainingCXLError, ValueError, IndexError, OSError)


class _Commands(click.Group):
    """Imports subcommands late and turns exceptions into messages and exit codes."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of the subcommands in the order of `--help`."""
        return list(_SUBCOMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a subcommand; None if there is none of that name."""
        if cmd_name not in _SUBCOMMANDS:
            return None
        module = import_module(f"trainingcxl.cli.{cmd_name.replace('-', '_')}")
        command: click.Command = module.command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the subcommands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl(list(_SUBCOMMANDS.items()))

    def main(self, args: Sequence[str] | None = None, *rest: Any, **options: Any) -> Any:
        """Run a command line and exit the process with the code that tells how it went."""
        arguments = list(sys.argv[1:] if args is None else args)
        shows_traceback = "--traceback" in arguments
        options["standalone_mode"] = False
        try:
            arguments = [text for text in arguments if text != "--traceback"]
            sys.exit(super().main(arguments, *rest, **options) or 0)
        except (Exception, Interrupted) as error:
            if shows_traceback:
                raise
            sys.exit(_explain(error))


def _explain(error: BaseException) -> int:
    """Print what the user needs to know of an error and return the exit code."""
    if isinstance(error, Interrupted):
        click.echo(f"stopped by {error.signal.name}", err=True)
        return error.exit_code
    if isinstance(error, click.Abort):
        return 130
    if isinstance(error, click.ClickException):
        error.show()
        return error.exit_code
    if isinstance(error, BrokenPipeError):  # the reader of our output has seen enough
        sys.stdout = None
        return _FAILURE
    if not isinstance(error, _EXPECTED):
        raise error
    click.echo(f"{type(error).__name__}: {error}", err=True)
    if isinstance(error, PoolCorrupted):
        return _DAMAGE
    return _WRONG_USE if isinstance(error, ConfigError) else _FAILURE


@click.command(cls=_Commands)
@click.version_option(__version__, prog_name="trainingcxl")
@click.option("--traceback", is_flag=True, help="Show where in the program an error came from.")
def main(traceback: bool) -> None:
    """Train recommendation models in persistent memory: every batch durable, exact resume."""
