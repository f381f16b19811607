"""A running QEMU and what its guest says on the serial line."""

import os
import re
import selectors
import subprocess
import time
from collections import Counter
from pathlib import Path
from typing import Any, Self

LINE = re.compile(rb"@([\w-]+) (\w+) ?([^\r\n]*?)\r*\n")


class Console:
    """Starts QEMU; ends it when left. Lines of the guest are '@NAME EVENT REST'."""

    def __init__(self, command: list[str], log: Path) -> None:
        self._log = log.open("wb")
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        assert self._process.stdout is not None
        self._stream = self._process.stdout
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._stream, selectors.EVENT_READ)
        self._buffer = b""
        self._counts: Counter[tuple[str, str]] = Counter()
        self.is_closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self.kill()
        self._selector.close()
        self._stream.close()
        self._log.close()

    def count(self, name: str, event: str) -> None:
        """Note an event of a pool."""
        self._counts[name, event] += 1

    def has(self, name: str, event: str) -> int:
        """How many such events there were."""
        return self._counts[name, event]

    def lines(self, until: float) -> list[tuple[str, str, str]]:
        """What was said since the last call; waits for something, at most until then, or 1 s."""
        wait = min(1.0, max(0.0, until - time.monotonic()))
        if not self._selector.select(wait):
            return []
        data = os.read(self._stream.fileno(), 1 << 16)
        self.is_closed = not data
        return self._parse(data)

    def rest(self) -> list[tuple[str, str, str]]:
        """What was said before the kill and is not read yet."""
        return self._parse(self._stream.read())

    def kill(self) -> None:
        """SIGKILL to QEMU: for the guest, the power goes."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()

    def _parse(self, data: bytes) -> list[tuple[str, str, str]]:
        self._log.write(data)
        self._buffer += data
        found, end = [], 0
        for match in LINE.finditer(self._buffer):
            name, event, rest = (part.decode(errors="replace") for part in match.groups())
            found.append((name, event, rest))
            end = match.end()
        self._buffer = self._buffer[end:]
        return found
