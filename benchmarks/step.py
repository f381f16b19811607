"""Time of one training step: embeddings alone and a DLRM, with and without the undo log, and with
torch's own.

    python benchmarks/step.py [--shapes i,iii16] [--rounds 9] [--threads 2] [--dir DIR] [--json
    FILE]

Method (docs/performance.md): candidates interleaved in one process, one warm-up round, medians. Of
`T` threads ours has T - 1 for rows while the background writes the log, because its writer counts
as one of them; the fused log has no writer.
"""

import argparse
import gc
import json
import platform
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import trainingcxl as tcxl
from trainingcxl import _core

# tables x rows x dim, lookups a bag, batch (Criteo cardinalities for iii: docs/data.md)
CRITEO = (
    *(1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194),
    *(27, 14992, 5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572),
)
SHAPES: dict[str, dict[str, Any]] = {
    "i": {"rows": [1_000_000] * 8, "dim": 32, "lookups": 80, "batch": 2048},
    "ii": {"rows": [250_000] * 32, "dim": 64, "lookups": 120, "batch": 128},
    "iii16": {"rows": [min(n, 1_000_000) for n in CRITEO], "dim": 16, "lookups": 1, "batch": 2048},
    "iii128": {
        "rows": [min(n, 1_000_000) for n in CRITEO],
        "dim": 128,
        "lookups": 1,
        "batch": 2048,
    },
}
ZIPF_EXPONENT = 1.05


def draw_batches(
    shape: dict[str, Any], count: int, *, zipf: bool, seed: int = 0
) -> list[tcxl.SparseFeatures]:
    """`count` batches of row numbers; hot rows are spread over the table by an odd multiplier."""
    rng = np.random.default_rng(seed)
    keys = [f"f{t}" for t in range(len(shape["rows"]))]
    batches = []
    num = shape["batch"] * shape["lookups"]
    for _ in range(count):
        columns = []
        for rows in shape["rows"]:
            if zipf and rows > 1:
                a = ZIPF_EXPONENT
                u = rng.random(num)
                rank = np.floor((1 + u * ((rows + 1) ** (1 - a) - 1)) ** (1 / (1 - a)) - 1).astype(
                    np.int64
                )
                multiplier = 2654435761 % rows | 1
                while np.gcd(multiplier, rows) != 1:
                    multiplier += 2
                columns.append(np.clip(rank, 0, rows - 1) * multiplier % rows)
            else:
                columns.append(rng.integers(0, rows, num))
        values = torch.from_numpy(np.concatenate(columns))
        offsets = torch.arange(0, values.numel() + 1, shape["lookups"])
        batches.append(tcxl.SparseFeatures(keys, values, offsets=offsets))
    return batches


def table_configs(shape: dict[str, Any]) -> list[tcxl.EmbeddingBagConfig]:
    """A shape's tables t0, t1, ... of features f0, f1, ..."""
    return [
        tcxl.EmbeddingBagConfig(
            name=f"t{t}",
            num_embeddings=rows,
            embedding_dim=shape["dim"],
            feature_names=[f"f{t}"],
        )
        for t, rows in enumerate(shape["rows"])
    ]


class Ours:
    """The engine with everything that a commit does, without a dense part."""

    def __init__(
        self,
        folder: Path,
        shape: dict[str, Any],
        *,
        threads: int,
        undo_log: str,
        optimizer: str,
        **pool_options: Any,
    ) -> None:
        self.pool = tcxl.Pool(
            folder,
            threads=threads,
            undo_log="auto" if undo_log == "none" else undo_log,
            _log=undo_log != "none",
            **pool_options,
        )
        make = {
            "sgd": lambda: tcxl.optim.SGD(0.01),
            "rowwise-adagrad": lambda: tcxl.optim.RowWiseAdagrad(0.02),
        }
        tables = table_configs(shape)
        self.module = tcxl.EmbeddingBagCollection(
            self.pool, tables=tables, optimizer=make[optimizer]()
        )
        self.run = tcxl.FaultTolerantRun(self.pool, self.module, dense_every=1)
        self.core = self.pool.core
        self.grad = torch.full((shape["batch"], self.module.num_columns), 1e-4).numpy()
        self.out = np.empty_like(self.grad)
        self.settings = [self.module.optimizer.row_settings()] * len(tables)
        self.next_id = 0

    def announce(self, batch: tcxl.SparseFeatures) -> None:
        """Hands over the batch that comes next."""
        self.next_id = self.core.announce([self.module.group_input(batch)])

    def step(self, batch: tcxl.SparseFeatures, following: tcxl.SparseFeatures) -> None:
        """Lookup, update, commit; the following batch is announced first."""
        this_id = self.next_id
        self.announce(following)
        group, bags, values, offsets, weights = self.module.group_input(batch)
        lookup = self.core.lookup(group, bags, values, offsets, weights, self.out)
        self.core.prepare([(lookup, self.grad)], this_id)
        self.core.commit(self.settings, 1.0, b"{}")
        if self.core.is_dense_due():
            self.core.capture(b"{}", [])


