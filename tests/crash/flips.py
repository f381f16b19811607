"""Flips one bit in every byte that a small pool uses, one after the other, and looks what comes of
it.

    python tests/crash/flips.py [--every 1] [--seed 0]

Two pools with checksums of rows: one that was closed, one that a kill left with frames in its log.
A byte is *used* where its 64-byte line is not all zero; of the others some are tried, too. What a
flip comes to: detected (opening refuses, or `verify` names it and rows are wrong), repaired
(`verify` names it, the pool opens at a state of the training), harmless (nobody sees it, the state
is right), undetected: a wrong state that nobody sees. Prints one JSON line; exits with 1 if any is
undetected.
"""

import json
import os
import random
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from crash_images import in_children

import trainingcxl as tcxl
from trainingcxl import _core
from trainingcxl.errors import TrainingCXLError
from trainingcxl.pool import Pool, verify

ROWS = {"a": 30, "b": 7}
BATCHES, DENSE_EVERY, KEEP_DENSE = 8, 3, 1
NAMES = ("closed", "killed")
LINE = 64
UNUSED_TRIED = 300

State = dict[str, bytes]


def state_of(core: "_core.Pool") -> State:
    """Rows, their state and the dense part."""
    state = {
        table["name"]: core.weight(i).tobytes() + core.state(i).tobytes()
        for i, table in enumerate(core.tables())
    }
    blob = core.dense_blob()
    return {**state, "dense": b"" if blob is None else blob.tobytes()}


class Training:
    """Two tables with two optimizers, and a dense part."""

    def __init__(self, path: Path, *, dense_every: int, check_rows: bool) -> None:
        torch.manual_seed(0)
        self.pool = Pool(path, threads=1, check_rows=check_rows, keep_dense=KEEP_DENSE)
        kinds = (tcxl.optim.Adagrad(lr=0.1), tcxl.optim.RowWiseAdagrad(lr=0.1))
        self.bags = [
            tcxl.EmbeddingBagCollection(
                self.pool,
                tables=[
                    tcxl.EmbeddingBagConfig(
                        name=name, num_embeddings=rows, embedding_dim=4, feature_names=[name]
                    )
                ],
                optimizer=kind,
            )
            for (name, rows), kind in zip(ROWS.items(), kinds, strict=True)
        ]
        self.head = torch.nn.Linear(8, 1)
        model = torch.nn.ModuleList([*self.bags, self.head])
        adam = torch.optim.Adam(self.head.parameters())
        self.run = tcxl.FaultTolerantRun(
            self.pool, model, adam, dense_every=dense_every, sparse_of=lambda batch: batch
        )

    def train(self) -> dict[int, State]:
        """The states after every batch."""
        states = {}
        generator = torch.Generator().manual_seed(3)
        batches = [
            {
                bag: torch.randint(0, rows, (6, 1), generator=generator)
                for bag, rows in zip(self.bags, ROWS.values(), strict=True)
            }
            for _ in range(BATCHES)
        ]
        for batch in self.run.batches(batches):
            pooled = torch.cat([bag(ids) for bag, ids in batch.items()], 1)
            self.run.step(self.head(pooled).square().sum())
            self.pool.core.wait_dense()
            states[self.run.committed_batch] = state_of(self.pool.core)
        return states


@dataclass
class Target:
    """A pool to be damaged, and what it may open at."""

    name: str
    path: Path
    states: dict[int, State]


def targets(folder: Path, *, check_rows: bool) -> list[Target]:
    """The pools."""
    reference = Training(folder / "reference", dense_every=1, check_rows=check_rows)
    states = reference.train()
    reference.pool.close()
    closed = Training(folder / "closed", dense_every=DENSE_EVERY, check_rows=check_rows)
    closed.train()
    shutil.copytree(folder / "closed", folder / "killed")
    closed.pool.close()
    return [Target(name, folder / name, states) for name in NAMES]


def places(path: Path, every: int, choose: random.Random) -> Iterator[tuple[str, int]]:
    """Bytes to be flipped: of files and offsets."""
    for name in ("log", "data"):
        content = (path / name).read_bytes()
        used, unused = [], []
        for line in range(0, len(content), LINE):
            is_used = content[line : line + LINE] != bytes(LINE)
            (used if is_used else unused).append(line)
        offsets = [line + i for line in used for i in range(LINE) if line + i < len(content)]
        begin = choose.randrange(every)
        yield from ((name, offset) for offset in offsets[begin::every])
        tried = choose.sample(unused, min(len(unused), max(1, UNUSED_TRIED // every)))
        yield from ((name, line + choose.randrange(LINE)) for line in tried)


def outcome(target: Target) -> str:
    """What the damaged pool comes to."""
    try:
        damage = verify(target.path)
        core = _core.Pool(  # as Pool does, but for the engine's threads
            path=str(target.path), device="", durability="process", read_only=True, unlocked=False,
            trust_after_reboot=False, force_medium="", assume_reboot=False, sparse=False,
        )  # fmt: skip
        try:
            found = core.recover(True)
            json.loads(found["resume"])
            is_right = state_of(core) == target.states.get(found["resumed_batch"])
        finally:
            core.close(False)
    except TrainingCXLError:
        return "detected"
    if is_right:
        return "repaired" if damage else "harmless"
    return "detected" if damage else "undetected"


def flip_all(target: Target, every: int, seed: int) -> tuple[Counter[str], list[str]]:
    """Counts of outcomes, and the places of those that nobody saw."""
    choose = random.Random(f"{target.name} {seed}")
    if outcome(target) != "harmless":
        raise SystemExit(f"the {target.name} pool is not whole before any flip")
    counts: Counter[str] = Counter()
    unseen = []
    files = {name: np.memmap(target.path / name, np.uint8, "r+") for name in ("log", "data")}
    for name, offset in places(target.path, every, choose):
        bit = 1 << choose.randrange(8)
        files[name][offset] ^= bit
        found = outcome(target)
        files[name][offset] ^= bit
        counts[found] += 1
        if found == "undetected":
            unseen.append(f"{target.name}/{name} byte {offset}, bit {bit}")
    return counts, unseen


def run_target(number: int, *, every: int, seed: int, check_rows: bool) -> dict[str, Any]:
    """One of the pools, in a folder of its own."""
    shm = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shm if shm.is_dir() else None) as folder:
        target = targets(Path(folder), check_rows=check_rows)[number]
        counts, unseen = flip_all(target, every, seed)
    return {"counts": counts, "unseen": unseen}


@click.command()
@click.option("--every", default=1, show_default=True, help="Flip every N-th byte alone.")
@click.option("--seed", default=0, show_default=True, help="Of bits, and of what is left out.")
@click.option("--check-rows/--no-check-rows", default=True, help="Checksums of rows.")
def main(every: int, seed: int, check_rows: bool) -> None:
    """Flip, look, count."""
    jobs = [
        lambda number=number: run_target(number, every=every, seed=seed, check_rows=check_rows)
        for number in range(len(NAMES))
    ]
    counts: Counter[str] = Counter()
    unseen: list[str] = []
    for _, result in in_children(jobs, len(os.sched_getaffinity(0))):
        if "failed" in result:
            raise SystemExit(result["failed"])
        counts.update(result["counts"])
        unseen += result["unseen"]
    kinds = ("detected", "repaired", "harmless", "undetected")
    figures = {kind: counts[kind] for kind in kinds}
    print(json.dumps({"rig": "flips", "bytes": counts.total(), **figures}))
    for place in unseen:
        print(place, file=sys.stderr)
    sys.exit(1 if unseen else 0)


if __name__ == "__main__":
    main()
