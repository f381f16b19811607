"""The command `trainingcxl`; each subcommand is a module of its name here."""

from trainingcxl.cli.program import main

__all__ = ["main"]