class Torch:
    """nn.EmbeddingBag(sparse=True) and torch.optim.SGD in the same place."""

    def __init__(
        self, shape: dict[str, Any], weights: Sequence[torch.Tensor] | None = None
    ) -> None:
        self.bags = nn.ModuleList(
            nn.EmbeddingBag(
                rows,
                shape["dim"],
                mode="sum",
                sparse=True,
                include_last_offset=True,
                _weight=None if weights is None else weights[t],
            )
            for t, rows in enumerate(shape["rows"])
        )
        self.optimizer = torch.optim.SGD(self.bags.parameters(), lr=0.01)
        self.grad = torch.full((shape["batch"], shape["dim"]), 1e-4)
        self.size = shape["batch"] * shape["lookups"]
        self.offsets = torch.arange(0, self.size + 1, shape["lookups"])

    def step(self, batch: tcxl.SparseFeatures, following: tcxl.SparseFeatures) -> None:
        """Forward, backward from a fixed gradient, optimizer step."""
        del following
        outputs = [
            bag(batch.values[t * self.size : (t + 1) * self.size], self.offsets)
            for t, bag in enumerate(self.bags)
        ]
        torch.autograd.backward(outputs, [self.grad] * len(outputs))
        self.optimizer.step()
        self.optimizer.zero_grad()


def measure(
    candidates: dict[str, Callable[[int], None]], *, rounds: int, repeats: int
) -> dict[str, list[float]]:
    """Milliseconds a call, interleaved A B C A B C ..., the first round left out."""
    times: dict[str, list[float]] = {name: [] for name in candidates}
    index = 0
    for round_number in range(rounds + 1):
        for name, call in candidates.items():
            started = time.perf_counter()
            for k in range(repeats):
                call(index + k)
            if round_number > 0:
                times[name].append(1000 * (time.perf_counter() - started) / repeats)
        index += repeats
    return times


WARM_UP = 40  # steps until undo_log="auto" has chosen
CANDIDATES = {  # form of the undo log
    "auto": "auto",
    "auto, check_rows": "auto",
    "background": "background",
    "none": "none",
}


def embedding_step(
    name: str, args: argparse.Namespace, folder: Path, *, zipf: bool, optimizer: str
) -> dict[str, Any]:
    """Lookup + reduce + update, no dense part."""
    shape = SHAPES[name]
    repeats = 2 if name in ("i", "ii") else 10
    batches = draw_batches(shape, min(repeats * (args.rounds + 1), 24) + 1, zipf=zipf)
    own_threads = max(1, args.threads - 1)
    torch.set_num_threads(args.threads)
    ours = {
        key: Ours(
            folder / key,
            shape,
            threads=own_threads if undo_log == "background" else args.threads,
            undo_log=undo_log,
            optimizer=optimizer,
            check_rows=key.endswith("check_rows"),
        )
        for key, undo_log in CANDIDATES.items()
    }
    peer = Torch(shape)

    def at(k: int) -> tuple[tcxl.SparseFeatures, tcxl.SparseFeatures]:
        return batches[k % (len(batches) - 1)], batches[(k + 1) % (len(batches) - 1)]

    for engine in ours.values():
        engine.announce(batches[0])
        for k in range(WARM_UP):
            engine.step(*at(k))
        engine.announce(batches[0])  # what was announced for another place is dropped
    before = {key: engine.run.stats for key, engine in ours.items()}
    candidates: dict[str, Callable[[int], None]] = {
        key: _stepper(engine, at) for key, engine in ours.items()
    }
    candidates["nn.EmbeddingBag + SGD"] = lambda k: peer.step(*at(k))
    times = measure(candidates, rounds=args.rounds, repeats=repeats)
    after = {key: engine.run.stats for key, engine in ours.items()}
    unique = statistics.mean(
        sum(len(np.unique(c)) for c in b.values.view(len(shape["rows"]), -1).numpy())
        for b in batches[:3]
    )
    result = summarize(
        f"embedding {name} {'zipf' if zipf else 'uniform'}, {optimizer}",
        times,
        reference="nn.EmbeddingBag + SGD",
    )
    # Within a round, as the ratios to torch are.
    result["check_rows_cost"] = (
        statistics.median(
            checked / plain
            for checked, plain in zip(times["auto, check_rows"], times["auto"], strict=True)
        )
        - 1
    )
    print(f"  check_rows adds {result['check_rows_cost']:.1%} to the step with log: auto")
    result["distinct_row_share"] = unique / (len(shape["rows"]) * shape["batch"] * shape["lookups"])
    steps = repeats * (args.rounds + 1)
    for key in ("auto", "background"):
        waited = after[key].flag_wait_s - before[key].flag_wait_s
        seconds = statistics.mean(times[key]) * steps / 1000
        result["rows"][key]["flag_wait_share"] = waited / seconds
        fused = after[key].fused_batches - before[key].fused_batches
        result["rows"][key]["fused_share"] = fused / steps
    for engine in ours.values():
        engine.pool.close()
    return result


