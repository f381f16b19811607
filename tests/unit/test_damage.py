"""Pools whose bytes are wrong: flipped, cut, foreign, newer, of another geometry or byte order, hostile.

Every attack is built here from a good pool. Whatever is done to it, opening must either refuse with a message that says
what, where and what to do, or arrive at a state that the training really went through: never at anything else, never
in a crash, and a refused pool keeps its bytes.
"""

import random
import shutil
import struct
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch

import trainingcxl as tcxl
from trainingcxl import _core
from trainingcxl.errors import PoolCorrupted, PoolError, PoolVersionError, TrainingCXLError
from trainingcxl.pool import Pool, inspect, verify

KB, MB = 1 << 10, 1 << 20
SUPERBLOCKS = (0, 4 * KB)
SLOTS = (12 * KB, 16 * KB)
RESUMES = (64 * KB, 128 * KB)
DIRECTORY = 256 * KB
GEOMETRIES = (1 * MB, 2 * MB)
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
        if states is not None:
            states[run.committed_batch] = table_bytes(pool)
    return run


@pytest.fixture(scope="module")
def origin(shm_root):
    """12 batches with a dense generation every 5, then the image of a kill: frames are live, nothing is clean."""
    torch.manual_seed(0)
    folder = shm_root / "damage"
    folder.mkdir()
    states = {}
    pool = Pool(folder / "good.pool", threads=1)
    train(pool, 12, 5, states=states)
    pool.core.wait_dense()
    shutil.copytree(folder / "good.pool", folder / "crashed.pool")
    pool.close()
    yield Crashed(folder / "crashed.pool", states, 12)
    shutil.rmtree(folder)


@pytest.fixture
def crashed(origin, bench):
    """A copy to be damaged."""
    shutil.copytree(origin.path, bench.path)
    return Crashed(bench.path, origin.states, origin.committed)


@pytest.fixture
def closed(bench):
    """A pool that was closed after 6 batches, and its tables."""
    torch.manual_seed(0)
    states = {}
    with bench.open() as pool:
        train(pool, 6, 1, states=states)
    return Crashed(bench.path, states, 6)


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
    head = read(path, newest_geometry(path), 128)
    return [offset for offset in struct.unpack("<2Q", head[64:80]) if offset]


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
    """Opens the pool: "refused" with its bytes unchanged, or the recovery point, whose tables must be true."""
    before = files(crashed.path)
    try:
        pool = Pool(crashed.path, threads=1, resume=resume)
    except TrainingCXLError as error:
        assert "do:" in str(error), str(error)
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


def test_the_undamaged_image_recovers(crashed):
    """The base of everything below."""
    assert [batch for batch, *_ in frames(crashed.path)][-2:] == [11, 12]
    assert outcome(crashed) == 10
    assert outcome(crashed) == 10


def test_latest_recovers_the_last_commit(crashed):
    """Rows of the last commit with the dense part of an earlier one."""
    assert outcome(crashed, "latest") == 12


# --- single flips ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("resume", ["exact", "latest"])
def test_random_flips_never_give_a_false_state(origin, bench, resume):
    """Hundreds of flips in structures that are in use: each is refused, healed, or irrelevant; no wrong row."""
    rng = random.Random(5)
    seen = set()
    shutil.copytree(origin.path, bench.path)
    places = [*range(128), *range(4096, 4224), *range(8192, 8256)]
    places += [s + i for s in SLOTS for i in range(128)]
    places += [r + i for r in RESUMES for i in range(4096)]
    places += [g + i for g in GEOMETRIES for i in range(128 + 3 * 256)]
    for _, offset, size, place in frames(bench.path):
        places += [*range(place, place + 64), *range(offset, offset + size)]
    for area in dense_areas(bench.path):
        places += [*range(area, area + 64), *range(area + 4096, area + 6000)]
        places += [*range(area + 4096 + 65536, area + 4096 + 65536 + 4000)]
    for _ in range(150):
        place, mask = rng.choice(places), 1 << rng.randrange(8)
        flip(bench.path, place, mask=mask)
        try:
            with Pool(bench.path, threads=1, read_only=True, resume=resume) as pool:
                assert table_bytes(pool) == origin.states[pool.committed_batch]
                assert not pool.is_new
                seen.add(pool.committed_batch)
        except TrainingCXLError as error:
            assert "do:" in str(error)
            seen.add("refused")
        flip(bench.path, place, mask=mask)
    assert seen == ({"refused", 10} if resume == "exact" else {"refused", 11, 12})


