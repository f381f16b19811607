"""Time to open a killed pool: roll back of one batch, replay after a power loss; against DCP.

    python benchmarks/recovery.py [--only rollback,power-loss] [--gib 2] [--json FILE]

rollback: a trainer of 26 tables (--gib in all, one lookup a feature, batch 2048, Zipf rows) is
killed when its rows are stored and its batch is not committed; the time is that of Pool(path). DCP
loads the same bytes from the same folder. rollback-large: the same with 20 lookups a feature: each
row to roll back lies on a page of its own, that has to be mapped. power-loss: a trainer at level
`power` on the disk is killed in mid-run, and the pool opened as after a restart of the machine. The
page cache is warm: the journal, whose writes go past it, is read once before; what the disk gives
to that reading is a fact beside it. Figures: seconds, DCP's over ours, and for a second bytes of
the ring, all of which is looked through, and of the frames that were in it.
"""

import argparse
import json
import os
import signal
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from report import Measurement, Result, folder_in, need_bytes, options, run_script
from rounds import Times, ratios
from step import Dlrm
from undo_log_cost import dlrm_batches

import trainingcxl as tcxl
from trainingcxl import _core

STEPS = 6  # of each life
POWER_STEPS = 60
RING_BYTES = 2 << 30


def shape_of(gib: float, lookups: int) -> dict[str, Any]:
    """26 tables x dim 32 as DLRM on Criteo has them, of one size."""
    return {
        "rows": [int(gib * 2**30) // (26 * 128)] * 26,
        "dim": 32,
        "lookups": lookups,
        "batch": 2048,
    }


def in_child(work: Callable[[], Iterator[dict[str, Any]]]) -> dict[str, Any]:
    """Runs `work` in a fork that ends by SIGKILL; what it wrote last, as JSON."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        try:
            for told in work():
                os.write(writer, json.dumps(told).encode() + b"\n")
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)  # work ends by a kill, or something is wrong
    os.close(writer)
    with os.fdopen(reader) as pipe:
        lines = pipe.read().splitlines()
    if os.waitpid(pid, 0)[1] != signal.SIGKILL:
        raise RuntimeError("the trainer was to be killed, and ended otherwise")
    last: dict[str, Any] = json.loads(lines[-1])
    return last


def life(
    folder: Path, shape: dict[str, Any], batches: list[Any], *, steps: int, **pool_options: Any
) -> Iterator[dict[str, Any]]:
    """A trainer's steps, then its death; yields what its pool has done so far."""
    model = Dlrm(
        folder,
        shape,
        threads=1,
        undo_log="fused",
        dense_every=1,
        widths=(8, 8),
        **pool_options,
    )
    model.loop(batches, steps)
    yield {"committed": model.pool.committed_batch, **model.pool.core.stats()}
    if pool_options.get("durability") != "power":
        _core.kill_at_persist(1, "commit: rows stored")
        model.loop(batches, 1)
    os.kill(os.getpid(), signal.SIGKILL)


def rollback(name: str, lookups: int, args: argparse.Namespace) -> Result:
    """Kills, openings, and loads of a distributed checkpoint in turns."""
    torch.set_num_threads(1)
    shape = shape_of(args.gib, lookups)
    num_bytes = 4 * shape["dim"] * sum(shape["rows"])
    need_bytes(args.dir, 3 * num_bytes + (2 << 30))
    batches = dlrm_batches(shape, 4)
    ours, peer, reports = Times(), Times(), []
    with folder_in(args.dir) as folder:
        state = {f"t{t}": torch.zeros(rows, shape["dim"]) for t, rows in enumerate(shape["rows"])}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # one process needs no process group
            dcp.save(state, checkpoint_id=folder / "dcp")
        for _ in range(args.rounds + 1):
            in_child(lambda: life(folder / "pool", shape, batches, steps=STEPS))
            times, pool = opened(folder / "pool")
            record(ours, times)
            reports.append(pool)
            record(peer, loaded(state, folder / "dcp"))
    for times in (ours, peer):  # a warm-up round
        del times.wall_ms[0], times.cpu_ms[0]
    result = Result(times={"Pool(path)": ours, "DCP load": peer}, threads=1)
    result.figures = {
        f"recovery/{name}/seconds": [ms / 1e3 for ms in ours.wall_ms],
        f"recovery/{name}/dcp": ratios(peer.wall_ms, ours.wall_ms),
    }
    result.facts = {"table_bytes": num_bytes, **reports[-1]}
    return result


def opened(path: Path, **options: Any) -> tuple[tuple[float, float], dict[str, Any]]:
    """Wall and CPU seconds of opening a pool, and what it found."""
    used, started = time.process_time(), time.perf_counter()
    pool = tcxl.Pool(path, threads=1, **options)
    took = time.perf_counter() - started, time.process_time() - used
    report = pool.recovery
    assert report is not None
    found = {
        "medium": pool.medium,
        "level": pool.durability,
        "page_bytes": pool.page_bytes,
        "committed_batch": report.committed_batch,
        "resumed_batch": report.resumed_batch,
        "rows_rolled_back": report.rows_rolled_back,
        "recovery_ms": report.milliseconds,
    }
    pool.close()
    return took, found


def loaded(state: dict[str, torch.Tensor], path: Path) -> tuple[float, float]:
    """Wall and CPU seconds of loading a distributed checkpoint into tensors that are there, with
    two threads: an opening has two, too, while it rolls back.
    """
    torch.set_num_threads(2)
    used, started = time.process_time(), time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, checkpoint_id=path)
    torch.set_num_threads(1)  # a fork may not use the threads of its parent
    return time.perf_counter() - started, time.process_time() - used


