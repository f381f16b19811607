"""What the guest's pools have promised, and whether it was kept after a kill."""

import json
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Tally:
    """What one pool has promised, and what was found after each kill."""

    name: str
    kills: int = 0
    kills_opening: int = 0
    recoveries: int = 0
    torn: int = 0  # recoveries that changed rows
    durable_lines: int = 0
    durable: int = 0  # the least batch that a recovery must find
    dense: int = 0  # the least dense part that it must find
    is_known: bool = False  # the pool's batch 0 was reported
    opened: dict[str, Any] = field(default_factory=dict)
    mismatches: list[str] = field(default_factory=list)
    milliseconds: list[float] = field(default_factory=list)

    def hear(self, event: str, rest: str) -> None:
        """One line of the guest about this pool."""
        if event == "opening" and rest == "exact":
            self.durable = self.dense  # from here on batches may have been taken back
        elif event == "opened":
            self._compare(json.loads(rest))
        elif event == "durable":
            batch, dense = map(int, rest.split())
            if batch < self.durable:
                self.mismatches.append(f"durable went back from {self.durable} to {batch}")
            self.durable, self.dense, self.is_known = batch, dense, True
            self.durable_lines += 1
        elif event == "done":
            done = json.loads(rest)
            for who in ("reader", "trainer"):
                if done[who]:
                    self.mismatches.append(f"after the close, for a {who}: {done[who]}")
        elif event == "error" or (event == "ended" and rest not in "01"):
            self.mismatches.append(f"{event} {rest}")

    def _compare(self, opened: dict[str, Any]) -> None:
        self.opened = opened
        self.milliseconds.append(opened["milliseconds"])
        if opened["fault"]:
            self.mismatches.append(opened["fault"])
        if not self.is_known:
            return
        self.recoveries += 1
        self.torn += opened["changed"] > 0
        if not opened["has_point"]:
            self.mismatches.append("the pool is gone")
        elif opened["committed"] < self.durable:
            self.mismatches.append(f"batch {opened['committed']} found, {self.durable} promised")
        elif opened["resumed"] < self.dense:
            self.mismatches.append(f"resumed at {opened['resumed']}, {self.dense} promised")

    def line(self, seconds: float) -> dict[str, Any]:
        """The result, for print."""
        found = {key: self.opened.get(key) for key in ("medium", "map_sync", "flush", "page_bytes")}
        return {
            "rig": "vm",
            "machine": self.name,
            "kills": self.kills,
            "kills_opening": self.kills_opening,
            "recoveries": self.recoveries,
            "torn": self.torn,
            "mismatches": len(self.mismatches),
            **found,
            "durable_reports": self.durable_lines,
            "last_batch": self.durable,
            "recovery_ms_max": round(max(self.milliseconds, default=0)),
            "seconds": round(seconds),
        }
