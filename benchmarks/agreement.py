"""Beside the speed: the same values as FBGEMM's, and the same bits for any threads and vectors.

    python benchmarks/agreement.py [--json FILE]

Figures: the largest difference of a weight from FBGEMM's after some steps from equal tables with
random gradients; and how many different tables result from 1 and 2 threads and every instruction
set that this CPU has (1: all have equal bits).
"""

import argparse
import hashlib
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from loops import Candidate
from numpy.typing import NDArray
from peers import EPS, RATES, Fbgemm
from report import Measurement, Result, folder_in, options, run_script
from step import SHAPES, Ours, draw_batches

from trainingcxl import _core

STEPS = 4
SETS = ("scalar", "avx2", "avx512")
# The shapes of step_peers.py with tables that take seconds.
BATCH_MAX = 256  # in sums of many gradients the order shows: FBGEMM's is off first (see the facts)
ROWS_MAX = {"i": 20_000, "ii": 5_000, "iii16": 100_000, "iii128": 20_000}


def smaller(name: str) -> dict[str, Any]:
    """A shape with smaller tables and batches."""
    shape = SHAPES[name]
    rows = [min(rows, ROWS_MAX[name]) for rows in shape["rows"]]
    return {**shape, "rows": rows, "batch": min(shape["batch"], BATCH_MAX)}


def gradient(columns: int, batch: int) -> torch.Tensor:
    """Random, the same each time."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(batch, columns, generator=generator) * 1e-3


def train(folder: Path, name: str, optimizer: str, threads: int) -> Ours:
    """Our engine after the steps."""
    shape = smaller(name)
    ours = Ours(folder, shape, threads=threads, undo_log="fused", optimizer=optimizer)
    ours.grad[:] = gradient(ours.module.num_columns, shape["batch"]).numpy()
    candidate = Candidate(ours, draw_batches(shape, STEPS, zipf=True))
    for k in range(STEPS):
        candidate(k)
    return ours


def exact_steps(
    weights: list[NDArray[np.float64]], name: str, optimizer: str, grad: NDArray[np.float64]
) -> list[NDArray[np.float64]]:
    """The steps in double precision, on copies of the weights: who of two is off."""
    shape, dim = smaller(name), SHAPES[name]["dim"]
    weights = [weight.copy() for weight in weights]
    states = [np.zeros(len(weight)) for weight in weights]
    for batch in draw_batches(shape, STEPS, zipf=True):
        for t, ids in enumerate(batch.values.view(len(weights), -1).numpy()):
            order = np.argsort(ids, kind="stable")
            rows, begins = np.unique(ids[order], return_index=True)
            bags = order // shape["lookups"]
            sums = np.add.reduceat(grad[bags, t * dim : (t + 1) * dim], begins, axis=0)
            if optimizer == "sgd":
                weights[t][rows] -= RATES["sgd"] * sums
                continue
            states[t][rows] += np.square(sums).mean(axis=1)
            rate = RATES[optimizer] / (np.sqrt(states[t][rows]) + EPS)
            weights[t][rows] -= rate[:, None] * sums
    return weights


def largest(one: Sequence[NDArray[Any]], other: Sequence[NDArray[Any]]) -> float:
    """The largest difference of two lists of tables."""
    return max(float(np.abs(a - b).max()) for a, b in zip(one, other, strict=True))


def differences(optimizer: str, args: argparse.Namespace) -> Result:
    """Ours against FBGEMM's, every shape."""
    result = Result(is_timed=False)
    torch.set_num_threads(1)
    worst = []
    for name in SHAPES:
        shape = smaller(name)
        with folder_in(args.dir) as folder:
            peer = Fbgemm(folder / "fbgemm", shape, optimizer=optimizer)
            start = Ours(folder / "a", shape, threads=1, undo_log="fused", optimizer=optimizer)
            first = [table.weight.astype(np.float64) for table in start.pool.tables.values()]
            start.pool.close()
            for weight, values in zip(peer.weights, first, strict=True):
                weight.copy_(torch.from_numpy(values))
            peer.grad = gradient(len(shape["rows"]) * shape["dim"], shape["batch"])
            for batch in draw_batches(shape, STEPS, zipf=True):
                peer.step(batch, batch)
            ours = train(folder / "b", name, optimizer, 1)
            mine = [table.weight.copy() for table in ours.pool.tables.values()]
            ours.pool.close()
            theirs = [weight.numpy() for weight in peer.weights]
            exact = exact_steps(first, name, optimizer, peer.grad.numpy().astype(np.float64))
            worst.append(largest(mine, theirs))
            result.facts[name] = {
                "ours from FBGEMM": worst[-1],
                "ours from double precision": largest(mine, exact),
                "FBGEMM from double precision": largest(theirs, exact),
            }
            del peer, theirs
    result.figures[f"agreement/{optimizer}"] = [max(worst)]
    return result


def bits(args: argparse.Namespace) -> Result:
    """Different tables over threads and instruction sets, every shape and optimizer."""
    found = _core.isa()
    sets = [name for name in SETS if _core.use_isa(name)]
    result = Result(facts={"instruction_sets": sets, "this_cpu": found}, is_timed=False)
    most = 0
    try:
        for name in SHAPES:
            for optimizer in ("sgd", "rowwise-adagrad"):
                digests = set()
                for isa in sets:
                    for threads in (1, 2):
                        _core.use_isa(isa)
                        with folder_in(args.dir) as folder:
                            digests.add(digest(train(folder / "p", name, optimizer, threads)))
                most = max(most, len(digests))
    finally:
        _core.use_isa(found)
    result.figures["agreement/bits"] = [float(most)]
    return result


def digest(ours: Ours) -> str:
    """Of the pooled rows and of all tables; closes the pool."""
    sha = hashlib.sha256(np.ascontiguousarray(ours.out).data)
    for table in ours.pool.tables.values():
        sha.update(np.ascontiguousarray(table.weight).data)
        sha.update(np.ascontiguousarray(table.state).data)
    ours.pool.close()
    return sha.hexdigest()


MEASUREMENTS: dict[str, Measurement] = {
    "sgd": partial(differences, "sgd"),
    "rowwise-adagrad": partial(differences, "rowwise-adagrad"),
    "bits": bits,
}

if __name__ == "__main__":
    run_script("agreement.py", MEASUREMENTS, options(__doc__), quick=["sgd"])
