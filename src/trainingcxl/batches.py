"""The batches of one epoch from where the last commit left off, one fetched ahead so that it can be
announced.

Position counts batches *consumed* by commits. Three kinds of loader:
  - with `seek(epoch, batch)` (ours): a pure function of the position, nothing to save;
  - with `state_dict`/`load_state_dict` (torchdata's StatefulDataLoader): the state after the last
    consumed batch;
  - any other iterable: its generators are put back to the start of the epoch and the batches are
    skipped.
"""

import base64
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from trainingcxl.errors import PoolFull
from trainingcxl.rng import get_rng_state, set_rng_state
from trainingcxl.state import decode_tree, encode_tree, json_bytes

__all__ = ["BatchFeed", "Fetched"]

_LOADER_STATE_MAX = 48 << 10  # of the record's 64 KiB


@dataclass(slots=True)
class Fetched:
    """One batch, with what has to be recorded once it is consumed."""

    batch: Any
    step_id: int
    """Id of its announced step; 0: not announced."""
    loader_state: Any
    """JSON data; None for loaders that need none."""
    rng: dict[str, Any] | None
    """Generators before it was fetched, where the fetch drew from them."""


class BatchFeed:
    """Iterates one epoch.

    Args:
        loader: See the module's text.
        epoch: The epoch.
        consumed: Batches of this epoch that commits have already consumed.
        loader_state: What was recorded with the last of them, or at the end of the epoch before.
        epoch_rng: Generators at the start of this epoch, for loaders that can only be skipped; of
            an epoch that has not begun, the loader's own.
        fetch_rng: Generators before each of the batches fetched ahead at the last commit.
        is_restored: The state is of another process: the loader does not stand where it says.
        announce: Hands a batch to the engine; returns the id of its step.
        lookahead: Batches fetched ahead of the one in use.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        *,
        epoch: int,
        consumed: int,
        loader_state: Any,
        epoch_rng: dict[str, Any] | None,
        fetch_rng: list[dict[str, Any] | None],
        is_restored: bool,
        announce: Callable[[Any], int],
        lookahead: int,
    ) -> None:
        self._announce = announce
        self._lookahead = lookahead
        self._ahead: deque[Fetched] = deque()
        self._loader = loader
        self._is_stateful = not hasattr(loader, "seek") and hasattr(loader, "load_state_dict")
        self._is_done = False
        self.epoch_rng: dict[str, Any] | None = None
        if hasattr(loader, "seek"):
            loader.seek(epoch, consumed)
            self._iterator = iter(loader)
        elif consumed == 0:
            self._begin(
                loader, loader_state if is_restored else None, epoch_rng if is_restored else None
            )
        else:
            now = get_rng_state()
            self._resume(loader, consumed, loader_state, epoch_rng)
            for i in range(lookahead):
                drawn_at = fetch_rng[i] if i < len(fetch_rng) else None
                if drawn_at is not None:
                    set_rng_state(drawn_at)
                self._fill(i + 1)
            set_rng_state(now)

    def _begin(self, loader: Any, loader_state: Any, epoch_rng: dict[str, Any] | None) -> None:
        """Starts an epoch, in a new process from the state that the loader had at the end of the
        epoch before.
        """
        if not self._is_stateful:
            _set_generators(loader, epoch_rng)
            self.epoch_rng = {**get_rng_state(), **_generator_states(loader)}
            self._iterator = iter(loader)
            return
        now = get_rng_state()
        if loader_state is not None:
            loader.load_state_dict(decode_tree(loader_state, []))
        self._iterator = iter(loader)
        if loader_state is None:
            return
        self._fill(1)
        if self._is_done:  # some loaders take this state for an epoch of which nothing is left
            self._is_done = False
            set_rng_state(now)
            self._iterator = iter(loader)

    def end_state(self) -> tuple[Any, dict[str, Any] | None]:
        """Loader state and generators to begin the next epoch with, after this one is over."""
        if hasattr(self._loader, "seek"):
            return None, None
        if self._is_stateful:
            return self._loader_state(), None
        return None, _generator_states(self._loader) or None

    def _resume(
        self, loader: Any, consumed: int, loader_state: Any, epoch_rng: dict[str, Any] | None
    ) -> None:
        """Brings the loader to where it was; what this draws from the generators does not
        matter.
        """
        if self._is_stateful:
            if loader_state is None:
                warnings.warn(
                    "the loader's state was not recorded; this epoch starts again from its "
                    "first batch",
                    stacklevel=4,
                )
            else:
                loader.load_state_dict(decode_tree(loader_state, []))
            self._iterator = iter(loader)
        else:
            self.epoch_rng = epoch_rng
            if epoch_rng is not None:
                set_rng_state(epoch_rng)
                _set_generators(loader, epoch_rng)
            self._iterator = iter(loader)
            started = time.perf_counter()
            for _ in range(consumed):
                if next(self._iterator, None) is None:
                    break
            warnings.warn(
                f"this loader has no state_dict: {consumed} batches were fetched again and skipped "
                f"({time.perf_counter() - started:.1f} s); trainingcxl.data.BatchLoader or a "
                "stateful loader seeks instead",
                stacklevel=4,
            )

    def _fill(self, count: int) -> None:
        while len(self._ahead) < count and not self._is_done:
            is_pure = hasattr(self._loader, "seek")
            before = None if is_pure else get_rng_state()
            try:
                batch = next(self._iterator)
            except StopIteration:
                self._is_done = True
                return
            state = self._loader_state() if self._is_stateful else None
            rng = before if not is_pure and get_rng_state() != before else None
            self._ahead.append(Fetched(batch, self._announce(batch), state, rng))

    def fetch_rng(self) -> list[dict[str, Any] | None]:
        """Generators before each batch that is fetched ahead now; empty where no fetch drew from
        them.
        """
        states = [fetched.rng for fetched in self._ahead]
        return states if any(state is not None for state in states) else []

    def _loader_state(self) -> Any:
        state = encode_tree(self._loader.state_dict(), None, "the loader's state")  # type: ignore[attr-defined]
        size = len(json_bytes(state))
        if size > _LOADER_STATE_MAX:  # said before the step, which could not be committed
            raise PoolFull(
                f"the loader's state has {size} bytes, the resume record has room for "
                f"{_LOADER_STATE_MAX}\n"
                "  state: nothing has changed\n"
                "  do:    use a loader with seek(epoch, batch), or one whose state is a position"
            )
        return state

    def __iter__(self) -> Iterator[Fetched]:
        while True:
            self._fill(self._lookahead + 1)
            if not self._ahead:
                return
            yield self._ahead.popleft()


def _generators(loader: Any) -> list[torch.Generator]:
    """The generators of a torch DataLoader: its own, its sampler's, its batch sampler's."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    holders = (
        loader,
        getattr(loader, "sampler", None),
        batch_sampler,
        getattr(batch_sampler, "sampler", None),
    )
    found: list[torch.Generator] = []
    for holder in holders:
        generator = getattr(holder, "generator", None)
        if isinstance(generator, torch.Generator) and all(
            generator is not other for other in found
        ):
            found.append(generator)
    return found


def _generator_states(loader: Any) -> dict[str, Any]:
    states = [
        base64.b64encode(generator.get_state().numpy().tobytes()).decode()
        for generator in _generators(loader)
    ]
    return {"loader": states} if states else {}


def _set_generators(loader: Any, epoch_rng: dict[str, Any] | None) -> None:
    states = (epoch_rng or {}).get("loader", [])
    for generator, state in zip(_generators(loader), states, strict=False):
        generator.set_state(torch.frombuffer(bytearray(base64.b64decode(state)), dtype=torch.uint8))
