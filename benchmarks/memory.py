"""Memory of a training: no copy of a table, ever; flat over thousands of commits (case E1, E2).

    python benchmarks/memory.py FOLDER

FOLDER should lie on an ordinary disk with 6 GB free. Prints one JSON line a figure and exits with 1
if one is beyond its bound. RssAnon is anonymous resident memory: the mapped pool is not part of it.
What must not grow is looked at in both levels, from the 1,000th commit on: memory, open files,
mappings, threads, bytes of the pool's files.
"""

import json
import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import click

_MIB = 1 << 20
_DIM, _TABLES, _BATCH = 64, 8, 2048
_ROWS_SMALL = 10
GROWTH_MAX = {"rss_anon_mib": 2.0}  # nothing else may grow
_SETTLED = 1000  # commits until buffers, logs and areas have their final size


def _status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) << 10
    raise KeyError(field)


def _footprint() -> dict[str, int]:
    return {
        "rss_anon": _status_bytes("RssAnon"),
        "fds": sum(1 for _ in Path("/proc/self/fd").iterdir()),
        "maps": Path("/proc/self/maps").read_text().count("\n"),
        "threads": sum(1 for _ in Path("/proc/self/task").iterdir()),
    }


def _train(
    pool_path: str, rows: int, batches: int, sample_every: int, marker: str, level: str
) -> None:
    """In a process of its own: trains and prints its footprint as JSON lines."""
    import numpy as np
    import torch

    import trainingcxl as tcxl

    torch.set_num_threads(1)
    began = time.perf_counter()
    peak = 0
    medium = "block" if level == "power" else ""  # on tmpfs, too
    with tcxl.Pool(pool_path, threads=2, durability=level, _medium=medium) as pool:
        opened = time.perf_counter() - began
        names = [f"t{i}" for i in range(_TABLES)]
        tables = [
            tcxl.EmbeddingBagConfig(
                name=name, num_embeddings=rows, embedding_dim=_DIM, feature_names=[name]
            )
            for name in names
        ]
        module = tcxl.EmbeddingBagCollection(
            pool, tables=tables, optimizer=tcxl.optim.Adagrad(0.05)
        )
        run = tcxl.FaultTolerantRun(
            pool, module, dense_every=10, sparse_of=lambda ids: ids, settings={"rows": rows}
        )
        recovery = None if pool.recovery is None else pool.recovery.milliseconds
        print(json.dumps({"opened_s": opened, "recovery_ms": recovery}), flush=True)

        class Batches:
            def seek(self, epoch: int, batch: int) -> None:
                self.next = batch

            def __iter__(self) -> Any:
                for number in range(self.next, batches):
                    draw = np.random.default_rng(number).random((_BATCH, _TABLES))
                    yield torch.from_numpy((rows * draw**2).astype(np.int64))

        unique = 0
        for _ in run.epochs(1):
            for ids in run.batches(Batches()):
                unique = max(unique, sum(len(column.unique()) for column in ids.t()))
                run.step(module(ids).square().sum() * 1e-3)
                peak = max(peak, _status_bytes("RssAnon"))
                if run.committed_batch % sample_every == 0:
                    run.sync()  # nothing waits for its turn in a queue
                    sample = {"batch": run.committed_batch, "unique": unique, **_footprint()}
                    sizes = [path.stat().st_size for path in Path(pool_path).iterdir()]
                    print(json.dumps({**sample, "pool_bytes": sum(sizes)}), flush=True)
                if marker and run.committed_batch == int(marker):
                    os.kill(os.getpid(), signal.SIGKILL)
    print(json.dumps({"peak_rss_anon": peak}), flush=True)


def child(
    pool: Path, rows: int, batches: int, every: int, kill_at: int = 0, level: str = "process"
) -> list[Any]:
    """Trains in a process of its own; what it printed."""
    command = [sys.executable, __file__, "--child", str(pool), str(rows), str(batches), str(every)]
    # Large buffers go back to the system when freed: what is left is what is held, not what the
    # allocator keeps for the next time.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(256 << 10)}
    done = subprocess.run(
        [*command, str(kill_at or ""), level],
        stdout=subprocess.PIPE,
        text=True,
        check=False,
        env=environment,
    )
    if done.returncode != (-signal.SIGKILL if kill_at else 0):
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}")
    return [json.loads(line) for line in done.stdout.splitlines()]


