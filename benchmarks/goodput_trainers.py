"""The trainers of goodput.py: ours, and torch's with its checkpoints; each goes on where its folder
stands.
"""

import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from step import DenseModel
from torch import nn

import trainingcxl as tcxl

TABLES, DIM, BATCH = 26, 16, 2048


def draw(number: int, rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Ids (B, T), dense features (B, 13) and labels of batch `number`."""
    rng = np.random.default_rng(number)
    return (
        torch.from_numpy((rows * rng.random((BATCH, TABLES)) ** 3).astype(np.int64)),
        torch.from_numpy(rng.random((BATCH, 13), dtype=np.float32)),
        torch.from_numpy((rng.random(BATCH) < 0.25).astype(np.float32)),
    )


class Ours:
    """Every batch durable."""

    def __init__(self, folder: Path, rows: int, *, has_log: bool = True) -> None:
        torch.manual_seed(0)
        self.rows = rows
        self.pool = tcxl.Pool(folder, _log=has_log)
        tables = [
            tcxl.EmbeddingBagConfig(
                name=f"t{t}", num_embeddings=rows, embedding_dim=DIM, feature_names=[f"f{t}"]
            )
            for t in range(TABLES)
        ]
        self.module = tcxl.EmbeddingBagCollection(
            self.pool, tables=tables, optimizer=tcxl.optim.SGD(0.05)
        )
        self.dense = DenseModel(TABLES, DIM)
        self.run = tcxl.FaultTolerantRun(
            self.pool,
            self.dense,
            torch.optim.Adam(self.dense.parameters()),
            sparse_of=lambda batch: batch[0],
            dense_every="auto" if has_log else 1000,
        )
        self.batches = iter(self.run.batches(self))

    def seek(self, epoch: int, batch: int) -> None:
        """The loader's."""
        del epoch
        self.next = batch

    def __iter__(self) -> Any:
        while True:
            self.next += 1
            yield draw(self.next - 1, self.rows)

    @property
    def batch(self) -> int:
        """Batches trained."""
        return self.run.committed_batch

    def step(self) -> None:
        """One batch."""
        ids, values, labels = next(self.batches)
        logits = self.dense(values, self.module(ids))
        self.run.step(nn.functional.binary_cross_entropy_with_logits(logits, labels))

    def save_if_due(self) -> None:
        """Nothing to do: it is saved."""


class Peer:
    """nn.EmbeddingBag and torch.optim; saves all state every `every` batches in turn to a, b."""

    def __init__(self, folder: Path, rows: int, *, method: str, every: int) -> None:
        torch.manual_seed(0)
        folder.mkdir(exist_ok=True)
        self.folder, self.rows, self.method, self.every = folder, rows, method, every
        self.bags = nn.ModuleList(
            nn.EmbeddingBag(rows, DIM, mode="sum", sparse=True) for _ in range(TABLES)
        )
        self.dense = DenseModel(TABLES, DIM)
        self.row_optimizer = torch.optim.SGD(self.bags.parameters(), lr=0.05)
        self.optimizer = torch.optim.Adam(self.dense.parameters())
        for parameter in self.dense.parameters():  # so that its state exists and can be loaded into
            parameter.grad = torch.zeros_like(parameter)
        self.optimizer.step()
        self.batch = 0
        self.pending: Any = None
        self.restore()

    def state(self) -> dict[str, Any]:
        """Everything, as tensors."""
        slots = {
            f"{k}.{name}": value
            for k, state in self.optimizer.state_dict()["state"].items()
            for name, value in state.items()
        }
        return {
            "bags": self.bags.state_dict(),
            "dense": self.dense.state_dict(),
            "optimizer": slots,
            "batch": torch.tensor(self.batch),
        }

    def load(self, state: dict[str, Any]) -> None:
        """Puts what `state` returned back."""
        self.bags.load_state_dict(state["bags"])
        self.dense.load_state_dict(state["dense"])
        own = self.optimizer.state_dict()["state"]
        with torch.no_grad():
            for name, value in state["optimizer"].items():
                k, _, slot = name.partition(".")
                own[int(k)][slot].copy_(value)
        self.batch = int(state["batch"])

    def restore(self) -> None:
        """The newest complete checkpoint, named by the file `newest`."""
        newest = self.folder / "newest"
        if not newest.exists():
            return
        place = self.folder / newest.read_text()
        if self.method == "torch.save":
            self.load(torch.load(place, weights_only=True))
        elif self.method == "DCP async_save":
            state = self.state()
            dcp.load(state, checkpoint_id=place)
            self.load(state)
        else:
            torchsnapshot = import_torchsnapshot()
            app = {"all": torchsnapshot.StateDict(**self.state())}
            torchsnapshot.Snapshot(str(place)).restore(app)
            self.load(dict(app["all"]))

    def step(self) -> None:
        """One batch."""
        ids, values, labels = draw(self.batch, self.rows)
        pooled = torch.cat([bag(ids[:, t : t + 1]) for t, bag in enumerate(self.bags)], 1)
        loss = nn.functional.binary_cross_entropy_with_logits(self.dense(values, pooled), labels)
        loss.backward()
        self.row_optimizer.step()
        self.optimizer.step()
        self.row_optimizer.zero_grad()
        self.optimizer.zero_grad()
        self.batch += 1

    def save_if_due(self) -> None:
        """Begins a save every so many batches, and publishes one that has ended."""
        if self.pending is not None and self.pending[0].done():
            self.finish()
        if self.batch % self.every == 0 and self.pending is None:
            self.save()

    def save(self) -> None:
        """Saves to the place that is not the newest."""
        newest = self.folder / "newest"
        name = "b" if newest.exists() and newest.read_text() == "a" else "a"
        place = self.folder / name
        if self.method == "torch.save":
            with place.open("wb") as file:
                torch.save(self.state(), file)
                file.flush()
                os.fsync(file.fileno())
            self.publish(name)
        elif self.method == "DCP async_save":
            self.pending = (dcp.async_save(self.state(), checkpoint_id=place), name)
        else:
            torchsnapshot = import_torchsnapshot()
            torchsnapshot.Snapshot.take(
                str(place), {"all": torchsnapshot.StateDict(**self.state())}
            )
            os.sync()
            self.publish(name)

    def finish(self) -> None:
        """Waits for a save in the background and makes it the newest."""
        future, name = self.pending
        future.result()
        self.pending = None
        self.publish(name)

    def publish(self, name: str) -> None:
        """One small atomic step."""
        temporary = self.folder / "newest.new"
        temporary.write_text(name)
        temporary.replace(self.folder / "newest")


def import_torchsnapshot() -> Any:
    """Imported where it is used: it may not be installed."""
    import torchsnapshot

    return torchsnapshot


def make(method: str, folder: Path, rows: int, every: int) -> Any:
    """The trainer of a method."""
    if method == "ours":
        return Ours(folder, rows)
    return Peer(folder, rows, method=method, every=every)
