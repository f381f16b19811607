"""A trainer of embedding rows in NumPy, which shares no code with the package, and its torture.

The loss pulls each pooled row to a target: half the square of (pooled - target), whose gradient is
pooled - target. The gradient depends on the rows, so a wrong row spreads.
"""

import itertools
import os
import random
import signal
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

ROWS, DIM, BAGS, BATCHES, LR, EPS = {"a": 90, "b": 11}, 24, 32, 40, 0.1, 1e-10


@dataclass
class Batch:
    ids: dict[str, np.ndarray]  # (BAGS, 3)
    target: np.ndarray  # (BAGS, 2 * DIM)


def make_batch(number: int) -> Batch:
    rng = np.random.default_rng([7, number])
    ids = {
        name: (rows * rng.random((BAGS, 3)) ** 2).astype(np.int64) for name, rows in ROWS.items()
    }
    return Batch(ids, rng.standard_normal((BAGS, 2 * DIM), dtype=np.float32))


class NumpyTrainer:
    """Rows (R, D) and Adagrad state (R, D), float32, all sums in lookup order."""

    def __init__(self, weights: dict[str, np.ndarray]) -> None:
        self.weight = {name: weight.copy() for name, weight in weights.items()}
        self.state = {name: np.zeros_like(weight) for name, weight in weights.items()}

    def step(self, batch: Batch) -> None:
        for i, (name, ids) in enumerate(batch.ids.items()):
            weight = self.weight[name]
            pooled = np.zeros((BAGS, DIM), dtype=np.float32)
            for k in range(ids.shape[1]):
                pooled += weight[ids[:, k]]
            grad = pooled - batch.target[:, i * DIM : (i + 1) * DIM]
            total: dict[int, np.ndarray] = {}
            for bag, k in itertools.product(range(BAGS), range(ids.shape[1])):
                row = int(ids[bag, k])
                total[row] = total[row] + grad[bag] if row in total else grad[bag].copy()
            for row, g in total.items():
                self.state[name][row] += g * g
                root = np.sqrt(self.state[name][row]) + np.float32(EPS)
                weight[row] -= np.float32(LR) * g / root

    def copy_of(self) -> dict[str, tuple[bytes, bytes]]:
        return {n: (self.weight[n].tobytes(), self.state[n].tobytes()) for n in self.weight}


def train(path: str, medium: str, on_commit: Any, on_open: Any) -> None:
    """The same training in a pool."""
    import torch

    import trainingcxl as tcxl
    from trainingcxl.nn import EmbeddingBagConfig

    torch.set_num_threads(1)
    options = {"durability": "power", "_medium": "fsdax"} if medium == "fsdax" else {}
    with tcxl.Pool(path, threads=2, **options) as pool:
        tables = [
            EmbeddingBagConfig(
                name=name, num_embeddings=rows, embedding_dim=DIM, feature_names=[name],
                init_scale=0.5,
            )
            for name, rows in ROWS.items()
        ]  # fmt: skip
        rows = tcxl.EmbeddingBagCollection(
            pool, tables=tables, optimizer=tcxl.optim.Adagrad(LR, eps=EPS)
        )
        run = tcxl.FaultTolerantRun(
            pool,
            rows,
            dense_every=1 + os.getpid() % 5,
            sparse_of=lambda batch: {n: torch.from_numpy(ids) for n, ids in batch.ids.items()},
        )
        on_open(pool)
        for _ in run.epochs(1):
            for batch in run.batches(Batches()):
                pooled = rows({n: torch.from_numpy(ids) for n, ids in batch.ids.items()})
                loss = (pooled - torch.from_numpy(batch.target)).square().sum() * 0.5
                run.step(loss)
                on_commit(pool)


class Batches:
    """Batches of an epoch from any on."""

    def seek(self, epoch: int, batch: int) -> None:
        self._next = batch

    def __iter__(self) -> Any:
        return map(make_batch, range(self._next, BATCHES))


def rows_of(pool: Any) -> dict[str, tuple[bytes, bytes]]:
    return {n: (t.weight.tobytes(), t.state.tobytes()) for n, t in pool.tables.items()}


def torture(folder: Path, medium: str, kills: int, seed: int) -> dict[str, Any]:
    """Kills lives at random crash points; every life compares its rows with the oracle's."""
    from trainingcxl import _core
    from trainingcxl.pool import Pool

    choose = random.Random(seed)
    path, first = str(folder / "oracle.pool"), folder / "first.npz"
    expected: list[dict[str, tuple[bytes, bytes]]] = []
    differences: list[str] = []
    done = found = 0
    deadline = time.monotonic() + 60
    while done < kills and not differences and time.monotonic() < deadline:
        reader, writer = os.pipe()
        countdown = choose.randint(1, 400)
        pid = os.fork()
        if pid == 0:
            try:
                _core.kill_at_persist(countdown)
                _life(path, medium, first, expected, writer)
            except BaseException:
                os.write(writer, b"!" + traceback.format_exc().encode())
            finally:
                os._exit(0)
        os.close(writer)
        with os.fdopen(reader) as pipe:
            said = pipe.read()
        _, status = os.waitpid(pid, 0)
        done += os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        found += said.count("ok")
        if "!" in said:
            differences.append(said)
        if first.exists() and not expected:
            with np.load(first) as weights:
                trainer = NumpyTrainer(dict(weights))
            expected.append(trainer.copy_of())
            for number in range(BATCHES):
                trainer.step(make_batch(number))
                expected.append(trainer.copy_of())
        if not os.WIFSIGNALED(status):
            Pool.discard(path)
    return {"kills": done, "points_compared": found, "differences": differences}


def _life(path: str, medium: str, first: Path, expected: list[Any], writer: int) -> None:
    def check(pool: Any, where: str) -> None:
        batch = pool.committed_batch
        if expected and rows_of(pool) != expected[batch]:
            os.write(writer, f"! rows differ {where}, at batch {batch}\n".encode())
            os._exit(0)
        os.write(writer, b"ok\n" if expected else b"")

    def on_open(pool: Any) -> None:
        if not first.exists():
            temporary = first.with_name("unfinished.npz")
            np.savez(temporary, **{name: table.weight for name, table in pool.tables.items()})
            temporary.rename(first)
        check(pool, "after recovery")

    train(path, medium, lambda pool: check(pool, "after a commit"), on_open)
