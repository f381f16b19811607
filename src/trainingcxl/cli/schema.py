"""`trainingcxl schema`: guess which column of a table is what."""

from pathlib import Path

import click

__all__ = ["command"]

_HEADER = """\
# Guessed by 'trainingcxl schema {name}'. Check it, then train with
#   trainingcxl train --data {kind}:{name} --set data.schema=SCHEMA.toml
# Columns that are left out are not read. docs/data.md describes every key.

"""


@click.command("schema")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--output", type=click.Path(path_type=Path), help="Write to this file.")
def command(file: Path, output: Path | None) -> None:
    """Guess the schema of a text table or Parquet FILE from its first 10,000 rows.

    The schema says which column is the label, which are numbers and which are categories. It is a
    guess: read it before you train.
    """
    from trainingcxl.data.guess import guess_schema, is_parquet

    kind = "parquet" if is_parquet(file) else "csv"
    text = _HEADER.format(name=file, kind=kind) + guess_schema(file).as_toml()
    if output is None:
        click.echo(text, nl=False)
    else:
        with output.open("x", encoding="utf-8") as stream:
            stream.write(text)
