"""One writer a pool. Two trainers on one pool would mix their rows; a lock that outlives its owner
would keep a restarted trainer out.
"""

import contextlib
import gc
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch

import trainingcxl as tcxl
from trainingcxl.errors import PoolLocked
from trainingcxl.pool import Pool, inspect


def script(code, *arguments):
    """A child process that runs `code` with the pool's path in sys.argv[1]."""
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def wait_for(child, word):
    line = child.stdout.readline().strip()
    assert line == word, (line, child.poll())


HOLD = """
    import sys
    from trainingcxl.pool import Pool
    pool = Pool(sys.argv[1], threads=1)
    print("open", flush=True)
    sys.stdin.readline()
    pool.close()
    print("closed", flush=True)
    sys.stdin.readline()
"""


def test_second_writer_is_refused_with_the_owner(bench):
    """In another process and in the same one; the message has the owner's pid and what to do."""
    child = script(HOLD, bench.path)
    try:
        wait_for(child, "open")
        for read_only in (False, True):
            with pytest.raises(PoolLocked, match=rf"process {child.pid}\n.*do:"):
                Pool(bench.path, read_only=read_only)
        with pytest.raises(PoolLocked, match=str(child.pid)):
            Pool.discard(bench.path)
        assert inspect(bench.path)["committed_batch"] is None
        print(file=child.stdin, flush=True)
        wait_for(child, "closed")
        bench.open()  # the process lives on, the pool is free
        with pytest.raises(PoolLocked, match=str(os.getpid())):
            Pool(bench.path)
    finally:
        child.kill()
        child.communicate()


def test_refused_opens_do_not_disturb_the_owner(bench, monkeypatch):
    """A second creation that comes too late must not clear away the files of the first."""
    pool = bench.open()
    monkeypatch.setattr(
        Path, "exists", lambda self: False
    )  # it looked before the first had made them
    for _ in range(3):
        with pytest.raises(PoolLocked):
            Pool(bench.path)
    monkeypatch.undo()
    assert sorted(file.name for file in bench.path.iterdir()) == ["data", "lock", "log"]
    config = tcxl.EmbeddingBagConfig(
        name="t", num_embeddings=9, embedding_dim=2, feature_names=["f"]
    )
    bags = tcxl.EmbeddingBagCollection(
        pool, tables=[config], optimizer=tcxl.optim.RowWiseAdagrad(lr=0.1)
    )
    run = tcxl.FaultTolerantRun(pool, bags)
    run.step(bags(torch.tensor([[1]])).sum())
    pool.close()
    assert inspect(bench.path)["committed_batch"] == 1


def test_readers_share_and_keep_writers_out(bench):
    """A reader's rows must not change under it."""
    bench.open().close()
    first, second = bench.open(read_only=True), bench.open(read_only=True)
    with pytest.raises(PoolLocked, match="is being read"):
        Pool(bench.path)
    first.close()
    with pytest.raises(PoolLocked, match="is being read"):
        Pool(bench.path)
    second.close()
    bench.open().close()


def test_a_killed_owner_frees_the_pool(bench):
    """After kill -9 the same command starts at once."""
    child = script(HOLD, bench.path)
    wait_for(child, "open")
    child.send_signal(signal.SIGKILL)
    child.communicate()
    with bench.open() as pool:
        assert pool.is_new


