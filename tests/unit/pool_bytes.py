"""A small pool to be damaged, and where its bytes lie: for the tests of damage and of attacks."""

import struct
from pathlib import Path
from typing import NamedTuple

import torch

import trainingcxl as tcxl
from trainingcxl import _core
from trainingcxl.errors import TrainingCXLError
from trainingcxl.pool import Pool

KB, MB = 1 << 10, 1 << 20
SUPERBLOCKS = (0, 4 * KB)
SLOTS = (12 * KB, 16 * KB)
RESUMES = (64 * KB, 128 * KB)
DIRECTORY = 256 * KB
GEOMETRIES = (1 * MB, 2 * MB)
GEOMETRY_BYTES = 384
BLOB = 69632  # in a dense area
SLOT_MAGIC, DESCRIPTOR_MAGIC = 0x544F4C5354584354, 0x43534544544C5843


class Crashed(NamedTuple):
    """A pool as a kill left it, and the tables' bytes after each of its batches."""

    path: Path
    states: dict[int, bytes]
    committed: int


def table_bytes(pool):
    parts = []
    for name in sorted(pool.tables):
        table = pool.tables[name]
        parts += [table.weight.tobytes(), table.state.tobytes()]
    return b"".join(parts)


def train(pool, batches, dense_every, *, states=None):
    configs = [
        tcxl.EmbeddingBagConfig(
            name=name, num_embeddings=rows, embedding_dim=8, feature_names=[name]
        )
        for name, rows in (("a", 200), ("b", 37), ("c", 1))
    ]
    bags = tcxl.EmbeddingBagCollection(
        pool, tables=configs, optimizer=tcxl.optim.RowWiseAdagrad(lr=0.1)
    )
    model = torch.nn.Sequential(bags, torch.nn.Linear(24, 1))
    run = tcxl.FaultTolerantRun(
        pool, model, torch.optim.Adam(model.parameters()), dense_every=dense_every
    )
    generator = torch.Generator().manual_seed(3)
    for _ in range(batches):
        ids = torch.stack(
            [torch.randint(0, n, (16,), generator=generator) for n in (200, 37, 1)], 1
        )
        run.step(model(ids).square().sum())
        pool.core.wait_dense()  # else the clock says which generation the next slot names
        if states is not None:
            states[run.committed_batch] = table_bytes(pool)
    return run


def files(path):
    return {name: (path / name).read_bytes() for name in ("log", "data")}


def patch(path, offset, data, name="log"):
    with (path / name).open("r+b") as file:
        file.seek(offset)
        file.write(data)


def read(path, offset, size, name="log"):
    with (path / name).open("rb") as file:
        file.seek(offset)
        return file.read(size)


def flip(path, offset, name="log", mask=0x10):
    patch(path, offset, bytes([read(path, offset, 1, name)[0] ^ mask]), name)


def seed_of(path):
    return _core.crc32c(read(path, 24, 16), 0)


def reseal(record, seed):
    """`record` with its trailing checksum made right."""
    body = bytes(record[:-4])
    return body + _core.crc32c(body, seed).to_bytes(4, "little")


def newest_slot(path):
    slots = [(struct.unpack("<Q", read(path, place + 8, 8))[0], place) for place in SLOTS]
    return max(slots)[1]


def newest_geometry(path):
    copies = [(struct.unpack("<Q", read(path, place + 8, 8))[0], place) for place in GEOMETRIES]
    return max(copies)[1]


def dense_areas(path):
    """Offsets of the areas that hold a generation."""
    head = read(path, newest_geometry(path), GEOMETRY_BYTES)
    areas = struct.unpack("<16Q", head[64:192])
    return [offset for offset in areas if offset and read(path, offset, 8) != bytes(8)]


def batch_of(path, area):
    """Of the generation in an area."""
    return struct.unpack("<Q", read(path, area + 16, 8))[0]


def area_of(path, batch):
    """Offset of the area with the dense part of a batch."""
    return next(area for area in dense_areas(path) if batch_of(path, area) == batch)


def frames(path):
    """(batch, offset, bytes, place of the descriptor) of every flagged frame."""
    found = []
    for i in range(4096):
        place = DIRECTORY + 64 * i
        magic, batch, _, offset, size = struct.unpack("<5Q", read(path, place, 40))
        if magic == DESCRIPTOR_MAGIC:
            found.append((batch, offset, size, place))
    return sorted(found)


def outcome(crashed, resume="exact"):
    """Opens the pool: "refused" with its bytes unchanged, or the recovery point, whose tables
    must be true.
    """
    before = files(crashed.path)
    try:
        pool = Pool(crashed.path, threads=1, resume=resume)
    except TrainingCXLError as error:
        refusal = str(error)
    else:
        refusal = ""
    if refusal:
        assert "do:" in refusal, refusal
        assert files(crashed.path) == before
        return "refused"
    try:
        batch = pool.committed_batch
        if pool.is_new:
            return "new"
        assert table_bytes(pool) == crashed.states[batch]
    finally:
        pool.core.drop_announced()
        pool.close()
    return batch
