"""`trainingcxl export-data`: the built-in data set as files."""

import dataclasses
import json
import sys
from pathlib import Path

import click

__all__ = ["command"]


def _progress(what: str, done: int, total: int) -> None:
    if sys.stderr.isatty():
        click.echo(f"\r{what}: {100 * done // max(total, 1)} %", err=True, nl=done >= total)


@click.command("export-data")
@click.option("--data", default="synthetic:tiny", show_default=True, help="What to write.")
@click.option("--samples", type=click.IntRange(min=1), help="How many; default: all of them.")
@click.option("--criteo", type=click.Path(path_type=Path), help="Criteo text, .gz is compressed.")
@click.option("--npy", type=click.Path(path_type=Path), help="Folder for NumPy arrays.")
@click.option("--json", "as_json", is_flag=True, help="Print the facts as JSON.")
def command(
    data: str, samples: int | None, criteo: Path | None, npy: Path | None, as_json: bool
) -> None:
    """Write the built-in data set as Criteo text or NumPy arrays, and print facts about it.

    Without --criteo and --npy, only the facts are printed: click rate, distinct rows among the
    lookups of a batch, rows and lookups that the batch before had too, and the AUC of the best
    possible model.
    """
    from trainingcxl.data.dataset import SyntheticDataset
    from trainingcxl.data.describe import describe
    from trainingcxl.data.export import write_criteo, write_npy
    from trainingcxl.data.synthetic_presets import parse_spec
    from trainingcxl.errors import ConfigError

    kind, _, name = data.partition(":")
    if kind != "synthetic":
        raise ConfigError(f"--data is '{data}'\n  do:    only synthetic:NAME can be written")
    spec = parse_spec(name)
    if samples is not None:
        spec = dataclasses.replace(spec, num_samples=samples)
    source = SyntheticDataset(spec)
    if criteo is not None:
        write_criteo(source, criteo, _progress)
    if npy is not None:
        write_npy(source, npy, _progress)
    facts = describe(source).as_dict()
    if as_json:
        click.echo(json.dumps(facts))
        return
    for key, value in facts.items():
        click.echo(f"{key}={value:.4f}" if isinstance(value, float) else f"{key}={value}")
