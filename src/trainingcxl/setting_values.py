"""Settings whose text has a meaning of its own, and the error for a wrong value."""

from trainingcxl.errors import ConfigError

__all__ = ["hash_sizes", "is_count", "widths", "wrong_value"]


def wrong_value(name: str, value: object, expected: str) -> ConfigError:
    """The error that names setting, value and what is expected."""
    return ConfigError(
        f"{name} is {value!r}, expected {expected}\n"
        "  do:    'trainingcxl train --show-config' lists every setting and its meaning"
    )


def is_count(text: str) -> bool:
    """Whether it is a whole number of at least 1."""
    return text.isascii() and text.isdecimal() and int(text) >= 1


def widths(name: str, text: str) -> list[int]:
    """Read the widths of an MLP's layers.

    Args:
        name: The setting, for the error.
        text: Widths joined by '-', such as '512-256'; empty for no hidden layer.

    Raises:
        ConfigError: A part is not a number of at least 1.
    """
    parts = text.split("-") if text else []
    if not all(is_count(part) for part in parts):
        raise wrong_value(name, text, "widths joined by '-', such as 512-256")
    return [int(part) for part in parts]


def hash_sizes(text: str) -> int | dict[str, int]:
    """Read `data.hash_size`.

    Args:
        text: A number of rows for all features, or NAME=ROWS joined by commas.

    Raises:
        ConfigError: It is neither.
    """
    if text.isascii() and text.isdecimal():
        return int(text)
    sizes = {}
    for part in text.split(","):
        name, _, rows = part.rpartition("=")
        if not name or not is_count(rows):
            raise wrong_value(
                "data.hash_size", text, "a number of rows, or NAME=ROWS,NAME=ROWS,..."
            )
        sizes[name] = int(rows)
    return sizes
