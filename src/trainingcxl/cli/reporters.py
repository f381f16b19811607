"""What a command says while it works: a progress bar on a terminal, lines of key=value, or JSON."""

import json
import math
import sys
import time
from types import TracebackType
from typing import Any, Protocol, TextIO

__all__ = [
    "JsonReporter",
    "LineReporter",
    "Reporter",
    "TerminalReporter",
    "key_values",
    "make_reporter",
]

_SECONDS_BETWEEN_LINES = 5.0
_SECONDS_BETWEEN_JSON = 0.5  # read by programs, which may draw a bar of their own


class Reporter(Protocol):
    """Receives what happens: single events, and how far a long piece of work has come."""

    def event(self, name: str, **values: Any) -> None:
        """Say that something has happened."""

    def progress(self, work: str, done: int, total: int, **values: Any) -> None:
        """Say how far `work` has come, in units of its own; it is over when `done == total`."""

    def show(self, text: str) -> None:
        """Show a text of several lines to people."""

    def __enter__(self) -> "Reporter":
        """Start to report."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Leave the terminal as it was found."""


def make_reporter(*, as_json: bool) -> Reporter:
    """Choose by what the user asked for and by where standard error goes."""
    if as_json:
        return JsonReporter(sys.stdout, seconds=_SECONDS_BETWEEN_JSON)
    if sys.stderr.isatty():
        return TerminalReporter()
    return LineReporter(sys.stderr)


class _Throttle:
    """Lets the first and the last report of a piece of work pass, and one every few seconds."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._next: dict[str, float] = {}

    def passes(self, work: str, *, is_last: bool) -> bool:
        now = time.monotonic()
        if not is_last and now < self._next.get(work, 0.0):
            return False
        self._next[work] = now + self._seconds
        return True


class LineReporter:
    """Writes one line an event: its name, then key=value."""

    def __init__(self, stream: TextIO, *, seconds: float = _SECONDS_BETWEEN_LINES) -> None:
        """Write to `stream`; progress at most once in so many seconds."""
        self._stream = stream
        self._throttle = _Throttle(seconds)

    def __enter__(self) -> "LineReporter":
        return self

    def __exit__(self, *exception: object) -> None:
        self._stream.flush()

    def event(self, name: str, **values: Any) -> None:
        """Write the event."""
        print(f"event={name} {key_values(values)}".rstrip(), file=self._stream, flush=True)

    def progress(self, work: str, done: int, total: int, **values: Any) -> None:
        """Write where the work stands, from time to time."""
        if self._throttle.passes(work, is_last=done == total):
            self.event("progress", work=work, done=done, total=total, **values)

    def show(self, text: str) -> None:
        """Write the text as it is."""
        print(text, file=self._stream, end="", flush=True)


class JsonReporter(LineReporter):
    """Writes one JSON object a line; its first key is `event`. What is not a number is null."""

    def event(self, name: str, **values: Any) -> None:
        """Write the event."""
        finite = {key: _finite(value) for key, value in values.items()}
        print(json.dumps({"event": name, **finite}), file=self._stream, flush=True)

    def show(self, text: str) -> None:
        """Leave it out: every line is an event."""


class TerminalReporter:
    """Draws a progress bar on standard error, with the events above it."""

    def __init__(self) -> None:
        # Imported here: it takes a quarter of a second that no other reporter needs.
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        self._console = Console(stderr=True, highlight=False)
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f}%"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[values]}"),
            console=self._console,
        )
        self._tasks: dict[str, Any] = {}

    def __enter__(self) -> "TerminalReporter":
        self._bars.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bars.stop()

    def event(self, name: str, **values: Any) -> None:
        """Print the event above the bars."""
        self._console.print(f"{name:<12}{key_values(values)}", markup=False, soft_wrap=True)

    def progress(self, work: str, done: int, total: int, **values: Any) -> None:
        """Move the bar of this work."""
        if work not in self._tasks:
            self._tasks[work] = self._bars.add_task(work, total=total, values="")
        self._bars.update(self._tasks[work], completed=done, total=total, values=_short(values))

    def show(self, text: str) -> None:
        """Print the text above the bars."""
        self._console.print(text, markup=False, highlight=False, end="")


def key_values(values: dict[str, Any]) -> str:
    """Return `a=1 b="two words"`; a string is quoted where it would not read as one word."""
    return " ".join(f"{key}={_text(value)}" for key, value in values.items())


def _short(values: dict[str, Any]) -> str:
    """Return what fits beside a progress bar: no unknown values, short names, four digits."""
    names = {"committed_batch": "committed", "durable_batch": "durable"}
    texts = (
        f"{names.get(key, key.replace('_per_second', '/s'))} "
        + (f"{value:.4g}" if isinstance(value, float) else str(value))
        for key, value in values.items()
        if value is not None
    )
    return "  ".join(texts)


def _text(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:.6g}"
    text = str(value)
    is_word = text and not any(character.isspace() or character in '="' for character in text)
    return text if is_word else json.dumps(text)


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