def test_flip_in_either_superblock_is_healed(crashed):
    """The identity has two copies; verify names the bad one."""
    for place in SUPERBLOCKS:
        flip(crashed.path, place + 30)
        assert [damage.region for damage in verify(crashed.path)] == ["superblock"]
        assert outcome(crashed) == 10
        if place == SUPERBLOCKS[1]:
            flip(crashed.path, place + 30)
        assert verify(crashed.path) == []


def test_flip_in_both_superblocks_is_refused(crashed):
    """Not taken for a pool that was never created."""
    for place in SUPERBLOCKS:
        flip(crashed.path, place + 3)
    with pytest.raises(PoolCorrupted, match=r"no valid superblock[\s\S]*4096"):
        Pool(crashed.path)
    assert outcome(crashed) == "refused"
    assert [damage.region for damage in verify(crashed.path)] == ["head"]


def test_flip_in_the_newest_slot_falls_back_to_the_one_before(crashed):
    """A torn slot is what a power loss leaves: the batch before it is the recovery point."""
    flip(crashed.path, newest_slot(crashed.path) + 16)
    assert outcome(crashed, "latest") == 11


def test_flip_in_the_newest_resume_record(crashed):
    """The slot vouches for its record; without it the slot is void."""
    place = RESUMES[0] if newest_slot(crashed.path) == SLOTS[0] else RESUMES[1]
    flip(crashed.path, place + 10)
    assert outcome(crashed, "latest") == 11


def test_flip_in_both_slots_is_refused(crashed):
    """Two slots are never in flight at once."""
    for place in SLOTS:
        flip(crashed.path, place + 16)
    with pytest.raises(PoolCorrupted, match="no valid commit slot"):
        Pool(crashed.path)
    assert outcome(crashed) == "refused"


@pytest.mark.parametrize("where", ["row", "crc", "state", "weight", "header", "segment"])
def test_flip_in_an_undo_record_that_is_needed(crashed, where):
    """A record of a committed batch is damaged: `exact` can't go back; batch 12 still stands."""
    batch, offset, _, _ = next(frame for frame in frames(crashed.path) if frame[0] == 11)
    segment = read(crashed.path, offset + 64, 64)
    columns = struct.unpack("<4Q", segment[16:48])
    places = {
        "row": columns[0], "crc": columns[1], "state": columns[2], "weight": columns[3],
        "header": 32, "segment": 64 + 8,
    }  # fmt: skip
    flip(crashed.path, offset + places[where])
    with pytest.raises(PoolCorrupted, match=rf"undo log of batch {batch}[\s\S]*state:[\s\S]*do:"):
        Pool(crashed.path)
    assert outcome(crashed) == "refused"
    assert any(f"batch {batch}" in damage.where for damage in verify(crashed.path))
    assert outcome(crashed, "latest") == 12


def test_missing_flag_of_a_committed_batch(crashed):
    """The descriptor of batch 11 is gone: not explained by a crash, so `exact` refuses and names the way out."""
    *_, place = next(frame for frame in frames(crashed.path) if frame[0] == 11)
    patch(crashed.path, place, bytes(64))
    with pytest.raises(PoolCorrupted, match=r"batch 11 is missing[\s\S]*'latest'"):
        Pool(crashed.path)
    assert outcome(crashed) == "refused"
    assert outcome(crashed, "latest") == 12


def test_tail_of_the_log_of_a_batch_in_flight(bench):
    """D7: a frame without its flag is no frame: its bytes may be torn, zeroed or cut, nothing was changed by it."""
    torch.manual_seed(0)
    states = {}
    pool = bench.open()
    run = train(pool, 3, 1, states=states)
    features = torch.tensor([[i, i % 37, 0] for i in range(150)])
    pool.core.announce([run.model[0].group_input(features)])
    for _ in range(1000):
        found = [frame for frame in frames(bench.path) if frame[0] == 4]
        if found:
            break
    assert found, "the announced batch was logged ahead"
    for cut in (1, 17, 64, 512, 4096):
        image = bench.image()
        _, offset, size, place = found[0]
        patch(image, place, bytes(64))  # the flag was not set yet
        patch(image, offset + size - min(cut, size), bytes(min(cut, size)))
        assert outcome(Crashed(image, states, 3)) == 3
    flagged = bench.image()  # with its flag, and whole
    with bench.open(flagged) as again:
        assert again.recovery.rows_rolled_back >= 150
        assert again.recovery.rows_changed == 0
        assert table_bytes(again) == states[3]
    torn = bench.image()  # with its flag, and zeroed: not what a crash leaves
    patch(torn, found[0][1] + found[0][2] - 64, bytes(64))
    assert outcome(Crashed(torn, states, 3)) == "refused"


