"""The digest is over the logical state: equal for pools that train on alike, different for any
bit that matters.
"""

import shutil
import struct

import pytest
import torch
from torch import nn

import trainingcxl as tcxl
from trainingcxl.pool import Pool, inspect

MB = 1 << 20


def train(pool, batches=5, *, dense_every=1, scale=1.0, finish=True, head_seed=0):
    configs = [
        tcxl.EmbeddingBagConfig(
            name=name, num_embeddings=rows, embedding_dim=8, feature_names=[name]
        )
        for name, rows in (("a", 100), ("b", 7))
    ]
    bags = tcxl.EmbeddingBagCollection(
        pool, tables=configs, optimizer=tcxl.optim.RowWiseAdagrad(lr=0.1)
    )
    torch.manual_seed(head_seed)
    model = nn.Sequential(bags, nn.Linear(16, 1))
    run = tcxl.FaultTolerantRun(
        pool, model, torch.optim.Adam(model.parameters()), dense_every=dense_every
    )
    generator = torch.Generator().manual_seed(1)
    for _ in range(batches - run.committed_batch):
        ids = torch.stack([torch.randint(0, n, (8,), generator=generator) for n in (100, 7)], 1)
        run.step(scale * model(ids).square().sum())
    if finish:
        run.finish()
    return run


def digest_of(bench, name, **options):
    """Digest of a new pool after training with these options."""
    pool_options = options.pop("pool", {})
    with bench.open(bench.folder / name, **pool_options) as pool:
        train(pool, **options)
        return pool.digest()


def flip(path, name, offset):
    with (path / name).open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


def test_layout_identity_and_history_do_not_count(bench):
    """Other uuid, other log size, threads, dense_every, level, order of tables' creation: one
    digest.
    """
    expected = digest_of(bench, "plain")
    assert digest_of(bench, "again") == expected
    assert digest_of(bench, "log", pool={"log_bytes": 8 * MB}) == expected
    assert digest_of(bench, "threads", pool={"threads": 3}) == expected
    assert digest_of(bench, "lazy", dense_every=50) == expected
    dax = {"durability": "power", "_medium": "fsdax"}
    assert digest_of(bench, "dax", pool=dax) == expected


def test_history_of_crashes_does_not_count(bench):
    """Killed, rolled back, resumed: the end has the digest of the run that never stopped."""
    expected = digest_of(bench, "plain", batches=8)
    pool = bench.open()
    run = train(pool, batches=5, dense_every=3, finish=False)
    assert run.committed_batch == 5
    with bench.open(bench.image()) as again:
        point = again.committed_batch
        assert point < 5
        generator = torch.Generator().manual_seed(1)  # the user's loader goes on where the pool is
        for _ in range(point):
            for n in (100, 7):
                torch.randint(0, n, (8,), generator=generator)
        resume(again, generator, 8)
        assert again.digest() == expected


def resume(pool, generator, batches):
    configs = [
        tcxl.EmbeddingBagConfig(
            name=name, num_embeddings=rows, embedding_dim=8, feature_names=[name]
        )
        for name, rows in (("a", 100), ("b", 7))
    ]
    bags = tcxl.EmbeddingBagCollection(
        pool, tables=configs, optimizer=tcxl.optim.RowWiseAdagrad(lr=0.1)
    )
    model = nn.Sequential(bags, nn.Linear(16, 1))
    run = tcxl.FaultTolerantRun(pool, model, torch.optim.Adam(model.parameters()))
    while run.committed_batch < batches:
        ids = torch.stack([torch.randint(0, n, (8,), generator=generator) for n in (100, 7)], 1)
        run.step(model(ids).square().sum())
    run.finish()


def test_everything_that_training_depends_on_counts(bench):
    """One more batch, another gradient, another dense part, finished or not, other rows that no
    batch used.
    """
    digests = [
        digest_of(bench, "plain"),
        digest_of(bench, "longer", batches=6),
        digest_of(bench, "scaled", scale=1.001),
        digest_of(bench, "dense", head_seed=1),
        digest_of(bench, "open", finish=False),
        digest_of(bench, "none", batches=0),
    ]
    assert len(set(digests)) == len(digests)


@pytest.mark.parametrize("what", ["weight", "state"])
@pytest.mark.parametrize("table", ["a", "b"])
@pytest.mark.parametrize("place", ["first", "last"])
def test_flipped_byte_of_a_row(bench, what, table, place):
    """Issue 2: a flipped byte of a row or of optimizer state changes it, to the last byte of the
    last row.
    """
    expected = digest_of(bench, "good")
    path = bench.folder / "good"
    with Pool(path, read_only=True) as pool:
        column = getattr(pool.tables[table], what)
        base = min(t.weight.ctypes.data for t in pool.tables.values())
        offset = column.ctypes.data - base + (0 if place == "first" else column.nbytes - 1)
    flip(path, "data", offset)
    assert inspect(path, digest=True)["digest"] != expected
    flip(path, "data", offset)
    assert inspect(path, digest=True)["digest"] == expected


def test_bytes_between_the_columns_do_not_count(bench):
    """Padding up to 2 MiB is not state."""
    expected = digest_of(bench, "good")
    flip(bench.folder / "good", "data", 100 * 8 * 4 + 1)
    assert inspect(bench.folder / "good", digest=True)["digest"] == expected


def test_unused_log_bytes_do_not_count(bench):
    """Records of batches that are done with, and the other slot's unused bytes."""
    expected = digest_of(bench, "good")
    path = bench.folder / "good"
    with (path / "log").open("rb") as file:
        copies = []
        for place in (MB, 2 * MB):
            file.seek(place)
            copies.append(file.read(128))
    newest = max(copies, key=lambda head: struct.unpack("<Q", head[8:16])[0])
    flip(path, "log", struct.unpack("<Q", newest[40:48])[0] + 300)  # in the undo ring
    flip(path, "log", 20 * 1024 + 7)
    assert inspect(path, digest=True)["digest"] == expected


def test_digest_in_the_middle_of_training(bench):
    """It brings the dense part up to the commit first: a function of the batches, not of the
    background thread.
    """
    pool = bench.open()
    train(pool, 7, dense_every=50, finish=False)
    expected = digest_of(bench, "eager", batches=7, finish=False)
    assert pool.digest() == expected
    copy = bench.folder / "copy.pool"
    shutil.copytree(bench.path, copy)
    assert inspect(copy, digest=True)["digest"] == expected
