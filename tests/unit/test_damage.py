"""Pools whose bytes are wrong: flipped, cut, foreign, newer, other geometry, other byte order.

Every attack is built here from a good pool. Whatever is done to it, opening must either refuse with
a message that says what, where and what to do, or arrive at a state that the training really went
through: never at anything else, never in a crash, and a refused pool keeps its bytes.
"""

import random
import shutil
import struct

import pytest
import torch
from pool_bytes import (
    GEOMETRIES,
    GEOMETRY_BYTES,
    MB,
    RESUMES,
    SLOTS,
    SUPERBLOCKS,
    Crashed,
    batch_of,
    dense_areas,
    flip,
    frames,
    newest_geometry,
    newest_slot,
    outcome,
    patch,
    read,
    reseal,
    seed_of,
    table_bytes,
    train,
)

from trainingcxl.errors import PoolCorrupted, PoolError, TrainingCXLError
from trainingcxl.pool import Pool, inspect, verify


def test_the_undamaged_image_recovers(crashed):
    """The base of everything below."""
    assert [batch for batch, *_ in frames(crashed.path)][-2:] == [11, 12]
    assert outcome(crashed) == 10
    assert outcome(crashed) == 10


def test_latest_recovers_the_last_commit(crashed):
    """Rows of the last commit with the dense part of an earlier one."""
    assert outcome(crashed, "latest") == 12


# --- single flips -------------------------------------------------------------------------------


@pytest.mark.parametrize("resume", ["exact", "latest"])
def test_random_flips_never_give_a_false_state(origin, bench, resume):
    """Hundreds of flips in structures that are in use: each is refused, healed, or irrelevant;
    no wrong row.
    """
    rng = random.Random(5)
    seen = set()
    shutil.copytree(origin.path, bench.path)
    places = [*range(128), *range(4096, 4224), *range(8192, 8256)]
    places += [s + i for s in SLOTS for i in range(128)]
    places += [r + i for r in RESUMES for i in range(4096)]
    places += [g + i for g in GEOMETRIES for i in range(GEOMETRY_BYTES + 3 * 256)]
    for _, offset, size, place in frames(bench.path):
        places += [*range(place, place + 64), *range(offset, offset + size)]
    for area in dense_areas(bench.path):
        places += [*range(area, area + 64), *range(area + 4096, area + 6000)]
        places += [*range(area + 4096 + 65536, area + 4096 + 65536 + 4000)]
    for _ in range(90):
        place, mask = rng.choice(places), 1 << rng.randrange(8)
        flip(bench.path, place, mask=mask)
        try:
            with Pool(bench.path, threads=1, read_only=True, resume=resume) as pool:
                assert table_bytes(pool) == origin.states[pool.committed_batch]
                assert not pool.is_new
                seen.add(pool.committed_batch)
        except TrainingCXLError as error:
            seen.add("refused" if "do:" in str(error) else str(error))
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
    """The descriptor of batch 11 is gone: not explained by a crash, so `exact` refuses and names
    the way out.
    """
    *_, place = next(frame for frame in frames(crashed.path) if frame[0] == 11)
    patch(crashed.path, place, bytes(64))
    with pytest.raises(PoolCorrupted, match=r"batch 11 is missing[\s\S]*'latest'"):
        Pool(crashed.path)
    assert outcome(crashed) == "refused"
    assert outcome(crashed, "latest") == 12


@pytest.mark.parametrize("how", ["swapped", "swapped whole", "repeated", "of another pool"])
def test_frames_of_other_batches_and_pools(crashed, bench, how):
    """Each frame and flag is whole, but not where it belongs: batch, life and pool are part of
    every checksum.
    """
    (_, at, size, flag), (_, other_at, other_size, other_flag) = (
        next(frame for frame in frames(crashed.path) if frame[0] == batch) for batch in (11, 12)
    )
    flags = [read(crashed.path, place, 64) for place in (flag, other_flag)]
    if how == "swapped":  # the flags name each other's frames, with right checksums
        for place, mine, theirs in ((flag, *flags), (other_flag, *reversed(flags))):
            mixed = bytearray(mine)
            mixed[24:40] = theirs[24:40]
            patch(crashed.path, place, reseal(mixed, seed_of(crashed.path)))
    elif how == "swapped whole":
        patch(crashed.path, flag, flags[1])
        patch(crashed.path, other_flag, flags[0])
    elif how == "repeated":
        shorter, longer = (at, other_at) if size <= other_size else (other_at, at)
        patch(crashed.path, longer, read(crashed.path, shorter, min(size, other_size)))
    else:
        torch.manual_seed(0)
        pool = bench.open(bench.folder / "other.pool")
        train(pool, 12, 5)
        for batch, begin, length, place in frames(pool.path):
            if batch in (11, 12):
                patch(crashed.path, begin, read(pool.path, begin, length))
                patch(crashed.path, place, read(pool.path, place, 64))
        pool.core.drop_announced()
    assert outcome(crashed) == "refused"
    assert verify(crashed.path) != []
    assert outcome(crashed, "latest") == 12


def test_tail_of_the_log_of_a_batch_in_flight(bench):
    """D7: a frame without its flag is no frame: its bytes may be torn, zeroed or cut, nothing
    was changed by it.
    """
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
        batch = batch_of(crashed.path, area)
        place = area + 4096 + 65536 + 100
        flip(crashed.path, place)
        assert "dense log" in [damage.region for damage in verify(crashed.path)]
        for resume, point in (("exact", 10), ("latest", 12)):
            image = Crashed(crashed.path.with_name(f"{batch}{resume}"), *crashed[1:])
            shutil.copytree(crashed.path, image.path)
            assert outcome(image, resume) == ("refused" if batch == 10 else point)
        flip(crashed.path, place)


def test_damaged_generation_of_a_finished_run(bench):
    """finish() writes the last generation again; with that one damaged its twin has the same
    state.
    """
    torch.manual_seed(0)
    states = {}
    with bench.open() as pool:
        train(pool, 6, 1, states=states).finish()
    area = struct.unpack("<I", read(bench.path, newest_slot(bench.path) + 64, 4))[0]
    head = read(bench.path, newest_geometry(bench.path), GEOMETRY_BYTES)
    flip(bench.path, struct.unpack("<Q", head[64 + 8 * area : 72 + 8 * area])[0] + 4096 + 65536)
    assert [damage.region for damage in verify(bench.path)] == ["dense log"]
    assert outcome(Crashed(bench.path, states, 6)) == 6


# --- cut and foreign ----------------------------------------------------------------------------


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
        assert keep == 0 or str(keep) in str(error.value)
        assert str(path.parent) in str(error.value)
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
    """Tables and log of different pools: the files are not checksummed, but their sizes are
    compared.
    """
    other = bench.folder / "other.pool"
    with bench.open(other) as pool:
        train(pool, 1, 1)
    (closed.path / "data").write_bytes((other / "data").read_bytes()[: 4 * MB])
    with pytest.raises(PoolCorrupted, match="truncated"):
        Pool(closed.path)
