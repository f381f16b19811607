"""Pool: open again, look at, close, let go. A user would lose the training so far otherwise."""

import contextlib
import errno
import gc
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from small_pool import MB, commit_batches, spec
from torch import nn

import trainingcxl as tcxl
from trainingcxl import _core
from trainingcxl.errors import DurabilityUnavailable, PoolError, RecoveryError
from trainingcxl.pool import Pool, inspect, verify

# --- opening ------------------------------------------------------------------------------------


def test_reopening_finds_everything(any_bench, rows_of):
    """B5: weights, optimizer state, counters and position are those at the close."""
    with any_bench.open() as pool:
        commit_batches(pool, 7)
        rows, digest = rows_of(pool), pool.digest()
    with any_bench.open() as pool:
        assert not pool.is_new
        assert pool.committed_batch == 7
        assert pool.recovery.batches_to_redo == 0
        assert pool.resume_record["epoch"] == 0
        assert pool.digest() == digest
        for name, (weight, state) in rows_of(pool).items():
            assert np.array_equal(weight, rows[name][0])
            assert np.array_equal(state, rows[name][1])


def test_a_missing_pool_is_not_created_by_readers(tmp_path):
    """B5: looking at a path that holds no pool is an error, and makes none."""
    for look in (inspect, verify, lambda path: Pool(path, read_only=True)):
        for path in (tmp_path / "none.pool", tmp_path):
            with pytest.raises((PoolError, OSError), match=str(path)):
                look(path)
    assert list(tmp_path.iterdir()) == []


def test_read_only_pool_looks_up_as_the_trainer_does(bench):
    """B6: evaluation of a trained pool needs no optimizer, gives the trainer's output, changes
    no byte.
    """
    ids = torch.tensor([[1], [3], [99]])
    with bench.open() as pool:
        run = commit_batches(pool, 5)
        with torch.no_grad():
            expected = run.model(ids)
    image = bench.image()
    with bench.open(read_only=True) as pool:
        config = tcxl.EmbeddingBagConfig(
            name="t", num_embeddings=100, embedding_dim=8, feature_names=["f"]
        )
        bags = tcxl.EmbeddingBagCollection(pool, tables=[config], optimizer=None)
        with torch.no_grad():
            assert torch.equal(bags(ids), expected)
        assert pool.committed_batch == 5
    for name in ("data", "log"):
        assert (bench.path / name).read_bytes() == (image / name).read_bytes()


def test_read_only_pool_refuses_changes(bench):
    """A reader that could commit would race with other readers."""
    with bench.open() as pool:
        commit_batches(pool, 2)
    image = bench.image()
    pool = bench.open(read_only=True)
    config = tcxl.EmbeddingBagConfig(
        name="t", num_embeddings=100, embedding_dim=8, feature_names=["f"]
    )
    bags = tcxl.EmbeddingBagCollection(
        pool, tables=[config], optimizer=tcxl.optim.RowWiseAdagrad(lr=0.1)
    )
    run = tcxl.FaultTolerantRun(pool, bags)
    with pytest.raises(PoolError, match="read only"):
        run.step(bags(torch.tensor([[1]])).sum())
    with pytest.raises(PoolError, match=r"read only|no table"):
        pool.create_tables([spec("new")])
    pool.close()
    for name in ("data", "log"):
        assert (bench.path / name).read_bytes() == (image / name).read_bytes()


@pytest.mark.parametrize("resume", ["exact", "latest"])
def test_read_only_open_of_a_crashed_pool(bench, resume):
    """A reader recovers in its own memory: it sees a recovery point, the files keep the crash
    for the trainer.
    """
    pool = bench.open()
    commit_batches(pool, 5)
    image = bench.image()
    before = (image / "data").read_bytes(), (image / "log").read_bytes()
    with bench.open(image, read_only=True, resume=resume) as reader:
        digest, point = reader.digest(), reader.committed_batch
        assert 3 <= point <= 5
    assert ((image / "data").read_bytes(), (image / "log").read_bytes()) == before
    with bench.open(image, resume=resume) as trainer:
        assert (trainer.digest(), trainer.committed_batch) == (digest, point)