def _remove(pool: Path) -> None:
    for name in ("log", "data", "journal", "lock"):
        (pool / name).unlink(missing_ok=True)


def _report(failures: list[str], name: str, value: float, bound: float, **more: Any) -> None:
    is_well = value <= bound
    print(json.dumps({"figure": name, "value": value, "bound": bound, "ok": is_well, **more}))
    if not is_well:
        failures.append(name)


def growths(lines: list[Any], settled: int) -> dict[str, float]:
    """By how much each figure rose from the commits at `settled` to the last ones."""
    samples = [line for line in lines if line.get("batch", 0) >= settled]
    # A sample may catch a buffer in use or not: medians of the first and the last third.
    third = max(1, len(samples) // 3)

    def rise(key: str) -> float:
        early, late = (
            statistics.median(line[key] for line in part)
            for part in (samples[:third], samples[-third:])
        )
        return float(late - early)

    figures = {name: rise(name) for name in ("fds", "maps", "threads", "pool_bytes")}
    return {"rss_anon_mib": round(rise("rss_anon") / _MIB, 2), **figures}


def _measure(folder: Path, rows: int, commits: int) -> list[str]:
    failures: list[str] = []
    large, small, flat = folder / "large.pool", folder / "small.pool", folder / "flat.pool"
    for pool in (large, small, flat):
        _remove(pool)
    grown = child(large, rows, 230, 200)
    at_200 = next(line for line in grown if line.get("batch") == 200)
    base = next(line for line in child(small, _ROWS_SMALL, 230, 200) if line.get("batch") == 200)
    unique_bytes = at_200["unique"] * _DIM * 4 * 2  # weights and state
    pooled = 2 * _BATCH * _TABLES * _DIM * 4  # outputs and their gradients
    data_bytes = (large / "data").stat().st_size
    _report(
        failures,
        "RssAnon above that of 10-row tables, MiB",
        round((at_200["rss_anon"] - base["rss_anon"]) / _MIB, 1),
        round((3 * (unique_bytes + pooled) + 64 * _MIB) / _MIB, 1),
        pool_gib=round(data_bytes / 2**30, 2),
        unique_rows=at_200["unique"],
    )
    peak = grown[-1]["peak_rss_anon"]
    _report(failures, "peak RssAnon of that pool, MiB", round(peak / _MIB, 1), 1024)
    _remove(large)
    child(large, rows, 400, 100, kill_at=40)
    again = child(large, rows, 60, 100)
    _report(
        failures,
        "Pool(path) after a kill, s",
        round(again[0]["opened_s"], 3),
        2.0,
        recovery_ms=round(again[0]["recovery_ms"], 1),
    )
    _remove(large)
    for level in ("process", "power"):
        samples = child(flat, 5000, commits, 250, level=level)
        for name, growth in growths(samples, min(_SETTLED, commits // 5)).items():
            bound = GROWTH_MAX.get(name, 0)
            _report(failures, f"growth of {name}, {level}", growth, bound, commits=commits)
        _remove(flat)
    return failures


@click.command()
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False))
@click.option("--rows", default=1_048_576, show_default=True, help="Of each of 8 tables: 4 GiB.")
@click.option("--commits", default=5000, show_default=True)
def main(folder: Path, rows: int, commits: int) -> None:
    """Measure in FOLDER."""
    folder.mkdir(parents=True, exist_ok=True)
    failures = _measure(folder, rows, commits)
    sys.exit(f"beyond their bounds: {failures}" if failures else 0)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        path, num_rows, num_batches, sample, kill_at, wanted = sys.argv[2:]
        _train(path, int(num_rows), int(num_batches), int(sample), kill_at, wanted)
    else:
        main()