def _stepper(engine: Ours, at: Callable[[int], Any]) -> Callable[[int], None]:
    return lambda k: engine.step(*at(k))


DEFAULT_WIDTHS = (512, 256)  # hidden layers of both MLPs


class DenseModel(nn.Module):
    """Bottom MLP, dot interaction, top MLP: the default DLRM over any pooled (B, F * D)
    embeddings.
    """

    def __init__(self, num_features: int, dim: int, widths: Sequence[int] = DEFAULT_WIDTHS) -> None:
        super().__init__()
        self.dim, self.num_features = dim, num_features
        first, second = widths
        self.bottom = nn.Sequential(
            nn.Linear(13, first),
            nn.ReLU(),
            nn.Linear(first, second),
            nn.ReLU(),
            nn.Linear(second, dim),
            nn.ReLU(),
        )
        pairs = (num_features + 1) * num_features // 2
        self.top = nn.Sequential(
            nn.Linear(dim + pairs, first),
            nn.ReLU(),
            nn.Linear(first, second),
            nn.ReLU(),
            nn.Linear(second, 1),
        )
        self.lower = torch.tril_indices(num_features + 1, num_features + 1, offset=-1)

    def forward(self, dense: torch.Tensor, pooled: torch.Tensor) -> torch.Tensor:
        """Logits (B,) of dense features (B, 13) and pooled rows (B, F * D)."""
        bottom = self.bottom(dense)
        vectors = torch.cat([bottom, pooled], 1).view(-1, self.num_features + 1, self.dim)
        dots = torch.bmm(vectors, vectors.transpose(1, 2))[:, self.lower[0], self.lower[1]]
        return self.top(torch.cat([bottom, dots], 1)).squeeze(1)


class Dlrm:
    """A whole DLRM step over the pool, as a user's loop runs it."""

    def __init__(
        self,
        folder: Path,
        shape: dict[str, Any],
        *,
        threads: int,
        undo_log: str,
        dense_every: Any,
        durability: str = "process",
        lookup: str = "strict",
        widths: Sequence[int] = DEFAULT_WIDTHS,
        dense: nn.Module | None = None,
        row_optimizer: tcxl.optim.RowOptimizer | None = None,
        **pool_options: Any,
    ) -> None:
        torch.manual_seed(0)
        tables = table_configs(shape)
        self.pool = tcxl.Pool(
            folder,
            threads=threads,
            durability=durability,
            lookup=lookup,
            undo_log="auto" if undo_log == "none" else undo_log,
            _log=undo_log != "none",
            **pool_options,
        )
        self.module = tcxl.EmbeddingBagCollection(
            self.pool, tables=tables, optimizer=row_optimizer or tcxl.optim.RowWiseAdagrad(0.02)
        )
        self.dense = dense or DenseModel(len(tables), shape["dim"], widths)
        self.optimizer = torch.optim.Adam(self.dense.parameters())
        self.run = tcxl.FaultTolerantRun(
            self.pool, self.dense, self.optimizer, dense_every=dense_every
        )

    def loop(self, batches: list[Any], count: int) -> float:
        """Seconds for `count` steps through the run's own iteration."""
        loader = [batches[k % len(batches)] for k in range(count + 1)]
        started = time.perf_counter()
        self.run.batch = 0
        for steps, batch in enumerate(self.run.batches(_Seekable(loader)), 1):
            logits = self.dense(batch.dense, self.module(batch.sparse))
            self.run.step(nn.functional.binary_cross_entropy_with_logits(logits, batch.label))
            self.end_step(batch)
            if steps == count:
                return time.perf_counter() - started
        raise AssertionError("the loader was too short")

    def end_step(self, batch: Any) -> None:
        """What else belongs to a step, after its commit."""


