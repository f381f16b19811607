"""Repair of a damaged pool: what is offered is true, and nothing else is touched.

Lost would be the last that is left of a training: a repair that puts rows of one batch beside the
dense part of another, or that forgets what it changed.
"""

import json
import shutil
import struct
from pathlib import Path

import pytest
from click.testing import CliRunner
from pool_bytes import (
    SLOTS,
    area_of,
    files,
    flip,
    frames,
    newest_geometry,
    newest_slot,
    patch,
    read,
    reseal,
    seed_of,
    table_bytes,
    train,
)

from trainingcxl.cli.program import main
from trainingcxl.errors import PoolCorrupted, PoolError, RecoveryError
from trainingcxl.pool import Pool, verify
from trainingcxl.pool.repair import examine, repair

pytestmark = pytest.mark.usefixtures("kept_horizon")


@pytest.fixture
def damaged(bench):
    """A pool at batch 13 with dense parts of batches 0, 3, 6, 9, 12 as a kill left it, the tables
    after each batch, and the digest after each batch that has a dense part.
    """
    states, digests = {}, {}
    pool = bench.open()
    train(pool, 13, 3, states=states)
    image = bench.image()
    for batch in (0, 3, 6, 9, 12):
        copy = bench.image(image)
        with bench.open(copy) as other:
            if other.committed_batch != batch:
                other.rewind(to=batch)
            digests[batch] = other.digest()
    return image, states, digests


def call(*arguments):
    result = CliRunner().invoke(main, [str(argument) for argument in arguments])
    return result.exit_code, result.output


def test_of_a_sound_pool_nothing_is_repaired(damaged):
    path, _, _ = damaged
    before = files(path)
    with pytest.raises(PoolError, match=r"(?s)is sound.*rewind"):
        examine(path)
    assert call("repair", path, "--yes")[0] == 1
    assert files(path) == before


def test_damaged_dense_part_that_the_slot_names(damaged):
    """The older one in its place, if the undo log reaches it; first only said, then done."""
    path, states, digests = damaged
    flip(path, area_of(path, 12) + 4096 + 65536 + 100)
    before = files(path)
    with pytest.raises(PoolCorrupted):
        Pool(path)
    code, output = call("repair", path)
    assert code == 3
    assert "nothing was changed" in output
    assert "batches 10 to 13: training does them again" in output
    assert files(path) == before
    code, output = call("repair", path, "--yes", "--json")
    result = json.loads(output)
    assert (code, result["chosen"], result["repaired"]) == (0, 9, True)
    assert Path(result["head_kept"]).read_bytes() == before["log"][: 4 << 20]
    assert verify(path) == []
    with Pool(path, threads=1) as pool:
        assert pool.committed_batch == 9
        assert table_bytes(pool) == states[9]
        assert pool.digest() == digests[9]


def test_damaged_undo_record(damaged):
    """Nothing behind the damaged batch is reachable: the rows of the newest go on with an older
    dense part.
    """
    path, states, _ = damaged
    place = next(frame for frame in frames(path) if frame[0] == 13)
    flip(path, place[1] + place[2] - 64)
    found = examine(path)
    assert [(point.batch, point.dense_batch) for point in found.points] == [(13, 12)]
    assert "undo log" in {damage.region for damage in found.damage}
    repair(path, found.choose(path, None))
    assert verify(path) == []
    with Pool(path, threads=1) as pool:
        assert pool.committed_batch == 13
        assert table_bytes(pool) == states[13]


def test_damaged_dense_part_of_the_horizon(damaged):
    """The pool opens; the damaged point is given up, no batch is lost."""
    path, states, _ = damaged
    flip(path, area_of(path, 3) + 4096 + 65536 + 100)
    found = examine(path)
    assert (found.refusal, [damage.region for damage in found.damage]) == ("", ["dense log"])
    assert 3 not in [point.batch for point in found.points if point.is_exact]
    assert found.choose(path, None) is None
    repair(path, None)
    assert verify(path) == []
    with Pool(path, threads=1) as pool:
        assert table_bytes(pool) == states[12]


def test_lost_slot(damaged):
    """Both slots gone, or the one that began a life: nobody knows where the rows stand."""
    path, _, _ = damaged
    copy = path.with_name("torn.pool")
    shutil.copytree(path, copy)
    for place in SLOTS:
        flip(copy, place + 16)
    before = files(copy)
    found = examine(copy)
    assert found.points == []
    assert "no valid commit slot" in found.refusal
    with pytest.raises(RecoveryError, match="nothing of pool"):
        found.choose(copy, None)
    assert call("repair", copy, "--yes")[0] == 1
    assert files(copy) == before


def test_damaged_newest_slot(damaged):
    """The older slot tells: the batch after it is undone by its frame. No repair is needed."""
    path, states, _ = damaged
    flip(path, newest_slot(path) + 16)
    with Pool(path, threads=1) as pool:
        assert pool.recovery.committed_batch == 12
        assert table_bytes(pool) == states[12]


def test_interrupted_repair_is_done_again(damaged):
    """Killed after the slot that decides: the next opening completes it."""
    path, states, digests = damaged
    flip(path, area_of(path, 12) + 4096 + 65536 + 100)
    found = examine(path)
    point = found.choose(path, None)
    place = newest_slot(path)
    slot = bytearray(read(path, place, 128))
    area = area_of(path, point.batch)
    header = read(path, area, 64)
    areas = struct.unpack("<16Q", read(path, newest_geometry(path) + 64, 128))
    struct.pack_into("<QQ", slot, 48, point.batch, struct.unpack("<Q", header[8:16])[0])
    struct.pack_into("<I", slot, 64, areas.index(area))
    slot[68:72] = header[60:64]
    struct.pack_into("<I", slot, 72, 2)
    patch(path, place, reseal(slot, seed_of(path)))
    with Pool(path, threads=1) as pool:
        assert pool.recovery.is_rewind
        assert pool.committed_batch == point.batch
        assert table_bytes(pool) == states[point.batch]
        assert pool.digest() == digests[point.batch]
