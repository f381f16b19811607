"""Ours against a software PMEM system that the host drives, as users would write it with torch.

    python benchmarks/ladder_host.py [--only i,RM1] [--rounds 9] [--dir /dev/shm] [--json FILE]

Theirs: nn.EmbeddingBag(sparse=True) on tables mapped from persistent memory, torch.optim; at the
end of every batch the host finds the changed rows, copies them and the dense part (with its
optimizer's state) to a redo log and forces them. Ours: the same model, rows and optimizers over a
pool, with its defaults. Both on the code path of DAX (flushed, fenced) in a folder in memory that
is taken for it, two threads, Zipf rows. Models: shape i with a small dense part, and RM1 to RM4 of
the simulator (src/trainingcxl/sim/data/workloads.toml), RM2 with smaller tables.
Figures: their step over ours; RM3 and RM4 are reported: a CPU's dense part hides everything.
"""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ladder_schedule import DAX, dense_bytes
from native_loops import log_bytes, log_rows
from peers import bytes_of, fill, mapped_tables
from report import Measurement, Result, folder_in, need_bytes, options, run_script, timed
from rounds import ratios
from step import SHAPES, Dlrm, draw_batches
from step import _Batch as Batch
from torch import nn
from undo_log_cost import dlrm_facts

import trainingcxl as tcxl
from trainingcxl.sim.workload import Model, find_model

ROWS_MAX = {"RM2": 250_000}
# Of a round. A loop announces one batch more than it trains: with few steps its log would count.
STEPS = {"i": 6, "RM1": 4, "RM2": 3, "RM3": 6, "RM4": 3}
RATE = 0.01


def mlp(widths: Sequence[int], *, has_head: bool) -> nn.Sequential:
    """Linear layers with ReLU between them, and after the last unless it gives logits."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*(layers[:-1] if has_head else layers))


class ModelDense(nn.Module):
    """Bottom MLP, dot interaction, top MLP by the simulator's model."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.dim, self.vectors = model.bottom[-1], model.num_tables + 1
        self.bottom = mlp(model.bottom, has_head=False)
        self.top = mlp((model.interaction_width, *model.top), has_head=True)
        self.lower = torch.tril_indices(self.vectors, self.vectors, offset=-1)

    def forward(self, dense: torch.Tensor, pooled: torch.Tensor) -> torch.Tensor:
        """Logits (B,)."""
        bottom = self.bottom(dense)
        vectors = torch.cat([bottom, pooled], 1).view(-1, self.vectors, self.dim)
        dots = torch.bmm(vectors, vectors.transpose(1, 2))[:, self.lower[0], self.lower[1]]
        return self.top(torch.cat([bottom, dots], 1)).squeeze(1)


class HostDriven:
    """torch on a mapping, and a redo log that is forced at every batch end."""

    def __init__(self, folder: Path, shape: dict[str, Any], dense: nn.Module) -> None:
        self.weights = mapped_tables(folder, shape)
        for weight in self.weights:
            fill(weight)
        self.bags = nn.ModuleList(
            nn.EmbeddingBag(
                *weight.shape, mode="sum", sparse=True, include_last_offset=True, _weight=weight
            )
            for weight in self.weights
        )
        self.dense = dense
        self.row_optimizer = torch.optim.SGD(self.bags.parameters(), lr=RATE)
        self.optimizer = torch.optim.Adam(dense.parameters())
        self.size = shape["batch"] * shape["lookups"]
        self.offsets = torch.arange(0, self.size + 1, shape["lookups"])
        row_bytes = 4 * shape["dim"] + 8
        rows = sum(min(self.size, rows) for rows in shape["rows"])
        parameters = sum(p.numel() for p in dense.parameters())
        log_size = rows * row_bytes + 3 * 4 * parameters + (1 << 20)
        self.log = np.memmap(folder / "redo", np.uint8, "w+", shape=(log_size,))
        self.log[:] = 0
        self.log_bytes = 0

    def step(self, batch: Batch) -> None:
        """Forward, backward, optimizers, redo log."""
        ids = [
            batch.sparse.values[t * self.size : (t + 1) * self.size] for t in range(len(self.bags))
        ]
        pooled = [bag(part, self.offsets) for bag, part in zip(self.bags, ids, strict=True)]
        logits = self.dense(batch.dense, torch.cat(pooled, 1))
        nn.functional.binary_cross_entropy_with_logits(logits, batch.label).backward()
        self.row_optimizer.step()
        self.optimizer.step()
        self.row_optimizer.zero_grad()
        self.optimizer.zero_grad()
        at = 64  # the batch number, last
        for weight, part in zip(self.weights, ids, strict=True):
            at = log_rows(weight.numpy(), torch.unique(part).numpy(), self.log, at)
        for data in dense_bytes(self.dense, self.optimizer):
            at = log_bytes(data, self.log, at)
        log_bytes(np.full(8, 1, np.uint8), self.log, 0)
        self.log_bytes = at


