"""SIGINT and SIGTERM: stop at once, or after the batch in flight."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["Interrupted", "StopSignals"]


class Interrupted(BaseException):
    """A signal asked to stop. Not an `Exception`, so that nothing takes it for a failure."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(number.name)
        self.signal = number

    @property
    def exit_code(self) -> int:
        """The shell's code for a process ended by this signal."""
        return 128 + int(self.signal)


class StopSignals:
    """Listens to SIGINT and SIGTERM while entered; only in the main thread.

    Outside `deferred` a signal raises `Interrupted` where the program stands. Inside, the first one
    is only remembered: the loop looks at `requested` between two batches and leaves, and
    `Interrupted` is raised at the end of the block. A second signal does not wait.
    """

    def __init__(self) -> None:
        self._pending: signal.Signals | None = None
        self._is_deferring = False

    def __enter__(self) -> "StopSignals":
        self._previous = {
            number: signal.signal(number, self._handle)
            for number in (signal.SIGINT, signal.SIGTERM)
        }
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    @property
    def requested(self) -> bool:
        """Whether a signal has come inside `deferred`."""
        return self._pending is not None

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Let signals wait for the end of the block."""
        self._is_deferring = True
        try:
            yield
        finally:
            self._is_deferring = False
        if self._pending is not None:
            raise Interrupted(self._pending)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._is_deferring and self._pending is None:
            self._pending = signal.Signals(number)
            return
        raise Interrupted(signal.Signals(number))