def test_wrong_arguments(tmp_path):
    """Refused at once, with the value; nothing is created."""
    path = tmp_path / "a.pool"
    for wrong in (
        {"durability": "full"},
        {"resume": "newest"},
        {"lookahead": 0},
        {"lookahead": 9},
        {"threads": -1},
    ):
        with pytest.raises(ValueError, match=str(next(iter(wrong.values())))):
            Pool(path, **wrong)
    with pytest.raises(OSError, match=r"missing/a\.pool"):
        Pool(tmp_path / "missing" / "a.pool")
    (tmp_path / "file").write_text("mine")
    with pytest.raises(PoolError, match="is a file, a pool is a folder"):
        Pool(tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_power_is_refused_where_it_cannot_be_had(tmpfs_folder):
    """D18's kind: never weakened silently, and nothing is left behind."""
    with pytest.raises(DurabilityUnavailable, match="'power'"):
        Pool(tmpfs_folder / "a.pool", durability="power")
    assert not (tmpfs_folder / "a.pool").exists()


def test_level_of_a_pool_is_kept(bench):
    """A pool made for one level is not opened at another."""
    bench.open().close()
    with pytest.raises(DurabilityUnavailable, match="created with durability 'process'"):
        bench.open(durability="power", _medium="fsdax")


def test_who_names_no_level_gets_that_of_the_pool(bench):
    bench.open(durability="power", _medium="fsdax").close()
    with bench.open(_medium="fsdax") as pool:
        assert pool.durability == "power"
    with pytest.raises(DurabilityUnavailable, match="impossible on tmpfs"):  # as it really is
        bench.open()


def test_tables_that_write_back_would_slow_down_are_told_of(bench, monkeypatch):
    """At the creation and at every opening; not on tmpfs, which is never written back."""
    monkeypatch.setattr("trainingcxl.pool.pool.write_back_notice", lambda n: f"{n} bytes")
    told = []
    for medium in ("block", "block", ""):
        with bench.open(_medium=medium) as pool:
            pool.create_tables([spec("a")])
            told.append([text for text in pool.notices if text.endswith(" bytes")])
            num_bytes = sum(table.num_bytes for table in pool.tables.values())
    assert told[0][-1] == told[1][-1] == f"{num_bytes} bytes"
    assert told[2] == []


@pytest.mark.parametrize("instruction", ["clwb", "clflushopt", "clflush"])
def test_flush_instructions(tmpfs_folder, monkeypatch, instruction):
    """Every flush instruction that this CPU has trains to the same bits."""
    flags = Path("/proc/cpuinfo").read_text()
    if instruction not in flags:
        return  # an instruction that the CPU lacks would be chosen by nobody
    monkeypatch.setenv("TRAININGCXL_FLUSH", instruction)
    with Pool(tmpfs_folder / "a.pool", durability="power", _medium="fsdax", threads=1) as pool:
        assert pool.core.facts()["flush"] == instruction
        commit_batches(pool, 3)
        digest = pool.digest()
    monkeypatch.delenv("TRAININGCXL_FLUSH")
    with Pool(tmpfs_folder / "b.pool", threads=1) as pool:
        commit_batches(pool, 3)
        assert pool.digest() == digest


def test_restart_of_the_machine_under_an_open_pool(bench):
    """Level `process` promises nothing across a power loss: a pool that was open then is
    refused.
    """
    pool = bench.open()
    commit_batches(pool, 3)
    image = bench.image()
    with (image / "log").open("r+b") as log:
        log.seek(2 * 4096 + 16)
        session = log.read(40)
        assert session.rstrip(b"\0") == Path("/proc/sys/kernel/random/boot_id").read_bytes().strip()
        head = image_session(log, b"00000000-0000-0000-0000-000000000000")
        log.seek(2 * 4096)
        log.write(head)
    with pytest.raises(RecoveryError, match="trust_after_reboot"):
        bench.open(image)
    with bench.open(image, trust_after_reboot=True) as again:
        assert again.committed_batch == 3


def image_session(log, boot_id):
    """The session record with another boot id and a right checksum."""
    log.seek(0)
    uuid = log.read(40)[24:40]
    log.seek(2 * 4096)
    record = bytearray(log.read(64))
    record[16:56] = boot_id.ljust(40, b"\0")
    record[60:64] = _core.crc32c(bytes(record[:60]), _core.crc32c(uuid, 0)).to_bytes(4, "little")
    return bytes(record)


# --- closing ------------------------------------------------------------------------------------


def test_closing_lets_go_at_once(bench):
    """Views, tables, modules and runs that are still around must not keep the pool locked."""
    pool = bench.open()
    run = commit_batches(pool, 2)
    table = pool.tables["t"]
    view = table.weight
    copy = view.copy()
    pool.close()
    pool.close()
    with bench.open() as again:
        assert again.committed_batch == 2
    assert np.array_equal(view, copy)  # still mapped
    with pytest.raises(PoolError, match="closed"):
        pool.digest()
    with pytest.raises(PoolError, match="closed"):
        run.step(run.model(torch.tensor([[1]])).sum())


def test_a_pool_that_is_dropped_lets_go(bench):
    """Without close(): as after a kill, but this process holds nothing any more."""
    pool = Pool(bench.path, threads=1)
    commit_batches(pool, 3)
    del pool
    gc.collect()
    assert not inspect(bench.path)["clean"]
    with bench.open() as again:
        assert again.recovery.committed_batch == 3


def test_nothing_leaks(bench):
    """Open and close many times: no file descriptor, no mapping, no thread stays."""

    def held():
        gc.collect()
        maps = Path("/proc/self/maps").read_text().count(str(bench.folder))
        return len(os.listdir("/proc/self/fd")), maps, len(os.listdir("/proc/self/task"))  # noqa: PTH208

    with bench.open() as pool:
        commit_batches(pool, 2)
    before = held()
    for i in range(20):
        with Pool(bench.path, threads=2, read_only=i % 3 == 0) as pool:
            pool.digest()
        inspect(bench.path)
        verify(bench.path)
    assert held() == before


def test_failed_opens_leave_nothing(bench):
    """300 refused opens: no descriptor stays, and a child process keeps its own descriptors."""
    with bench.open() as pool:
        commit_batches(pool, 1)
    with (bench.path / "log").open("r+b") as log:
        log.write(bytes(8192))  # both superblocks
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    for _ in range(300):
        with pytest.raises(tcxl.errors.PoolCorrupted):
            Pool(bench.path)
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(Path("/dev/null").open()) for _ in range(8)]
        child = os.fork()
        if child == 0:
            alive = True
            for file in files:
                try:
                    os.fstat(file.fileno())
                except OSError:
                    alive = False
            os._exit(0 if alive else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    with Pool(bench.folder / "good.pool") as pool:
        assert pool.is_new


def test_reopen_inside_the_handler_of_a_failed_open(bench):
    """The way out that a message names must work where the message is caught."""
    pool = bench.open()
    commit_batches(pool, 3)
    image = bench.image()
    with (image / "log").open("r+b") as log:
        damage_newest_generations(log)
    with pytest.raises(tcxl.errors.PoolCorrupted) as error:
        Pool(image)
    with pytest.raises(tcxl.errors.PoolCorrupted):
        Pool(image)  # not PoolLocked, although `error` still holds the first one's frames
    assert error.value is not None


def damage_newest_generations(log):
    """Flips a byte in the body of every dense area, which the newest geometry names."""
    newest = max(
        (int.from_bytes(head[8:16], "little"), head)
        for head in (read_at(log, MB, 384), read_at(log, 2 * MB, 384))
    )[1]
    for area in range(16):
        offset = int.from_bytes(newest[64 + 8 * area : 72 + 8 * area], "little")
        if offset:
            place = offset + 4096 + 65536
            byte = read_at(log, place, 1)[0]
            log.seek(place)
            log.write(bytes([byte ^ 1]))


def read_at(file, offset, size):
    file.seek(offset)
    return file.read(size)


def test_discard_removes_the_pool_and_nothing_else(bench):
    """--fresh deletes a pool, never what the user put beside it."""
    with bench.open() as pool:
        commit_batches(pool, 1)
    (bench.path / "cache").mkdir()
    (bench.path / "cache" / "kept").write_text("mine")
    Pool.discard(bench.path)
    assert (bench.path / "cache" / "kept").read_text() == "mine"
    assert not (bench.path / "log").exists()
    with bench.open() as pool:
        assert pool.is_new
    Pool.discard(bench.folder / "never.pool")
    assert not (bench.folder / "never.pool").exists()


# --- inspect and verify -------------------------------------------------------------------------


def test_inspect_names_everything(bench):
    """Issue 2, item 3: the keys, also as JSON."""
    with bench.open() as pool:
        commit_batches(pool, 4)
        digest, uuid = pool.digest(), pool.uuid
    found = json.loads(json.dumps(inspect(bench.path, digest=True)))
    keys = (
        "path uuid medium page_bytes durability committed_batch durable_batch epoch position "
        "finished horizon_batches tables log_bytes log_used_bytes digest"
    )
    assert set(keys.split()) <= set(found)
    assert found["uuid"] == uuid
    assert found["digest"] == digest
    assert found["committed_batch"] == 4
    assert found["durable_batch"] is None  # tmpfs
    assert found["finished"] is False
    assert found["tables"][0]["num_embeddings"] == 100
    assert verify(bench.path) == []


def test_inspect_while_training(bench):
    """Protocol section 8: the head is read while the trainer writes it; every answer is one
    commit's.
    """
    pool = bench.open()
    run = commit_batches(pool, 1)
    script = (
        "import sys\nfrom trainingcxl.pool import inspect\nlast = 0\n"
        "for _ in range(100):\n"
        "    found = inspect(sys.argv[1])\n"
        "    assert found['committed_batch'] >= last, (found['committed_batch'], last)\n"
        "    assert found['epoch'] == 0 and found['position'] == 0\n"
        "    last = found['committed_batch']\n"
        "print(last)\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", script, str(bench.path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    batch = torch.tensor([[1], [2]])
    while child.poll() is None:
        run.step(run.model(batch).sum())
    out, err = child.communicate()
    assert child.returncode == 0, err
    assert int(out) > 1


def test_verify_and_digest_need_the_lock(bench):
    """They read what a trainer changes."""
    bench.open()
    for look in (verify, lambda path: inspect(path, digest=True)):
        with pytest.raises(tcxl.errors.PoolLocked, match=str(os.getpid())):
            look(bench.path)
    assert inspect(bench.path)["committed_batch"] is None


def test_no_torch_is_imported(bench):
    """inspect and verify answer in a fraction of a second."""
    bench.open().close()
    code = (
        "import sys, trainingcxl as t\n"
        f"t.inspect({str(bench.path)!r}, digest=True); t.verify({str(bench.path)!r})\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_durable_batch_says_what_is_promised(bench, tmp_path):
    """On tmpfs nothing survives a power loss; on a file what was synced does."""
    assert commit_batches(bench.open(), 2).durable_batch is None
    with Pool(tmp_path / "file.pool", threads=1) as pool:
        run = commit_batches(pool, 2)
        assert run.durable_batch in (None, 0)
        run.sync()
        assert run.durable_batch == run.committed_batch == 2
        run.step(run.model(torch.tensor([[1]])).sum())
        assert (run.durable_batch, run.committed_batch) == (2, 3)
    with Pool(tmp_path / "file.pool", threads=1) as pool:
        assert pool.durable_batch == 3
    assert inspect(tmp_path / "file.pool")["durable_batch"] == 3


def test_rows_are_views_that_cannot_be_written(bench):
    """Rows change in commits alone."""
    with bench.open() as pool:
        commit_batches(pool, 1)
        table = pool.tables["t"]
        assert not table.weight.flags.writeable
        with pytest.raises(ValueError, match="read-only"):
            table.weight[0, 0] = 1.0
        assert table.weight.base is not None


def test_os_errors_keep_their_number(tmp_path):
    """style.md section 6: errors of the operating system stay OSError."""
    with pytest.raises(OSError, match="missing") as error:
        Pool(tmp_path / "missing" / "a.pool")
    assert error.value.errno == errno.ENOENT
    assert isinstance(nn.Module(), nn.Module)
