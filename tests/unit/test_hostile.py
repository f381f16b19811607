"""Pools of other formats, and pools whose numbers are hostile though every checksum is right.

They are refused with both values and the way out; no wild pointer is followed, nothing is executed.
"""

import pickle
import struct

import numpy as np
import pytest
from pool_bytes import (
    GEOMETRIES,
    GEOMETRY_BYTES,
    MB,
    SLOTS,
    SUPERBLOCKS,
    dense_areas,
    files,
    frames,
    newest_geometry,
    outcome,
    patch,
    read,
    reseal,
    seed_of,
    table_bytes,
)

from trainingcxl import _core
from trainingcxl.errors import PoolCorrupted, PoolVersionError
from trainingcxl.pool import Pool, inspect, verify
from trainingcxl.state import decode_blob

# --- newer, other geometry, other byte order ----------------------------------------------------


def edit_superblocks(path, offset, data):
    for place in SUPERBLOCKS:
        block = bytearray(read(path, place, 128))
        block[offset : offset + len(data)] = data
        patch(path, place, reseal(block, 0))


@pytest.mark.parametrize(
    ("offset", "data", "error", "words"),
    [
        (8, struct.pack("<H", 3), PoolVersionError, ["format 3", "format 2", "newer"]),
        (8, struct.pack("<H", 1), PoolVersionError, ["format 1", "the trainingcxl that made it"]),
        (14, struct.pack("<H", 0x10), PoolVersionError, ["0x10", "newer"]),
        (16, struct.pack(">I", 0x01020304), PoolVersionError, ["byte order"]),
        (40, struct.pack("<Q", 8 * MB), PoolVersionError, ["8388608", "4194304"]),
        (48, struct.pack("<Q", 1024), PoolVersionError, ["1024", "4096"]),
    ],
)
def test_other_formats_are_refused(crashed, offset, data, error, words):
    """Newer, older, of features unknown here, of the other byte order, with another head: both
    values named.
    """
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
    head = bytearray(read(path, place, GEOMETRY_BYTES))
    count = struct.unpack("<Q", head[16:24])[0]
    tables = bytearray(read(path, place + GEOMETRY_BYTES, 256 * count))
    for offset, value in edits:
        head[offset : offset + 8] = struct.pack("<Q", value)
    for offset, data in records:
        tables[offset : offset + len(data)] = data
    head[-4:] = bytes(4)
    body = bytes(head)
    crc = _core.crc32c(bytes(tables), _core.crc32c(body, seed_of(path)))
    patch(path, place, body[:-4] + crc.to_bytes(4, "little") + bytes(tables))


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
    "dense area unaligned": ([(64, 4 * MB + 64)], []),
    "dense area too large": ([(192, 2**64 - 2 * MB)], []),
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
@pytest.mark.parametrize("value", [1, 2**32, 2**64 - 1])
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

    class Bomb:
        def __reduce__(self):
            return (exec, ("raise SystemExit('executed')",))

    blob = np.frombuffer(pickle.dumps(Bomb()).ljust(256, b"\0"), dtype=np.uint8)
    with pytest.raises(PoolCorrupted):
        decode_blob(blob)
