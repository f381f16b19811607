"""`trainingcxl doctor`: what a pool would get at a path; one command to paste into a bug report."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from trainingcxl.cli.signals import StopSignals

__all__ = ["command"]

_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB")


@click.command("doctor")
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(path: Path, as_json: bool) -> None:
    """Say what a pool at PATH would get: medium, speed, durability, limits, and advice.

    PATH is a folder, a pool, the path of a pool to be made, or a DAX device. For some seconds a
    small pool is made beside it and a file without a name is written; both are gone at the end.
    An existing pool is only read. The output names no user and no machine, PATH apart.
    """
    from trainingcxl.doctor import diagnose

    with StopSignals():  # a signal must not leave the small pool behind
        report = diagnose(path)
    if as_json:
        click.echo(json.dumps(report))
        return
    advice = report.pop("advice")
    for line in _lines(report):
        click.echo(line)
    click.echo("advice")
    for text in advice:
        click.echo(f"  - {text}")


def _lines(report: Mapping[str, Any], indent: str = "") -> Iterator[str]:
    """Yield `name  value` a line, the parts of a part below its name."""
    for name, value in report.items():
        if isinstance(value, Mapping) and value:
            yield f"{indent}{name}"
            yield from _lines(value, indent + "  ")
        else:
            yield f"{indent + name:<30}{_text(name, value)}"


def _text(name: str, value: Any) -> str:
    if value is None:
        return "unknown" if not name.endswith(_LIMITS) else "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | Mapping):
        return " ".join(value) or "none"
    if "bytes" in name and isinstance(value, int) and "dirty_" not in name:
        return _size(value) + ("/s" if name.endswith("_per_s") else "")
    return str(value)


_LIMITS = ("memory_bytes", "memory_high_bytes", "cpus", "write_bytes_per_s", "writes_per_s")


def _size(count: int) -> str:
    """Return `4.2 GiB`; small and odd numbers are given to the byte."""
    value, unit = float(count), 0
    while value >= 1024 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.4g} {_UNITS[unit]}"
