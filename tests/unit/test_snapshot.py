"""Snapshots: a copy of one batch while training goes on (protocol: csrc/snapshot.h)."""

import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from small_job import Job, batches

import trainingcxl as tcxl
from trainingcxl import _core
from trainingcxl.errors import PoolError, PoolFull
from trainingcxl.pool import Pool, inspect, verify

ROWS, DIM = 30_000, 16
_HERE = Path(__file__).parent


class Large:
    """Tables large enough that hundreds of batches commit while they are copied."""

    def __init__(self, path, **options):
        self.pool = Pool(path, threads=1, **options)
        configs = [
            tcxl.EmbeddingBagConfig(
                name=name, num_embeddings=ROWS, embedding_dim=DIM, feature_names=[name]
            )
            for name in ("a", "b")
        ]
        self.rows = tcxl.EmbeddingBagCollection(
            self.pool, tables=configs, optimizer=tcxl.optim.Adagrad(lr=0.1)
        )
        torch.manual_seed(0)
        self.head = torch.nn.Linear(2 * DIM, 1)
        self.model = torch.nn.Sequential(self.rows, self.head)
        self.run = tcxl.FaultTolerantRun(
            self.pool,
            self.model,
            torch.optim.Adam(self.head.parameters()),
            sparse_of=lambda ids: ids,
            dense_every=5,
        )

    def train(self, count, each=lambda run: None):
        class Batches:
            def seek(self, epoch, batch):
                self.next = batch

            def __iter__(self):
                for k in range(self.next, count):
                    generator = torch.Generator().manual_seed(k)
                    draw = torch.rand(32, 2, generator=generator) ** 3
                    yield (ROWS * draw).long()

        for ids in self.run.batches(Batches()):
            self.run.step(self.model(ids).square().sum())
            each(self.run)


def digest_of(path):
    with Pool(path, read_only=True) as pool:
        return pool.digest()


@pytest.mark.parametrize("form", ["background", "fused"])
def test_snapshots_while_training_never_mix_two_batches(tmp_path, form):
    job = Large(tmp_path / "pool", undo_log=form)
    taken = []

    def each(run):
        if not taken or (taken[-1].is_done and len(taken) < 6):
            taken.append(job.pool.snapshot(tmp_path / f"copy{len(taken)}", wait=False))

    job.train(2000, each)
    for snapshot in taken:
        snapshot.wait()
    job.pool.close()
    assert len(taken) >= 2  # a copy takes the time that a busy machine leaves it
    alone = Large(tmp_path / "alone")
    expected = {}
    wanted = {snapshot.batch for snapshot in taken}
    alone.train(
        max(wanted),
        lambda run: (
            run.committed_batch in wanted
            and expected.setdefault(run.committed_batch, alone.pool.digest())
        ),
    )
    alone.pool.close()
    for snapshot in taken:
        assert verify(snapshot.path) == []
        assert inspect(snapshot.path)["committed_batch"] == snapshot.batch
        assert digest_of(snapshot.path) == expected[snapshot.batch]


def test_training_goes_on_from_a_snapshot(bench, tmp_path):
    job = Job(bench.open(), sparse_of=lambda ids: ids)
    for ids in batches(7):
        job.run.step(job.loss(ids))
    job.pool.snapshot(tmp_path / "copy")
    other = Job(Pool(tmp_path / "copy"), sparse_of=lambda ids: ids)
    assert other.run.committed_batch == 7
    for ids in batches(5, seed=2):
        job.run.step(job.loss(ids))
        other.run.step(other.loss(ids))
    assert job.pool.digest() == other.pool.digest()
    other.pool.close()
    job.pool.close()


def test_a_path_in_use_and_a_second_snapshot(bench, tmp_path):
    job = Job(bench.open(), sparse_of=lambda ids: ids)
    job.run.step(job.loss(batches(1)[0]))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes").write_text("keep")
    with pytest.raises(PoolError, match="not an empty folder"):
        job.pool.snapshot(tmp_path / "mine")
    assert (tmp_path / "mine" / "notes").read_text() == "keep"
    with pytest.raises(OSError, match="cannot create"):
        job.pool.snapshot(tmp_path / "no" / "such" / "folder")
    for inside in (job.pool.path, job.pool.path / "copy"):
        with pytest.raises(PoolError, match="inside pool"):
            job.pool.snapshot(inside)
        assert not (job.pool.path / "copy").exists()
    job.run.step(job.loss(batches(1)[0]))
    job.pool.close()


@pytest.fixture
def slow_copies():
    """Each chunk of a copy, some thousand rows, is followed by a second of rest."""
    _core.record_start([], [("snapshot: chunk", 1_000_000)])
    yield
    _core.record_stop()