def test_damaged_dense_generation_that_the_slot_names(crashed):
    """The older generation in its place would go back further than promised, without a word."""
    for area in dense_areas(crashed.path):
        batch = struct.unpack("<Q", read(crashed.path, area + 16, 8))[0]
        place = area + 4096 + 65536 + 100
        flip(crashed.path, place)
        assert "dense log" in [damage.region for damage in verify(crashed.path)]
        for resume, point in (("exact", 10), ("latest", 12)):
            image = Crashed(crashed.path.with_name(f"{batch}{resume}"), *crashed[1:])
            shutil.copytree(crashed.path, image.path)
            assert outcome(image, resume) == ("refused" if batch == 10 else point)
        flip(crashed.path, place)


def test_damaged_generation_of_a_finished_run(bench):
    """finish() writes the last generation again; with that one damaged its twin has the same state."""
    torch.manual_seed(0)
    states = {}
    with bench.open() as pool:
        train(pool, 6, 1, states=states).finish()
    area = struct.unpack("<I", read(bench.path, newest_slot(bench.path) + 64, 4))[0]
    head = read(bench.path, newest_geometry(bench.path), 128)
    flip(bench.path, struct.unpack("<Q", head[64 + 8 * area : 72 + 8 * area])[0] + 4096 + 65536)
    assert [damage.region for damage in verify(bench.path)] == ["dense log"]
    assert outcome(Crashed(bench.path, states, 6)) == 6


# --- cut and foreign ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["log", "data"])
@pytest.mark.parametrize("missing", [1, 17, 4096, 2 * MB, None])
def test_truncated_file(closed, name, missing):
    """D7: files are allocated in full, so a shorter one was cut: refused with both sizes."""
    path = closed.path / name
    size = path.stat().st_size
    keep = size - missing if missing is not None else 0
    with path.open("r+b") as file:
        file.truncate(keep)
    for read_only in (False, True):
        with pytest.raises(PoolError) as error:
            Pool(closed.path, read_only=read_only)
        assert str(keep) in str(error.value)
        assert "do:" in str(error.value)
    assert path.stat().st_size == keep


@pytest.mark.parametrize("name", ["log", "data"])
def test_missing_file(closed, name):
    """A pool without one of its files is refused; the file is not made up."""
    (closed.path / name).unlink()
    for options in ({}, {"read_only": True}):
        with pytest.raises(PoolError, match=str(closed.path)):
            Pool(closed.path, **options)
    assert not (closed.path / name).exists() or (closed.path / name).stat().st_size == 0


def test_longer_files_are_cut_back(closed):
    """What a growth that never completed left behind the geometry is no damage."""
    for name in ("log", "data"):
        with (closed.path / name).open("ab") as file:
            file.write(b"x" * 5000)
    assert outcome(closed) == 6


