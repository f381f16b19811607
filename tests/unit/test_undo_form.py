"""Who writes the undo log: the background thread, or the update itself."""

import time

import numpy as np
import pytest
import torch

import trainingcxl as tcxl
from trainingcxl.errors import PoolFull

ROWS, DIM, BAGS = 20_000, 16, 4096


class Loop:
    """A loop of bare engine calls over one table, so that nothing hides the log's work."""

    def __init__(self, path, **options):
        self.pool = tcxl.Pool(path, threads=2, **options)
        config = tcxl.EmbeddingBagConfig(
            name="t", num_embeddings=ROWS, embedding_dim=DIM, feature_names=["x", "y"]
        )
        self.bags = tcxl.EmbeddingBagCollection(
            self.pool, tables=[config], optimizer=tcxl.optim.RowWiseAdagrad(lr=0.1)
        )
        self.run = tcxl.FaultTolerantRun(self.pool, self.bags)
        self.settings = [self.bags.optimizer.row_settings()]
        self.core = self.pool.core
        self.out = np.empty((BAGS, self.bags.num_columns), np.float32)
        self.batches = [
            tcxl.SparseFeatures.from_dense(
                ["x", "y"],
                torch.from_numpy(np.random.default_rng(k).integers(0, ROWS, (BAGS, 2))),
            )
            for k in range(5)
        ]
        self.next = self.core.announce([self.bags.group_input(self.batches[0])])
        self.steps = 0

    def step(self, *, rest=0.0, captures=True):
        """One batch, with `rest` seconds in which a dense part would be computed."""
        batch, now = self.batches[self.steps % 5], self.next
        self.steps += 1
        following = self.batches[self.steps % 5]
        self.next = self.core.announce([self.bags.group_input(following)])
        lookup = self.core.lookup(*self.bags.group_input(batch), self.out)
        time.sleep(rest)
        grad = np.ascontiguousarray(self.out * 0.01 + 0.001)
        self.core.prepare([(lookup, grad)], now)
        self.core.commit(self.settings, 1.0, b"{}")
        if captures and self.core.is_dense_due():
            self.core.capture(b"{}", [])

    def fused_of(self, steps, **options):
        """How many of the next `steps` batches are fused."""
        before = self.core.stats()["fused"]
        for _ in range(steps):
            self.step(**options)
        return self.core.stats()["fused"] - before


def test_every_form_gives_the_same_bits(tmp_path):
    rows = {}
    for form in ("background", "fused", "auto"):
        loop = Loop(tmp_path / form, undo_log=form)
        fused = loop.fused_of(40)
        assert form != "fused" or fused == 40
        rows[form] = [table.weight.copy() for table in loop.pool.tables.values()]
        rows[form] += [table.state.copy() for table in loop.pool.tables.values()]
        loop.pool.close()
    for form in ("fused", "auto"):
        for a, b in zip(rows["background"], rows[form], strict=True):
            assert a.tobytes() == b.tobytes()


def settles(loop, *, is_fused, **options):
    """Whether most of 16 batches come to one form; a busy machine may make it swing for a while,
    and the update writes what a late background has not begun.
    """
    for _ in range(40):
        fused = loop.fused_of(16, **options)
        if fused >= 12 if is_fused else fused <= 6:
            return True
    return False


def test_auto_follows_the_time_that_the_step_leaves(tmp_path):
    loop = Loop(tmp_path / "pool")
    assert settles(loop, is_fused=True), "nothing to hide behind, and still a pass of its own"
    assert settles(loop, is_fused=False, rest=0.02), "the background had time, and the update wrote"
    assert settles(loop, is_fused=True)
    loop.pool.close()


def test_a_log_that_nobody_empties_is_refused(tmp_path):
    """Without dense generations no frame may go: the log must not grow without end instead."""
    loop = Loop(tmp_path / "pool", log_bytes=32 << 20)

    def train():
        for _ in range(1000):
            loop.step(captures=False)

    with pytest.raises(PoolFull, match="wait for a dense generation"):
        train()
    committed = loop.core.committed
    assert 8 < committed < 1000
    loop.core.capture(b"{}", [])
    loop.core.wait_dense()
    loop.step()
    assert loop.core.committed == committed + 1
    loop.pool.close()


def test_unknown_form(tmp_path):
    with pytest.raises(ValueError, match="undo_log is 'sometimes', expected 'auto'"):
        tcxl.Pool(tmp_path / "pool", undo_log="sometimes")
    assert not (tmp_path / "pool").exists()
