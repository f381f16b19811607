"""The trainings that are recorded, on persistent memory and on files."""

from collections.abc import Callable
from typing import Any

from power_trace import Plan, Training

__all__ = ["BLOCK_TRACES", "TRACES"]


def _plain(training: Training) -> None:
    training.train(5)
    training.history += 1  # another batch 6 comes than the one that was announced and dropped
    training.train(6)
    training.commit_record()
    training.train(8)
    training.reopen(clean=True)
    training.train(9)


def _relive(training: Training) -> None:
    """Batches are taken back, and other ones come in their place."""
    training.train(5)
    training.reopen(new_data=True)
    training.train(7)
    training.reopen(exact=False)
    training.train(9)


def _rewind(training: Training) -> None:
    """Back by several batches, other ones come in their place; and back again across a life."""
    training.train(7)
    training.rewind(3, new_data=True)
    training.train(5)
    training.reopen(new_data=True)
    training.train(8)
    training.rewind(training.plan.dense_every, new_data=True)
    training.train(9)


def _closed(training: Training) -> None:
    """Closed behind its newest generation, again and again: each recovery takes batches back."""
    for _ in range(4):
        training.train(5)
        training.reopen(clean=True, new_data=True)
    training.train(6)


def _through(training: Training) -> None:
    training.train(training.plan.batches)


TRACES = {
    plan.name: plan
    for plan in (
        Plan("growth", wide_batch=3, bags=350, lookups=8, blob_bytes=3 << 20, batches=5,
             share=0.1, steps=_through),
        Plan("background", steps=_plain),
        Plan("fused", undo_log="fused", dense_every=1, steps=_plain),
        Plan("relive", steps=_relive),
        Plan("relive fused", undo_log="fused", steps=_relive),
        Plan("alternating", undo_log="alternating", dense_every=1, steps=_relive),
        Plan("closed", dense_every=3, batches=6, steps=_closed, share=0.5),
        Plan("rewind", dense_every=3, steps=_rewind),
        Plan("rewind fused", undo_log="fused", dense_every=1, steps=_rewind, share=0.5),
        Plan("relaxed", is_relaxed=True, steps=_plain, share=0.5),
        Plan("relaxed relive", is_relaxed=True, undo_log="alternating", dense_every=2,
             steps=_relive, share=0.5),
        Plan("relaxed fused", is_relaxed=True, undo_log="fused", dense_every=1, steps=_relive,
             share=0.5),
        Plan("relaxed rewind", is_relaxed=True, dense_every=3, steps=_rewind, share=0.5),
        Plan("workers", bags=520, lookups=8, threads=2, batches=5, steps=_through),
        Plan("workers fused", undo_log="fused", bags=520, lookups=8, threads=2, batches=5,
             steps=_through),
    )
}  # fmt: skip


def _block(name: str, steps: Callable[[Training], None], **settings: Any) -> Plan:
    """Few batches fill the journal: their resume records are long."""
    usual = {"bags": 12, "lookups": 7, "padding": 36_000, "batches": 14, "lag_max": 2}
    return Plan(name, medium="block", steps=steps, **{**usual, **settings})


def _journaled(training: Training) -> None:
    training.train(6)
    training.commit_record()
    training.train(10)
    training.reopen(clean=True)
    training.train(14)


def _rewind_journaled(training: Training) -> None:
    """Again and again, also after a kill."""
    training.train(9)
    training.rewind(3, new_data=True)
    training.train(7)
    training.reopen(new_data=True)
    training.train(11)
    training.rewind(5, new_data=True)
    training.train(14)


def _rewind_behind_base(training: Training) -> None:
    """The journal's base is the batch of the last opening: it knows no row that changed before."""
    training.train(7)
    training.reopen(new_data=True)
    training.train(9)
    training.rewind(2, new_data=True)
    training.train(6)


def _relive_journaled(training: Training) -> None:
    training.train(6)
    training.reopen(new_data=True)
    training.train(9)
    training.reopen(exact=False)
    training.train(14)


_SLOW_JOURNAL = (("journal: frames written", 5_000),)
_SLOWER_JOURNAL = (("journal: frames written", 25_000),)
_SLOW_DENSE = (("dense: slice", 60_000),)
_SLOW_TABLES = (("data: sync", 300_000), ("dense: slice", 1_000))

BLOCK_TRACES = {
    plan.name: plan
    for plan in (
        _block("journal", _journaled),
        _block("lag", _through, dense_every=1, lag_max=3, keep_dense=0, delays=_SLOW_JOURNAL),
        _block(
            "lag far",
            _through,
            dense_every=2,
            lag_max=4,
            keep_dense=0,
            has_same_rows=True,
            delays=_SLOWER_JOURNAL,
        ),
        _block("lag fused", _through, undo_log="fused", delays=_SLOW_JOURNAL),
        _block("checkpoint", _through, delays=_SLOW_TABLES, batches=20, padding=24_000),
        _block("full ring", _through, delays=_SLOW_TABLES, batches=44, padding=24_000, share=0.5),
        _block("slow dense", _through, delays=_SLOW_DENSE, batches=20, padding=24_000),
        _block("rewound", _rewind_journaled, dense_every=1),
        _block("behind base", _rewind_behind_base, dense_every=1, batches=9),
        _block("relived", _relive_journaled, delays=_SLOW_JOURNAL),
        _block("same rows", _relive_journaled, has_same_rows=True, dense_every=1),
        _block("grown", _through, wide_batch=6, bags=16, lookups=8, delays=_SLOW_JOURNAL),
    )
}