class _Seekable:
    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def seek(self, epoch: int, batch: int) -> None:
        del epoch, batch

    def __iter__(self) -> Any:
        return iter(self.items)


class _Batch:
    def __init__(
        self, sparse: tcxl.SparseFeatures, size: int, seed: int, dense_width: int = 13
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.sparse = sparse
        self.dense = torch.rand(size, dense_width, generator=generator)
        self.label = (torch.rand(size, generator=generator) < 0.25).float()


def dlrm_step(name: str, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """What durability costs a whole step: the same loop with the log, and without log and dense
    generations.
    """
    shape = SHAPES[name]
    torch.set_num_threads(args.threads)
    batches = [
        _Batch(sparse, shape["batch"], k)
        for k, sparse in enumerate(draw_batches(shape, 16, zipf=True))
    ]
    models = {
        undo_log: Dlrm(
            folder / undo_log,
            shape,
            threads=args.threads,
            undo_log=undo_log,
            dense_every=1000 if undo_log == "none" else "auto",
        )
        for undo_log in ("auto", "fused", "background", "none")
    }
    count = 10
    times: dict[str, list[float]] = {key: [] for key in models}
    for round_number in range(args.rounds + 1):
        for key, model in models.items():
            seconds = model.loop(batches, count)
            if round_number > 0:
                times[key].append(1000 * seconds / count)
    result = summarize(f"DLRM {name} zipf, Adam", times, reference="none")
    for key in ("auto", "background"):
        stats = models[key].run.stats
        result["rows"][key]["flag_wait_share"] = stats.flag_wait_s / stats.step_s
        result["rows"][key]["fused_share"] = stats.fused_batches / stats.batches
    result["dense_every"] = models["auto"].run.dense_every
    for model in models.values():
        model.pool.close()
    return result


def summarize(title: str, times: dict[str, list[float]], *, reference: str) -> dict[str, Any]:
    """Prints and returns medians, and ratios within a round."""
    rows = {}
    base = statistics.median(times[reference])
    print(f"\n{title}: ms a step, median [min, max]; time of {reference} / time")
    for key, values in times.items():
        # Ratios within a round: machines here are noisy, neighbours in time share the noise.
        ratio = statistics.median(r / v for r, v in zip(times[reference], values, strict=True))
        rows[key] = {
            "median_ms": statistics.median(values),
            "min_ms": min(values),
            "max_ms": max(values),
            "speedup": ratio,
        }
        print(
            f"  {key:26s} {rows[key]['median_ms']:9.2f} [{min(values):8.2f}, {max(values):8.2f}] "
            f" {ratio:6.2f}x"
        )
    return {"title": title, "reference": reference, "reference_ms": base, "rows": rows}


def main() -> None:
    """Runs what the options choose."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", default="i,iii16")
    parser.add_argument("--optimizers", default="sgd,rowwise-adagrad")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dir", default="/dev/shm", help="where the pools are made")
    parser.add_argument("--json", help="write the figures to this file")
    parser.add_argument("--no-dlrm", action="store_true")
    args = parser.parse_args()
    results = []
    for name in args.shapes.split(","):
        for zipf, optimizer in product((False, True), args.optimizers.split(",")):
            folder = Path(tempfile.mkdtemp(dir=args.dir, prefix="tcxl-bench-"))
            try:
                results.append(embedding_step(name, args, folder, zipf=zipf, optimizer=optimizer))
            finally:
                shutil.rmtree(folder)
                gc.collect()  # mappings of removed pools hold their memory
    if not args.no_dlrm:
        folder = Path(tempfile.mkdtemp(dir=args.dir, prefix="tcxl-bench-"))
        try:
            results.append(dlrm_step("iii16", args, folder))
        finally:
            shutil.rmtree(folder)
    for result in results:
        for key in ("auto", "background"):
            row = result["rows"][key]
            print(
                f"{result['title']}, {key}: {row['flag_wait_share']:.2%} of the step waits for "
                f"flags, {row['fused_share']:.0%} of the batches fused"
            )
    if args.json:
        machine = {
            "cpu": platform.processor() or platform.machine(),
            "torch": torch.__version__,
            "isa": _core.isa(),
            "dir": args.dir,
            "threads": args.threads,
        }
        Path(args.json).write_text(json.dumps({"machine": machine, "results": results}, indent=1))


if __name__ == "__main__":
    main()