def model_of(name: str) -> Model:
    """The model, with tables that fit here."""
    if name != "i":
        model = find_model(name)
        tables = tuple(
            replace(table, rows=min(table.rows, ROWS_MAX.get(name, table.rows)))
            for table in model.tables
        )
        return replace(model, tables=tables)
    small = find_model("RM1")
    tables = (replace(small.tables[0], count=8, rows=SHAPES["i"]["rows"][0], lookups=80, dim=32),)
    return replace(small, name="i", bottom=(13, 64, 32), top=(64, 1), tables=tables)


def shape_of(model: Model) -> dict[str, Any]:
    """A model's tables as step.py has them."""
    (table,) = model.tables
    rows = [table.rows] * table.count
    return {"rows": rows, "dim": table.dim, "lookups": table.lookups, "batch": model.batch}


def compare(name: str, args: argparse.Namespace) -> Result:
    """Both systems in turns."""
    torch.set_num_threads(2)
    model, steps = model_of(name), STEPS[name]
    shape = shape_of(model)
    num_lookups = model.batch * len(shape["rows"]) * shape["lookups"]
    gradients = 3 * num_lookups * 4 * shape["dim"]  # torch's, and our frames
    need_bytes(args.dir, int(2.2 * bytes_of(shape)) + gradients)
    drawn = draw_batches(shape, 6, zipf=True)
    batches = [Batch(s, model.batch, k, model.bottom[0]) for k, s in enumerate(drawn)]
    with folder_in(args.dir) as folder:
        theirs = HostDriven(folder / "host", shape, ModelDense(model))
        ours = Dlrm(
            folder / "pool",
            shape,
            threads=2,
            undo_log="auto",
            dense_every="auto",
            dense=ModelDense(model),
            row_optimizer=tcxl.optim.SGD(RATE),
            **DAX,
        )
        ours.loop(batches, 12)
        before = ours.run.stats

        def step_ours(k: int) -> float:
            first = k * steps % len(batches)
            return ours.loop([*batches[first:], *batches[:first]], steps)

        def step_theirs(k: int) -> None:
            for n in range(steps):
                theirs.step(batches[(k * steps + n) % len(batches)])

        times = timed({"ours": step_ours, "host-driven": step_theirs}, args, steps=steps)
        result = Result(times=times, threads=2)
        result.figures[f"ladder-b/{name}"] = ratios(
            times["host-driven"].wall_ms, times["ours"].wall_ms
        )
        result.facts = dlrm_facts(ours, before) | {
            "their_log_bytes_a_step": theirs.log_bytes,
            "rows_a_table": shape["rows"][0],
            "table_bytes": bytes_of(shape),
        }
        ours.pool.close()
    return result


MEASUREMENTS: dict[str, Measurement] = {name: partial(compare, name) for name in STEPS}

if __name__ == "__main__":
    run_script("ladder_host.py", MEASUREMENTS, options(__doc__), quick=["i"])
