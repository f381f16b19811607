"""A whole DLRM step, every batch durable, against TorchRec's DLRM, which keeps nothing.

    python benchmarks/dlrm_peers.py [--rounds 9] [--json FILE]

The 26 Criteo tables (iii16), Zipf rows, two threads, row-wise Adagrad, the same MLPs and Adam.
TorchRec's tables are its fused collection (FBGEMM's CPU kernels), the fastest that it has without
several processes. Figure: its time over ours. On a CPU the MLPs are most of a step: it ranks whole
systems, not embedding engines (those: step_peers.py).
"""

import argparse
from typing import Any

import torch
from loops import BATCHES_MAX
from peers import EPS, RATES, bytes_of
from report import Measurement, Result, Skipped, folder_in, need_bytes, options, run_script, timed
from rounds import ratios
from step import DEFAULT_WIDTHS, SHAPES, Dlrm
from torch import nn
from undo_log_cost import DLRM_STEPS, DLRM_WARM_UP, dlrm_batches, dlrm_facts

THREADS = 2


class TorchRec:
    """TorchRec's DLRM over its fused collection, with tables in memory of its own."""

    def __init__(self, shape: dict[str, Any]) -> None:
        try:
            from torchrec.models.dlrm import DLRM
            from torchrec.modules.embedding_configs import EmbeddingBagConfig
            from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection
            from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
            from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
        except (ImportError, OSError) as error:
            raise Skipped(f"TorchRec is not installed (make bench-peers): {error}") from error
        torch.manual_seed(0)
        dim, widths = shape["dim"], list(DEFAULT_WIDTHS)
        tables = [
            EmbeddingBagConfig(
                name=f"t{t}", num_embeddings=rows, embedding_dim=dim, feature_names=[f"f{t}"]
            )
            for t, rows in enumerate(shape["rows"])
        ]
        collection = FusedEmbeddingBagCollection(
            tables=tables,
            optimizer_type=RowWiseAdagrad,
            optimizer_kwargs={"lr": RATES["rowwise-adagrad"], "eps": EPS},
            device=torch.device("cpu"),
        )
        self.model = DLRM(collection, 13, [*widths, dim], [*widths, 1])
        dense = [
            parameter
            for name, parameter in self.model.named_parameters()
            if not name.startswith("sparse_arch.")
        ]
        self.optimizer = torch.optim.Adam(dense)
        self.jagged = KeyedJaggedTensor

    def loop(self, batches: list[Any], count: int) -> None:
        """`count` steps."""
        for k in range(count):
            batch = batches[k % len(batches)]
            sparse = self.jagged(
                keys=batch.sparse.keys, values=batch.sparse.values, offsets=batch.sparse.offsets
            )
            logits = self.model(batch.dense, sparse).squeeze(1)
            nn.functional.binary_cross_entropy_with_logits(logits, batch.label).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()


def compare(args: argparse.Namespace) -> Result:
    """Both in turn."""
    torch.set_num_threads(THREADS)
    shape = SHAPES["iii16"]
    need_bytes(args.dir, 2 * bytes_of(shape))
    theirs = TorchRec(shape)
    batches = dlrm_batches(shape, BATCHES_MAX)
    with folder_in(args.dir) as folder:
        ours = Dlrm(folder / "pool", shape, threads=THREADS, undo_log="auto", dense_every="auto")
        for model in (ours, theirs):
            model.loop(batches, DLRM_WARM_UP)
        before = ours.run.stats
        candidates = {
            "ours": lambda k: ours.loop(batches, DLRM_STEPS),
            "TorchRec": lambda k: theirs.loop(batches, DLRM_STEPS),
        }
        times = timed(candidates, args, steps=DLRM_STEPS)
        result = Result(times=times, threads=THREADS)
        result.figures["torchrec/dlrm"] = ratios(times["TorchRec"].wall_ms, times["ours"].wall_ms)
        result.facts = dlrm_facts(ours, before)
        ours.pool.close()
    return result


MEASUREMENTS: dict[str, Measurement] = {"dlrm": compare}

if __name__ == "__main__":
    run_script("dlrm_peers.py", MEASUREMENTS, options(__doc__))
