"""A small job: a pool, a model over one table with two features, and its run."""

import torch
from torch import nn

import trainingcxl as tcxl

ROWS, DIM = 40, 4


class Counter:
    """A state object of the user's."""

    def __init__(self):
        self.count = 0

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


class Job:
    """A pool, a small model over one table with two features, and its run."""

    def __init__(self, pool, *, optimizer=None, dense=True, seed=0, **options):
        self.pool = pool
        self.rows = optimizer or tcxl.optim.RowWiseAdagrad(lr=0.1)
        config = tcxl.EmbeddingBagConfig(
            name="t", num_embeddings=ROWS, embedding_dim=DIM, feature_names=["x", "y"]
        )
        self.bags = tcxl.EmbeddingBagCollection(pool, tables=[config], optimizer=self.rows)
        torch.manual_seed(seed)
        self.head = nn.Linear(2 * DIM, 1)
        self.model = nn.Sequential(self.bags, self.head)
        self.dense = torch.optim.Adam(self.head.parameters(), lr=0.01) if dense else None
        self.run = tcxl.FaultTolerantRun(pool, self.model, self.dense, **options)

    def loss(self, ids, scale=1.0):
        return scale * (self.model(ids) - 1.0).square().sum()

    @property
    def weight(self):
        return self.pool.tables["t"].weight


def batches(count, size=6, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, ROWS, (size, 2), generator=generator) for _ in range(count)]


def data_bytes(pool):
    return (pool.path / "data").read_bytes()


def dense_twin(job):
    """The same model with a dense table, whose gradients torch clips and steps."""
    table = nn.Embedding(ROWS, DIM)
    with torch.no_grad():
        table.weight.copy_(torch.from_numpy(job.weight.copy()))
    head = nn.Linear(2 * DIM, 1)
    head.load_state_dict(job.head.state_dict())
    return table, head
