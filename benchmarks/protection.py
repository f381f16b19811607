"""What protecting every batch costs, against a checkpoint every N batches.

    python benchmarks/protection.py [--disk FOLDER] [--rounds 9] [--json FILE]

Ours: the DLRM step of iii16 (Zipf rows, default dense part) at level `power` on the disk, against
the same step with neither log nor dense generations: the difference is the cost of a batch. Theirs:
what one checkpoint of the same tables and dense part costs a training on the same disk, by
torch.save and fsync, by DCP's async_save (the time that the call blocks, and what the steps lose
until it is durable) and by torchsnapshot's take. Figures: the N at which a checkpoint every N
batches costs as much as every batch protected; for smaller N ours is cheaper. (torchsnapshot's
async_take is left out: it was seen to save values written after the call.)
"""

import argparse
import os
import shutil
import statistics
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from ladder_schedule import dense_bytes
from peers import bytes_of
from report import Measurement, Result, folder_in, need_bytes, options, run_script, timed
from step import SHAPES, Dlrm
from undo_log_cost import dlrm_batches, dlrm_facts

STEPS, WARM_UP = 10, 40
ROUNDS_MIN = 30  # the difference of two long steps is small beside what other work does to them
SAVES = 3
State = dict[str, Any]


def torch_save(state: State, path: Path) -> None:
    """A file that is durable on return."""
    with path.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())


def dcp_async(state: State, path: Path) -> Callable[[], bool]:
    """Begins; tells when it is done."""
    future = dcp.async_save(state, checkpoint_id=path)
    return lambda: bool(future.done())


def snapshot_take(state: State, path: Path) -> None:
    """As torchsnapshot does it, and a sync of what it wrote."""
    import torchsnapshot

    torchsnapshot.Snapshot.take(str(path), {"state": torchsnapshot.StateDict(**state)})
    for file in path.rglob("*"):
        if file.is_file():
            with file.open("rb") as written:
                os.fsync(written.fileno())


def cost_s(save: Any, state: State, path: Path, step: Callable[[], float], base_s: float) -> float:
    """Seconds that one checkpoint takes from a training whose step takes `base_s`."""
    started = time.perf_counter()
    is_done = save(state, path)
    spent, steps = time.perf_counter() - started, 0
    while is_done is not None and not is_done():
        spent += step()
        steps += 1
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()
    return spent - steps * base_s


def overhead_ms(ours: list[float], plain: list[float]) -> float:
    """Of a batch: the median difference, and at least what the rounds can tell from nothing."""
    differences = [a - b for a, b in zip(ours, plain, strict=True)]
    middle = statistics.median(differences)
    scatter = statistics.median(abs(d - middle) for d in differences)
    return max(middle, 1.85 * scatter / len(differences) ** 0.5, 1e-3)


def compare(args: argparse.Namespace) -> Result:
    """The cost of a batch, then that of each kind of checkpoint."""
    torch.set_num_threads(2)
    shape = SHAPES["iii16"]
    need_bytes(args.disk, 8 * bytes_of(shape))
    batches = dlrm_batches(shape, 64)
    with folder_in(args.disk) as folder:
        make = partial(Dlrm, shape=shape, threads=2)
        models = {
            "every batch": make(
                folder / "power", undo_log="auto", dense_every="auto", durability="power"
            ),
            "nothing": make(folder / "plain", undo_log="none", dense_every=1000),
        }
        for model in models.values():
            model.loop(batches, WARM_UP)
        before = models["every batch"].run.stats
        args.rounds = args.rounds if args.quick else max(args.rounds, ROUNDS_MIN)

        def loop(key: str, k: int) -> float:
            del k
            return models[key].loop(batches, STEPS)

        times = timed({key: partial(loop, key) for key in models}, args, steps=STEPS)
        result = Result(times=times)
        ours = overhead_ms(times["every batch"].wall_ms, times["nothing"].wall_ms)
        result.facts = dlrm_facts(models["every batch"], before) | {"overhead_ms_a_batch": ours}
        plain = models["nothing"]
        base_s = statistics.median(times["nothing"].wall_ms) / 1e3
        step = partial(plain.loop, batches, 1)
        state = state_of(plain)
        result.facts["checkpoint_bytes"] = sum(t.numel() * t.element_size() for t in state.values())
        saves = 1 if args.quick else SAVES
        for name, save in SAVERS.items():
            try:
                costs = [cost_s(save, state, folder / "save", step, base_s) for _ in range(saves)]
            except ImportError as error:
                result.skipped[f"protection/{name}"] = f"{error} (make bench-peers)"
                continue
            result.figures[f"protection/{name}"] = [1e3 * cost / ours for cost in costs]
            result.facts[f"{name}_s"] = costs
        for model in models.values():
            model.pool.close()
    return result


def state_of(model: Dlrm) -> dict[str, torch.Tensor]:
    """Tables with their optimizer state, and the dense part with its own, as tensors."""
    state = {}
    for name, table in model.pool.tables.items():
        state[f"{name}.weight"] = torch.from_numpy(table.weight.copy())
        state[f"{name}.state"] = torch.from_numpy(table.state.copy())
    for k, data in enumerate(dense_bytes(model.dense, model.optimizer)):
        state[f"dense.{k}"] = torch.from_numpy(data.copy())
    return state


SAVERS: dict[str, Any] = {
    "torch.save": torch_save,
    "dcp-async": dcp_async,
    "torchsnapshot": snapshot_take,
}
MEASUREMENTS: dict[str, Measurement] = {"dlrm": compare}

if __name__ == "__main__":
    warnings.filterwarnings("ignore", module="torch")  # DCP: one process needs no process group
    run_script("protection.py", MEASUREMENTS, options(__doc__))
