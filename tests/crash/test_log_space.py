"""The undo log's space is used again (cases E1, D6)."""

from pathlib import Path

import numpy as np
import torch

import trainingcxl as tcxl

_ROWS, _BATCHES = 1000, 300


def test_a_log_of_fixed_size_serves_any_number_of_batches(tmp_path: Path) -> None:
    """Frames of reclaimed batches make room, wherever in the ring they lie.

    Persistent: frames back to the newest dense generation, about ten here, in a ring for thirty.
    A ring that turned around too early, and counted what lies behind as lost, would run full, make
    training wait, and with a free size grow until the disk is full.
    """
    with tcxl.Pool(tmp_path / "ring.pool", log_bytes=8 << 20) as pool:
        rows = tcxl.EmbeddingBagCollection(
            pool,
            tables=[
                tcxl.EmbeddingBagConfig(
                    name="t", num_embeddings=_ROWS, embedding_dim=64, feature_names=["t"]
                )
            ],
            optimizer=tcxl.optim.Adagrad(lr=0.1),
        )
        run = tcxl.FaultTolerantRun(pool, rows, dense_every=5, sparse_of=lambda ids: ids)
        batches = [
            torch.from_numpy(np.random.default_rng(k).integers(0, _ROWS, (300 + 40 * (k % 9), 1)))
            for k in range(_BATCHES)
        ]
        for _ in run.epochs(1):
            for ids in run.batches(_Epoch(batches)):
                run.step(rows(ids).square().sum())
        assert run.committed_batch == _BATCHES
        assert pool.core.stats()["log_growths"] == 1


class _Epoch:
    def __init__(self, batches: list[torch.Tensor]) -> None:
        self._batches = batches
        self._next = 0

    def seek(self, epoch: int, batch: int) -> None:
        self._next = batch

    def __iter__(self):
        return iter(self._batches[self._next :])