@pytest.mark.parametrize("size", [1, 100, 4096, 5 * MB])
def test_foreign_log(tmp_path, size):
    """A file that is not ours is never overwritten, however small."""
    folder = tmp_path / "not.pool"
    folder.mkdir()
    text = (b"precious " * (size // 9 + 1))[:size]
    (folder / "log").write_bytes(text)
    for look in (Pool, inspect, lambda path: Pool(path, read_only=True)):
        with pytest.raises(PoolError):
            look(folder)
    assert (folder / "log").read_bytes() == text


def test_foreign_data_beside_no_log(tmp_path):
    """A user's file called data is not emptied because a pool is created in its folder."""
    folder = tmp_path / "not.pool"
    folder.mkdir()
    (folder / "data").write_bytes(b"precious")
    with pytest.raises(PoolError):
        Pool(folder)
    assert (folder / "data").read_bytes() == b"precious"


def test_data_of_another_pool(bench, closed):
    """Tables and log of different pools: the files are not checksummed, but their sizes are compared."""
    other = bench.folder / "other.pool"
    with bench.open(other) as pool:
        train(pool, 1, 1)
    (closed.path / "data").write_bytes((other / "data").read_bytes()[: 4 * MB])
    with pytest.raises(PoolCorrupted, match="truncated"):
        Pool(closed.path)


# --- newer, other geometry, other byte order --------------------------------------------------------------


def edit_superblocks(path, offset, data):
    for place in SUPERBLOCKS:
        block = bytearray(read(path, place, 128))
        block[offset : offset + len(data)] = data
        patch(path, place, reseal(block, 0))


@pytest.mark.parametrize(
    ("offset", "data", "error", "words"),
    [
        (8, struct.pack("<H", 2), PoolVersionError, ["format 2", "format 1", "newer"]),
        (8, struct.pack("<H", 0), PoolVersionError, ["format 0"]),
        (14, struct.pack("<H", 0x10), PoolVersionError, ["0x10", "newer"]),
        (16, struct.pack(">I", 0x01020304), PoolVersionError, ["byte order"]),
        (40, struct.pack("<Q", 8 * MB), PoolVersionError, ["8388608", "4194304"]),
        (48, struct.pack("<Q", 1024), PoolVersionError, ["1024", "4096"]),
    ],
)
def test_other_formats_are_refused(crashed, offset, data, error, words):
    """Newer, older, of features unknown here, of the other byte order, with another head: both values named."""
    edit_superblocks(crashed.path, offset, data)
    before = files(crashed.path)
    for options in ({}, {"read_only": True}):
        with pytest.raises(error) as raised:
            Pool(crashed.path, **options)
        assert all(word in str(raised.value) for word in words), str(raised.value)
        assert str(crashed.path) in str(raised.value)
    assert files(crashed.path) == before


def test_unknown_features_of_lesser_kinds(crashed):
    """compat: opened as ever. ro_compat: read only."""
    edit_superblocks(crashed.path, 10, struct.pack("<H", 0x4))
    assert outcome(crashed) == 10
    edit_superblocks(crashed.path, 12, struct.pack("<H", 0x4))
    with pytest.raises(PoolVersionError, match="only read"):
        Pool(crashed.path)
    with Pool(crashed.path, read_only=True) as pool:
        assert table_bytes(pool) == crashed.states[10]


def test_pool_of_a_big_endian_machine(crashed):
    """All of its numbers are swapped, the magic too: named as what it is, not as damage."""
    for place in SUPERBLOCKS:
        patch(crashed.path, place, read(crashed.path, place, 8)[::-1])
    with pytest.raises(PoolVersionError, match="byte order"):
        Pool(crashed.path)
    assert outcome(crashed) == "refused"


def edit_geometry(path, edits, records=()):
    """Writes the newest geometry anew with changed fields and a right checksum, in both copies."""
    place = newest_geometry(path)
    head = bytearray(read(path, place, 128))
    count = struct.unpack("<Q", head[16:24])[0]
    tables = bytearray(read(path, place + 128, 256 * count))
    for offset, value in edits:
        head[offset : offset + 8] = struct.pack("<Q", value)
    for offset, data in records:
        tables[offset : offset + len(data)] = data
    head[124:128] = bytes(4)
    body = bytes(head[:128])
    crc = _core.crc32c(bytes(tables), _core.crc32c(body, seed_of(path)))
    patch(path, place, body[:124] + crc.to_bytes(4, "little") + bytes(tables))


HUGE = 2**63
HOSTILE_GEOMETRIES = {
    "ring offset beyond the log": ([(40, 1 << 40)], []),
    "ring offset overflows": ([(40, 2**64 - 2 * MB)], []),
    "ring over the head": ([(40, 0)], []),
    "ring larger than the log": ([(48, 1 << 40)], []),
    "ring unaligned": ([(40, 4 * MB + 64)], []),
    "frames larger than the ring": ([(56, 1 << 40)], []),
    "dense area beyond the log": ([(64, 1 << 40)], []),
    "dense area over the head": ([(72, 2 * MB)], []),
    "dense area too large": ([(80, 2**64 - 2 * MB)], []),
    "log larger than the file": ([(24, 1 << 40)], []),
    "log of no size": ([(24, 0)], []),
    "data larger than the file": ([(32, 1 << 40)], []),
    "data of absurd size": ([(32, 2**64 - 4096)], []),
    "weights beyond the data": ([], [(128 + 16, struct.pack("<Q", 1 << 40))]),
    "weights overflow": ([], [(128 + 16, struct.pack("<Q", 2**64 - 2 * MB))]),
    "weights unaligned": ([], [(128 + 16, struct.pack("<Q", 64))]),
    "rows do not fit the bytes": ([], [(128, struct.pack("<Q", 10**6))]),
    "rows overflow": ([], [(128, struct.pack("<Q", HUGE))]),
    "no rows": ([], [(128, bytes(8)), (128 + 24, bytes(8)), (128 + 40, bytes(8))]),
    "dimension 0": ([], [(136, bytes(4)), (128 + 24, bytes(8))]),
    "unknown optimizer": ([], [(140, struct.pack("<I", 7))]),
    "optimizer of other state": ([], [(140, struct.pack("<I", 1))]),
    "state beyond the data": ([], [(128 + 32, struct.pack("<Q", 1 << 50))]),
}


@pytest.mark.parametrize("case", HOSTILE_GEOMETRIES)
def test_hostile_geometry(crashed, case):
    """A right checksum over impossible numbers: refused, no wild pointer is followed."""
    edit_geometry(crashed.path, *HOSTILE_GEOMETRIES[case])
    assert outcome(crashed) == "refused"
    with pytest.raises(PoolCorrupted):
        inspect(crashed.path)
    assert verify(crashed.path) != []


def test_too_many_tables_named(crashed):
    """A count that would read beyond the geometry's area makes that copy invalid."""
    for place in GEOMETRIES:
        patch(crashed.path, place + 16, struct.pack("<Q", 2**40))
    assert outcome(crashed) == "refused"


@pytest.mark.parametrize("field", ["offset", "bytes", "records"])
@pytest.mark.parametrize("value", [0, 8, 2**40, 2**64 - 64])
def test_hostile_descriptor(crashed, field, value):
    """A flag with a right checksum that points elsewhere."""
    *_, place = next(frame for frame in frames(crashed.path) if frame[0] == 11)
    record = bytearray(read(crashed.path, place, 64))
    at = {"offset": 24, "bytes": 32, "records": 40}[field]
    record[at : at + 8] = struct.pack("<Q", value)
    patch(crashed.path, place, reseal(record, seed_of(crashed.path)))
    if (field, value) == ("bytes", 0):
        return  # says that the batch changed no row, which no reader can know to be false
    assert outcome(crashed) == "refused"


@pytest.mark.parametrize("offset", [0, 8, 16, 24, 32, 40])
@pytest.mark.parametrize("value", [1, 100, 2**32, 2**63, 2**64 - 1])
def test_hostile_segment(crashed, offset, value):
    """Counts and offsets inside a frame, with right checksums of header and flag."""
    _, place, _, flag = next(frame for frame in frames(crashed.path) if frame[0] == 11)
    head = bytearray(read(crashed.path, place, 64))
    count = struct.unpack("<Q", head[40:48])[0]
    segments = bytearray(read(crashed.path, place + 64, 64 * count))
    segments[offset : offset + 8] = struct.pack("<Q", value)
    head[60:64] = bytes(4)
    seed = seed_of(crashed.path)
    crc = _core.crc32c(bytes(segments), _core.crc32c(bytes(head), seed)).to_bytes(4, "little")
    patch(crashed.path, place, bytes(head[:60]) + crc + bytes(segments))
    descriptor = bytearray(read(crashed.path, flag, 64))
    descriptor[56:60] = crc
    patch(crashed.path, flag, reseal(descriptor, seed))
    assert outcome(crashed) == "refused"


@pytest.mark.parametrize(("offset", "fmt", "value"), [(24, "<Q", 2**40), (32, "<I", 2**31)])
def test_hostile_dense_header(crashed, offset, fmt, value):
    """Sizes beyond the area, with a right checksum of the header."""
    for area in dense_areas(crashed.path):
        header = bytearray(read(crashed.path, area, 64))
        header[offset : offset + struct.calcsize(fmt)] = struct.pack(fmt, value)
        patch(crashed.path, area, reseal(header, seed_of(crashed.path)))
    assert outcome(crashed) == "refused"


def test_hostile_slot_record_size(crashed):
    """A resume record larger than its area."""
    for place in SLOTS:
        slot = bytearray(read(crashed.path, place, 128))
        slot[40:44] = struct.pack("<I", 2**31)
        patch(crashed.path, place, reseal(slot, seed_of(crashed.path)))
    assert outcome(crashed) == "refused"


def test_nothing_in_a_pool_is_executed(crashed):
    """The dense part is data: a pickle in its place is refused, not loaded."""
    import pickle

    from trainingcxl.state import decode_blob

    class Bomb:
        def __reduce__(self):
            return (exec, ("raise SystemExit('executed')",))

    blob = np.frombuffer(pickle.dumps(Bomb()).ljust(256, b"\0"), dtype=np.uint8)
    with pytest.raises(PoolCorrupted):
        decode_blob(blob)