FORKS = """
    import os, sys, time
    import torch
    from torch.utils.data import DataLoader, TensorDataset
    from trainingcxl.pool import Pool
    torch.set_num_threads(1)
    pool = Pool(sys.argv[1], threads=2)
    if sys.argv[2] == "fork":
        child = os.fork()
        if child == 0:
            time.sleep(60)
            os._exit(0)
        pids = [child]
    else:
        loader = DataLoader(TensorDataset(torch.arange(64)), num_workers=2, batch_size=1,
                            multiprocessing_context="fork", prefetch_factor=1)
        batches = iter(loader)
        next(batches)
        pids = [worker.pid for worker in batches._workers]
    print("ready", *pids, flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("how", ["fork", "loader"])
def test_children_do_not_keep_the_lock(bench, how):
    """Data-loader workers outlive a trainer that is killed: they must hold neither lock nor
    memory of the pool.
    """
    trainer = script(FORKS, bench.path, how)
    word, *pids = trainer.stdout.readline().split()
    assert word == "ready"
    try:
        for pid in pids:
            maps = Path(f"/proc/{pid}/maps").read_text()
            assert str(bench.path) not in maps
        trainer.send_signal(signal.SIGKILL)
        trainer.wait()
        if how == "fork":
            assert Path(f"/proc/{pids[0]}").exists()
        with Pool(bench.path, threads=1) as pool:
            assert pool.is_new
    finally:
        for pid in pids:  # before reading on: they hold the pipe
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        trainer.kill()
        trainer.communicate()


CHILD_EXITS = """
    import gc, os, sys
    from trainingcxl.errors import PoolError
    from trainingcxl.pool import Pool, TableSpec
    pool = Pool(sys.argv[1], threads=2)
    pool.create_tables([TableSpec(name="t", num_embeddings=9, embedding_dim=2, optimizer="sgd",
                                  init_scale=0.1, init_seed=0)])
    child = os.fork()
    if child == 0:
        if sys.argv[2] == "drop":
            del pool
            gc.collect()
        if sys.argv[2] == "close":
            pool.close()
        if sys.argv[2] == "use":
            uses = (pool.digest, lambda: pool.tables["t"].weight, lambda: pool.core.wait_dense())
            for use in uses:
                try:
                    use()
                except PoolError as error:
                    assert "before the fork" in str(error)
                else:
                    os._exit(1)
        sys.exit(0)
    status = os.waitpid(child, 0)[1]
    print("child", os.waitstatus_to_exitcode(status), flush=True)
    try:
        Pool(sys.argv[1])
    except Exception as error:
        print(type(error).__name__, flush=True)
    pool.core.sync()
    pool.close()
    print("closed", flush=True)
"""


@pytest.mark.parametrize("how", ["exit", "drop", "close", "use"])
def test_a_child_that_exits_leaves_the_pool_to_its_parent(bench, how):
    """Whatever a forked child does with its copy, it neither crashes, hangs nor closes the pool."""
    child = script(CHILD_EXITS, bench.path, how)
    try:
        out, _ = child.communicate(timeout=30)
    finally:
        child.kill()
    assert out.split("\n")[:3] == ["child 0", "PoolLocked", "closed"]
    assert inspect(bench.path)["clean"]


def test_spawned_processes_get_nothing(bench):
    """Descriptors are close-on-exec: a program that the trainer starts does not hold the pool."""
    pool = Pool(bench.path, threads=1)
    child = subprocess.Popen(
        ["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, close_fds=False
    )
    try:
        print("loaded", file=child.stdin, flush=True)
        wait_for(child, "loaded")
        held = [link.readlink() for link in Path(f"/proc/{child.pid}/fd").iterdir()]
        assert not any(str(bench.path) in str(target) for target in held)
        pool.close()
        Pool(bench.path, threads=1).close()
    finally:
        child.kill()
        child.communicate()


def test_many_pools_in_one_process(bench):
    """More than one pool may be open; closing one leaves the others locked."""
    paths = [bench.folder / f"{i}.pool" for i in range(5)]
    pools = [bench.open(path) for path in paths]
    pools[2].close()
    for i, path in enumerate(paths):
        if i == 2:
            bench.open(path)
            continue
        with pytest.raises(PoolLocked):
            Pool(path)
    del pools
    gc.collect()


def test_only_one_of_many_racing_creations_wins(bench):
    """Several processes create the same pool at once: one has it, the others say so, none breaks
    it.
    """
    code = """
        import sys, time
        from trainingcxl.pool import Pool
        from trainingcxl.errors import PoolLocked
        sys.stdin.readline()
        try:
            pool = Pool(sys.argv[1], threads=1)
        except PoolLocked:
            print("locked", flush=True)
        else:
            print("open", flush=True)
            time.sleep(1.0)
            pool.close()
    """
    children = [script(code, bench.path) for _ in range(4)]
    time.sleep(0.5)
    for child in children:
        print(file=child.stdin, flush=True)
    words = sorted(child.communicate()[0].strip() for child in children)
    assert words.count("open") >= 1
    assert set(words) <= {"open", "locked"}
    with bench.open() as pool:
        assert pool.is_new
