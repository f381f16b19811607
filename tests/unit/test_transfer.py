"""The way of pooled rows to the model's device and of gradients back, with a device that is
none.
"""

import numpy as np
import pytest
import torch
from torch import nn

import trainingcxl as tcxl
from trainingcxl.nn.transfer import HostTransfer, PinnedTransfer, transfer_for


class FakeDevice:
    """Keeps a copy of its own of everything that crosses, and reuses its host buffers, as a
    GPU's transfer does.
    """

    def __init__(self):
        self.buffers = [torch.empty(0), torch.empty(0)]
        self.calls = []
        self.next = 0

    def output(self, num_bags, num_columns):
        self.calls.append(("output", num_bags, num_columns))
        self.next = 1 - self.next
        size = num_bags * num_columns
        if self.buffers[self.next].numel() < size:
            self.buffers[self.next] = torch.empty(size)
        return self.buffers[self.next][:size].fill_(float("nan")).view(num_bags, num_columns)

    def to_device(self, pooled):
        self.calls.append(("to_device", *pooled.shape))
        return pooled.clone()

    def to_host(self, grad):
        self.calls.append(("to_host", *grad.shape))
        return grad.detach().to(torch.float32).contiguous().clone()


def train(pool, transfer, steps=6, sizes=(4, 2, 7)):
    config = tcxl.EmbeddingBagConfig(
        name="t", num_embeddings=30, embedding_dim=4, feature_names=["x", "y"]
    )
    bags = tcxl.EmbeddingBagCollection(
        pool, tables=[config], optimizer=tcxl.optim.RowWiseAdagrad(lr=0.1)
    )
    torch.manual_seed(0)
    model = nn.Sequential(bags, nn.Linear(8, 1))
    if transfer is not None:
        bags.transfer = transfer
    run = tcxl.FaultTolerantRun(pool, model, torch.optim.SGD(model.parameters(), lr=0.1))
    generator = torch.Generator().manual_seed(1)
    losses = []
    for i in range(steps):
        loss = (
            model(torch.randint(0, 30, (sizes[i % len(sizes)], 2), generator=generator))
            .square()
            .sum()
        )
        run.step(loss)
        losses.append(loss.item())
    return losses


def test_fake_device_trains_to_the_same_bits(bench):
    """Reused buffers, batches of changing size: the rows and losses are those of a host-only
    run.
    """
    with bench.open(bench.folder / "host.pool") as pool:
        expected = train(pool, None), pool.digest()
    fake = FakeDevice()
    with bench.open() as pool:
        assert (train(pool, fake), pool.digest()) == expected
    assert fake.calls[:3] == [("output", 4, 8), ("to_device", 4, 8), ("to_host", 4, 8)]
    assert len(fake.calls) == 18


def test_two_lookups_in_one_step(bench):
    """The buffer of the first lookup is not overwritten by the second while its rows are in use."""
    pool = bench.open()
    config = tcxl.EmbeddingBagConfig(
        name="t", num_embeddings=30, embedding_dim=4, feature_names=["x"]
    )
    bags = tcxl.EmbeddingBagCollection(pool, tables=[config], optimizer=tcxl.optim.SGD(lr=0.1))
    bags.transfer = FakeDevice()
    run = tcxl.FaultTolerantRun(pool, bags)
    ids = [torch.tensor([[i]]) for i in range(4)]
    pooled = [bags(one) for one in ids]
    for i, rows in enumerate(pooled):
        assert np.array_equal(rows.detach().numpy()[0], pool.tables["t"].weight[i])
    before = pool.tables["t"].weight.copy()
    run.step(sum((i + 1) * rows.sum() for i, rows in enumerate(pooled)))
    moved = before - pool.tables["t"].weight
    np.testing.assert_allclose(moved[:4, 0], [0.1, 0.2, 0.3, 0.4], rtol=1e-5)


def test_half_precision_and_strided_gradients(bench):
    """Autocast hands back float16 or float64; expanded gradients are not contiguous."""
    pool = bench.open()
    config = tcxl.EmbeddingBagConfig(
        name="t", num_embeddings=30, embedding_dim=4, feature_names=["x"]
    )
    bags = tcxl.EmbeddingBagCollection(pool, tables=[config], optimizer=tcxl.optim.SGD(lr=1.0))
    run = tcxl.FaultTolerantRun(pool, bags)
    before = pool.tables["t"].weight.copy()
    run.step(bags(torch.tensor([[1]])).double().sum())
    run.step(bags(torch.tensor([[2]])).half().sum().float())
    run.step(bags(torch.tensor([[3]])).t().sum())
    np.testing.assert_allclose((before - pool.tables["t"].weight)[1:4], 1.0, rtol=1e-5)


def test_transfer_follows_the_module(bench):
    """CPU modules use the host; other devices are named as unsupported, not silently copied."""
    assert isinstance(transfer_for(torch.device("cpu")), HostTransfer)
    with pytest.raises(ValueError, match="meta"):
        transfer_for(torch.device("meta"))
    pool = bench.open()
    config = tcxl.EmbeddingBagConfig(
        name="t", num_embeddings=30, embedding_dim=4, feature_names=["x"]
    )
    bags = tcxl.EmbeddingBagCollection(pool, tables=[config], optimizer=tcxl.optim.SGD(lr=1.0))
    bags(torch.tensor([[1]]))
    with pytest.raises(ValueError, match="meta"):
        bags.to("meta")(torch.tensor([[1]]))


@pytest.mark.cuda
def test_cuda_trains_as_the_host_does(bench):
    """Pinned buffers both ways, rows bit for bit those of the host where the model is linear."""
    assert isinstance(transfer_for(torch.device("cuda")), PinnedTransfer)
    ids = torch.tensor([[1], [2], [1]])
    rows = {}
    for device in ("cpu", "cuda"):
        pool = bench.open(bench.folder / f"{device}.pool")
        config = tcxl.EmbeddingBagConfig(
            name="t", num_embeddings=30, embedding_dim=4, feature_names=["x"]
        )
        bags = tcxl.EmbeddingBagCollection(
            pool, tables=[config], optimizer=tcxl.optim.RowWiseAdagrad(lr=0.1)
        ).to(device)
        run = tcxl.FaultTolerantRun(pool, bags)
        for _ in range(5):
            pooled = bags(ids)
            assert pooled.device.type == device
            run.step((pooled * 2.0).sum())
        rows[device] = pool.tables["t"].weight.copy()
    assert np.array_equal(rows["cpu"], rows["cuda"])