def test_no_room_for_the_last_undo_records(bench, tmp_path, slow_copies):
    """A few records wait in a buffer until the copy is made: one that cannot be written then must
    not be missed, or rows of a later batch stay in the snapshot.
    """
    pool = bench.open()
    rows = 1500
    config = tcxl.EmbeddingBagConfig(
        name="t", num_embeddings=rows, embedding_dim=32, feature_names=["t"]
    )
    bags = tcxl.EmbeddingBagCollection(pool, tables=[config], optimizer=tcxl.optim.Adagrad(lr=0.1))
    run = tcxl.FaultTolerantRun(pool, bags)
    run.step(bags(torch.tensor([[1]])).sum())
    snapshot = pool.snapshot(tmp_path / "copy", wait=False)
    run.step(bags(torch.tensor([[rows - 1], [2]])).sum())  # the last chunk is not copied yet
    while snapshot.share_copied < 1:
        time.sleep(0.01)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limit[1]))
    try:
        with pytest.raises(PoolFull, match=r"undo records of snapshot(.|\n)*do:"):
            snapshot.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert not snapshot.path.exists()
    run.step(bags(torch.tensor([[rows - 1]])).sum())  # the training goes on
    assert run.committed_batch == 3


def test_no_room_for_the_tables(bench, tmp_path):
    """Their space is not allocated ahead, which would take the trainer's time."""
    pool = bench.open()
    config = tcxl.EmbeddingBagConfig(
        name="t", num_embeddings=400_000, embedding_dim=32, feature_names=["t"]
    )
    bags = tcxl.EmbeddingBagCollection(pool, tables=[config], optimizer=tcxl.optim.Adagrad(lr=0.1))
    run = tcxl.FaultTolerantRun(pool, bags)
    snapshot = pool.snapshot(tmp_path / "copy", wait=False)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (32 << 20, limit[1]))
    try:
        with pytest.raises(PoolFull, match=r"copy/data' needs \d+ bytes more(.|\n)*do:"):
            snapshot.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert not snapshot.path.exists()
    run.step(bags(torch.tensor([[1]])).sum())
    assert run.committed_batch == 1


def test_closing_waits_for_the_snapshot(tmp_path):
    job = Large(tmp_path / "pool")
    job.train(3)
    job.pool.snapshot(tmp_path / "copy", wait=False)
    job.pool.close()
    assert inspect(tmp_path / "copy")["committed_batch"] == 3


_TRAINER = """
import sys, time
sys.path.insert(0, {folder!r})
from test_snapshot import Large
job = Large({pool!r})
print("ready", flush=True)
job.train(100_000, lambda run: time.sleep(0.001))
"""


@pytest.fixture
def trainer(tmp_path):
    """Another process that trains a pool until it is killed."""
    code = _TRAINER.format(folder=str(_HERE), pool=str(tmp_path / "pool"))
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        text=True,
        cwd=_HERE,
    )
    assert process.stdout.readline() == "ready\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def snapshot_command(*paths):
    return subprocess.run(
        [sys.executable, "-m", "trainingcxl", "snapshot", *map(str, paths)],
        capture_output=True,
        text=True,
        check=False,
    )


def test_command_while_another_process_trains(tmp_path, trainer):
    done = snapshot_command(tmp_path / "pool", tmp_path / "copy")
    assert done.returncode == 0, done.stderr
    batch = inspect(tmp_path / "copy")["committed_batch"]
    assert f"batch={batch}" in done.stdout
    assert verify(tmp_path / "copy") == []
    alone = Large(tmp_path / "alone")
    alone.train(batch)
    assert digest_of(tmp_path / "copy") == alone.pool.digest()
    alone.pool.close()
    again = snapshot_command(tmp_path / "pool", tmp_path / "copy")
    assert again.returncode == 1
    assert "not an empty folder" in again.stderr


def test_two_ask_at_once(tmp_path, trainer):
    """Each gets its own snapshot, and the batch of that one."""
    asked = [
        subprocess.Popen(
            [sys.executable, "-m", "trainingcxl", "snapshot", tmp_path / "pool", tmp_path / name],
            stdout=subprocess.PIPE,
            text=True,
        )
        for name in ("one", "two", "three")
    ]
    for name, process in zip(("one", "two", "three"), asked, strict=True):
        stdout, _ = process.communicate(timeout=120)
        assert process.returncode == 0
        assert f"batch={inspect(tmp_path / name)['committed_batch']}" in stdout
        assert verify(tmp_path / name) == []
    assert list((tmp_path / "pool" / "snapshots").iterdir()) == []


def test_killed_in_the_middle_of_a_snapshot(tmp_path, trainer):
    """The pool resumes as after any kill; what lies at the snapshot's path is no pool."""
    asked = subprocess.Popen(
        [sys.executable, "-m", "trainingcxl", "snapshot", tmp_path / "pool", tmp_path / "copy"],
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 60
    while not (tmp_path / "copy" / "data").exists() and time.monotonic() < deadline:
        time.sleep(0.0002)
    os.kill(trainer.pid, signal.SIGKILL)
    trainer.wait()
    _, stderr = asked.communicate(timeout=60)
    if asked.returncode != 0:  # it may have been complete already
        assert "ended before the snapshot was taken" in stderr
    if (tmp_path / "copy" / "snapshot.incomplete").exists():
        with pytest.raises(PoolError, match="never completed"):
            Pool(tmp_path / "copy")
    job = Large(tmp_path / "pool")
    committed = job.run.committed_batch
    assert committed > 0
    job.train(committed + 3)
    job.pool.close()
    closed = snapshot_command(tmp_path / "pool", tmp_path / "later")
    assert closed.returncode == 0, closed.stderr
    assert inspect(tmp_path / "later")["committed_batch"] == committed + 3
