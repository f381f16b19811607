"""Whole-pool check of a record (invariant I7): no store outside the protocol, none left behind."""

import struct
from typing import Any

import numpy as np
from power_check import NO_DAMAGE
from power_medium import Kinds, Medium
from power_trace import Plan, Trace

__all__ = ["Shadow"]

_TABLE = struct.Struct("<128sQIIQQQQ")  # docs/format.md, "Geometry"
_UNUSED = range((3 << 20) // 8, (4 << 20) // 8)  # words of the log's head
# The background thread writes these at any time.
_MAY_BE_PENDING = {"frame", "flag", "dense", "dense header"}


class Shadow:
    """Knows in which phase the training is, and which rows may change in it."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._phase = "creation"
        self._allowed: np.ndarray | None = None  # words of the data file

    def stored(self, trace: Trace, event: np.void) -> list[str]:
        """Problems with one store."""
        first, words = int(event["first"]), int(event["words"])
        places = trace.places[first : first + words]
        if event["file"] == 0:
            stray = places[(places >= _UNUSED.start) & (places < _UNUSED.stop)].tolist()
            return [f"store into byte {8 * p} of the log, which has no use" for p in stray[:1]]
        if event["file"] != 1 or self._phase in ("creation", "recovery"):
            return []
        if self._phase == "between":
            return [f"byte {8 * int(places[0])} of the tables changed outside a commit"]
        assert self._allowed is not None
        stray = places[~np.isin(places, self._allowed)]
        return [f"byte {8 * int(p)} of the tables is of no row of the batch" for p in stray[:1]]

    def noted(self, mark: dict[str, Any], medium: Medium, kinds: Kinds) -> list[str]:
        """Problems at one mark: what had to be durable by then and is not."""
        match mark["what"]:
            case "started":
                self._begin(mark, medium)
                return []
            case "recovering" | "rewinding":
                self._phase = "recovery"
                return []
            case "acked" if self.plan.is_block and self._phase == "commit":
                return []  # of an older batch, while this one goes on
            case "acked" | "recovered" | "committed":
                self._phase = "between"
            case "history":
                return []
        if self.plan.is_block:
            return []  # nothing waits for a sync
        left = {kinds.of(f, g * medium.granule_words * 8) for f, g in medium.pending}
        return [
            f"{NO_DAMAGE}{kind} not durable at '{mark['what']}'" for kind in left - _MAY_BE_PENDING
        ]

    def _begin(self, mark: dict[str, Any], medium: Medium) -> None:
        if "source" not in mark:  # no rows change
            return
        log = medium.files[0].memory.tobytes()
        count = int.from_bytes(log[(1 << 20) + 16 :][:8], "little") or 0
        at = 1 << 20 if count else 2 << 20
        words = []
        batch = self.plan.batch(mark["source"], mark["batch"])
        for index, shape in enumerate(self.plan.shapes):
            fields = _TABLE.unpack_from(log, at + 384 + 256 * index)
            weight, state, state_bytes = fields[4], fields[6], fields[7]
            rows = np.unique(batch.ids[shape.name])
            words.append(_words(weight, 4 * shape.dim, rows))
            words.append(_words(state, state_bytes // shape.rows, rows))
        self._phase = "commit"
        self._allowed = np.unique(np.concatenate(words))


def _words(start: int, row_bytes: int, rows: np.ndarray) -> np.ndarray:
    first = (start + rows * row_bytes) // 8
    last = (start + (rows + 1) * row_bytes - 1) // 8
    return np.concatenate([np.arange(a, b + 1) for a, b in zip(first, last, strict=True)])
