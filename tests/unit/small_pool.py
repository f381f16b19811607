"""Small tables, and a run that changes some of their rows: for tests of pools."""

import torch

import trainingcxl as tcxl
from trainingcxl.pool import TableSpec

MB = 1 << 20


def spec(name="t", rows=100, dim=8, optimizer="rowwise-adagrad", scale=0.1, seed=0):
    return TableSpec(
        name=name,
        num_embeddings=rows,
        embedding_dim=dim,
        optimizer=optimizer,
        init_scale=scale,
        init_seed=seed,
    )


def commit_batches(pool, count, ids=(0, 3, 3, 1)):
    """A run of its own that changes some rows `count` times."""
    config = tcxl.EmbeddingBagConfig(
        name="t", num_embeddings=100, embedding_dim=8, feature_names=["f"]
    )
    bags = tcxl.EmbeddingBagCollection(
        pool, tables=[config], optimizer=tcxl.optim.RowWiseAdagrad(lr=0.1)
    )
    run = tcxl.FaultTolerantRun(pool, bags, dense_every=1)
    for i in range(count):
        run.step(bags(torch.tensor(ids).reshape(-1, 1) + i % 5).sum())
    return run