def read_through(path: Path) -> float:
    """Brings a file into the page cache; GB/s of that."""
    started = time.perf_counter()
    with path.open("rb", buffering=0) as file:
        while file.read(4 << 20):
            pass
    return path.stat().st_size / 1e9 / (time.perf_counter() - started)


def record(times: Times, took: tuple[float, float]) -> None:
    """Adds seconds to rounds."""
    times.wall_ms.append(1e3 * took[0])
    times.cpu_ms.append(1e3 * took[1])


def power_loss(args: argparse.Namespace) -> Result:
    """Replay of the ring on an ordinary file."""
    torch.set_num_threads(1)
    shape = shape_of(args.gib / 4, 4)
    need_bytes(args.disk, 3 * 4 * shape["dim"] * sum(shape["rows"]) + (4 << 30))
    batches = dlrm_batches(shape, 8)
    times, shares, facts = Times(), [], {}
    with folder_in(args.disk) as folder:
        for round_number in range(min(args.rounds, 5) + 1):
            told = in_child(
                lambda: life(
                    folder / "pool",
                    shape,
                    batches,
                    steps=POWER_STEPS,
                    durability="power",
                    journal_bytes=RING_BYTES,  # half full at the end: then a checkpoint is due
                )
            )
            disk_gbps = read_through(folder / "pool" / "journal")
            took, facts = opened(folder / "pool", durability="power", _assume_reboot=True)
            facts["journal_read_gbps"] = disk_gbps
            facts["ring_bytes_replayed"] = told["journal_bytes"]
            facts["checkpoints"] = told["checkpoints"]
            if round_number > 0:
                record(times, took)
                shares.append(told["journal_bytes"] / 1e9 / took[0])
    result = Result(times={"Pool(path)": times}, facts=facts)
    ring = [RING_BYTES / 1e6 / ms for ms in times.wall_ms]
    result.figures = {"recovery/ring-gbps": ring, "recovery/frames-gbps": shares}
    return result


MEASUREMENTS: dict[str, Measurement] = {
    "rollback": partial(rollback, "rollback", 1),
    "rollback-large": partial(rollback, "rollback-large", 20),
    "power-loss": power_loss,
}

if __name__ == "__main__":
    parser = options(__doc__)
    parser.add_argument("--gib", type=float, default=2.0, help="of tables")
    run_script("recovery.py", MEASUREMENTS, parser, quick=["rollback"])
