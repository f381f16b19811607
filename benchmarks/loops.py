"""Steps of an engine over fresh batches, as the scripts interleave them."""

from typing import Any

from step import Ours

import trainingcxl as tcxl
from trainingcxl.checkpoint import StepStats

REPEATS = {"i": 2, "ii": 4, "iii16": 10, "iii128": 5}  # timed steps in a round
LEAD_IN = 1
WARM_UP = 40  # steps until undo_log="auto" has chosen
BATCHES_MAX = 24  # then they come again: long after the caches have forgotten them
FUSED_MIN = 0.9


class Candidate:
    """Steps over batches in turn; ours hears of the next one."""

    def __init__(self, engine: Any, batches: list[tcxl.SparseFeatures]) -> None:
        self.engine, self.batches = engine, batches
        if isinstance(engine, Ours):
            engine.core.drop_announced()
            engine.announce(batches[0])

    def __call__(self, k: int) -> None:
        """One step. Numbers follow one another: batch k + 1 is announced in step k."""
        count = len(self.batches)
        self.engine.step(self.batches[k % count], self.batches[(k + 1) % count])


def num_batches(repeats: int, rounds: int) -> int:
    """How many batches a measurement draws."""
    return min(BATCHES_MAX, (repeats + LEAD_IN) * (rounds + 1))


def warm_up(ours: Ours, batches: list[tcxl.SparseFeatures], steps: int = WARM_UP) -> None:
    """Steps until buffers have their size and the form of the log is chosen."""
    candidate = Candidate(ours, batches)
    for k in range(steps):
        candidate(k)


def step_facts(ours: Ours, before: StepStats) -> dict[str, Any]:
    """What the engine did in each step since `before`, and where."""
    now = ours.run.stats
    steps = max(1, now.batches - before.batches)
    rows = now.rows - before.rows
    return {
        "medium": ours.pool.medium,
        "level": ours.pool.durability,
        "page_bytes": ours.pool.page_bytes,
        "distinct_row_share": rows / max(1, now.lookups - before.lookups),
        "log_bytes_a_step": (now.log_bytes - before.log_bytes) / steps,
        "fused_share": (now.fused_batches - before.fused_batches) / steps,
        "lookup_ms": 1e3 * (now.lookup_s - before.lookup_s) / steps,
        "update_ms": 1e3 * (now.update_s - before.update_s) / steps,
        "flag_wait_ms": 1e3 * (now.flag_wait_s - before.flag_wait_s) / steps,
    }


def doubt(facts: dict[str, Any]) -> str:
    """A step whose log the background wrote had two threads."""
    share = facts["fused_share"]
    return "" if share >= FUSED_MIN else f"only {share:.0%} of the steps wrote their log themselves"
