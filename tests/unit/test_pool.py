"""Pool: create, open, look at, close. What a user would lose otherwise: the pool itself, or the
disk it lies on.
"""

import contextlib
import gc
import resource
import signal
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from small_pool import MB, commit_batches, spec

import trainingcxl as tcxl
from trainingcxl.errors import PoolError, PoolFull
from trainingcxl.pool import Pool, verify

# --- creation -----------------------------------------------------------------------------------


def test_initial_weights_are_a_function_of_seed_table_and_row(bench):
    """Resume after an interrupted creation, and every later pool, start from the same weights."""
    specs = [spec("a", rows=1000), spec("b", rows=1000), spec("c", rows=1000, seed=1)]
    with bench.open() as pool:
        pool.create_tables(specs)
        first = {name: table.weight.copy() for name, table in pool.tables.items()}
        assert all(not table.state.any() for table in pool.tables.values())
    with bench.open(
        bench.folder / "other.pool"
    ) as pool:  # other order, other size, other process layout
        pool.create_tables([spec("c", rows=2000, seed=1), *specs[:2][::-1]])
        for name, weight in first.items():
            assert np.array_equal(pool.tables[name].weight[:1000], weight)
    assert not np.array_equal(first["a"], first["b"])
    assert not np.array_equal(first["a"], first["c"])
    for weight in first.values():
        assert (np.abs(weight) <= 0.1).all()
        assert abs(weight.mean()) < 0.005
        assert 0.09 < weight.max() <= 0.1


def test_large_tables_are_initialised_alike_in_slices(bench, monkeypatch):
    """The slices that progress is reported in do not show in the weights, nor write elsewhere."""
    with bench.open() as pool:
        pool.create_tables([spec("a", rows=3000), spec("b", rows=50)])
        whole = pool.tables["a"].weight.copy(), pool.tables["b"].weight.copy()
    monkeypatch.setattr("trainingcxl.pool.pool._INIT_BYTES", 4096)
    seen = []
    with bench.open(
        bench.folder / "sliced.pool", progress=lambda *event: seen.append(event)
    ) as pool:
        pool.create_tables([spec("a", rows=3000), spec("b", rows=50)])
        assert np.array_equal(pool.tables["a"].weight, whole[0])
        assert np.array_equal(pool.tables["b"].weight, whole[1])
    done = [event[1] for event in seen]
    assert len(seen) > 20
    assert done == sorted(done)
    assert done[-1] == seen[-1][2] == 3050 * (8 + 1) * 4
    assert {event[0] for event in seen} == {"table a", "table b"}


@pytest.mark.parametrize("when", [1, 2, 4])
def test_interrupted_creation_is_created_anew(bench, monkeypatch, when):
    """Ctrl-C while tables are made: nothing of them is kept, the same call makes the same pool."""
    monkeypatch.setattr("trainingcxl.pool.pool._INIT_BYTES", 4096)
    events = []

    def interrupt(*event):
        events.append(event)
        if len(events) == when:
            raise KeyboardInterrupt

    pool = bench.open(progress=interrupt)
    specs = [spec("a", rows=100), spec("b", rows=300)]
    with pytest.raises(KeyboardInterrupt):
        pool.create_tables(specs)
    with pytest.raises(PoolError, match="closed"):
        pool.digest()
    with bench.open() as again:
        assert again.is_new
        assert again.tables == {}
        again.create_tables(specs)
        digest = again.digest()
    with bench.open(bench.folder / "other.pool") as fresh:
        fresh.create_tables(specs)
        assert fresh.digest() == digest


def test_killed_creation_is_created_anew(bench):
    """kill -9 in the middle of making tables: the image of that instant opens as a new pool."""
    images = []
    pool = bench.open(progress=lambda *event: images.append(bench.image()))
    pool.create_tables([spec("a"), spec("b")])
    assert len(images) == 2
    for image in images:
        with bench.open(image) as again:
            assert again.is_new
            assert again.tables == {}
            again.create_tables([spec("a"), spec("b")])
            assert again.digest() == pool.digest()


def test_pool_without_batch_zero_is_still_new(bench):
    """Tables made, killed before the run's first record: the next process trains from the start."""
    pool = bench.open()
    pool.create_tables([spec()])
    with bench.open(bench.image()) as again:
        assert again.is_new
        assert list(again.tables) == ["t"]
        assert commit_batches(again, 1).committed_batch == 1


def test_tables_of_another_shape_are_refused(bench):
    """Both values and the way out are named; the pool is unchanged."""
    with bench.open() as pool:
        pool.create_tables([spec()])
        digest = pool.digest()
        for changed, values in (
            ({"rows": 101}, ("100", "101")),
            ({"dim": 4}, ("8", "4")),
            ({"optimizer": "sgd"}, ("rowwise", "sgd")),
        ):
            with pytest.raises(PoolError) as error:
                pool.create_tables([spec("new"), spec(**changed)])
            assert all(value in str(error.value) for value in values)
            assert "do:" in str(error.value)
        assert list(pool.tables) == ["t"]
        assert pool.digest() == digest


def test_no_new_table_once_batches_are_committed(bench):
    """A table that appears in the middle of training has no history to roll back to."""
    with bench.open() as pool:
        commit_batches(pool, 1)
        with pytest.raises(PoolError, match="no table 'u'"):
            pool.create_tables([spec("u")])


def test_table_names_with_any_text(bench):
    """Names up to 127 bytes of UTF-8; longer ones are refused before anything is allocated."""
    names = ["C1", "kategorie \u00e4", "\u8868", "a/b:c", "x" * 127]
    with bench.open() as pool:
        pool.create_tables([spec(name) for name in names])
    with bench.open() as pool:
        assert list(pool.tables) == names
        with pytest.raises(ValueError, match="127"):
            pool.create_tables([spec("y" * 128)])


@contextlib.contextmanager
def small_disk(folder: Path, megabytes: int):
    """A file system with that much room: a tmpfs where we may mount one, else a limit on the
    size of files.
    """
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "none", str(folder)],
        capture_output=True,
        check=False,
    )
    if mounted.returncode == 0:
        try:
            yield folder
        finally:
            gc.collect()
            subprocess.run(["umount", "-l", str(folder)], check=True)
        return
    with limited_files(megabytes * MB):
        yield folder


@contextlib.contextmanager
def limited_files(num_bytes: int):
    """No file may grow beyond `num_bytes`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)


def all_bytes(folder: Path) -> int:
    return sum(file.stat().st_blocks * 512 for file in folder.rglob("*") if file.is_file())


@pytest.mark.parametrize("limit", ["disk", "file size"])
@pytest.mark.parametrize(
    "tables", [[spec("a", rows=600_000)], [spec("a"), spec("b", rows=600_000)]]
)
def test_no_room_for_the_tables(tmp_path, limit, tables):
    """D6, D10: 20 MB asked for where 10 are: path, needed and free bytes are named, and nothing
    is left behind.
    """
    with small_disk(tmp_path, 10) if limit == "disk" else limited_files(10 * MB):
        path = tmp_path / "ads.pool"
        pool = Pool(path, threads=1)
        with pytest.raises(PoolFull) as error:
            pool.create_tables(tables)
        text = str(error.value)
        assert str(path) in text
        assert "needs" in text
        assert "free" in text
        assert not path.exists() or all_bytes(path) == 0
        with Pool(path, threads=1) as again:  # the room is there again
            again.create_tables([spec("a", rows=1000)])
            assert again.is_new


@pytest.mark.parametrize("limit", ["disk", "file size"])
@pytest.mark.parametrize("exists", [False, True])
def test_no_room_for_the_pool_at_all(tmp_path, limit, exists):
    """D10: not even the head fits; a folder that was there stays, with the user's own files."""
    with small_disk(tmp_path, 2) if limit == "disk" else limited_files(2 * MB):
        path = tmp_path / "ads.pool"
        if exists:
            path.mkdir()
            (path / "notes.txt").write_text("mine")
        with pytest.raises(PoolFull) as error:
            Pool(path)
        text = str(error.value)
        assert str(path) in text
        assert "needs" in text
        assert "free" in text
        assert (
            [file.name for file in path.iterdir()] == ["notes.txt"] if exists else not path.exists()
        )


def test_disk_full_while_training(tmp_path):
    """D6: the log would have to grow and can't: an error, the pool is valid at the last commit,
    training goes on.
    """
    with small_disk(tmp_path, 30):
        pool = Pool(tmp_path / "ads.pool", threads=1)
        run = commit_batches(pool, 3)
        digest = pool.digest()
        run.model.register_buffer("large", torch.zeros(24 * MB // 4))  # needs a larger dense area
        with pytest.raises(PoolFull, match="free"):
            run.finish()
        assert pool.committed_batch == 3
        del run.model.large
        run.step(run.model(torch.tensor([[1]])).sum())
        assert pool.committed_batch == 4
        pool.close()
        with Pool(tmp_path / "ads.pool", threads=1) as again:
            assert again.committed_batch == 4
            assert again.digest() != digest
        assert verify(tmp_path / "ads.pool") == []


def test_no_room_for_a_larger_log(tmp_path):
    """D6: a batch that needs a larger log than fits is refused before anything, the dense part
    included.
    """
    with Pool(tmp_path / "ads.pool", threads=1) as pool:
        config = tcxl.EmbeddingBagConfig(
            name="t", num_embeddings=200_000, embedding_dim=16, feature_names=["f"]
        )
        bags = tcxl.EmbeddingBagCollection(
            pool, tables=[config], optimizer=tcxl.optim.RowWiseAdagrad(lr=0.1)
        )
        model = torch.nn.Sequential(bags, torch.nn.Linear(16, 1))
        run = tcxl.FaultTolerantRun(pool, model, torch.optim.SGD(model.parameters(), lr=0.1))
        small, large = torch.arange(8).reshape(-1, 1), torch.arange(200_000).reshape(-1, 1)
        run.step(model(small).sum())
        run.sync()
        data, head = (tmp_path / "ads.pool" / "data").read_bytes(), model[1].weight.detach().clone()
        with limited_files((tmp_path / "ads.pool" / "log").stat().st_size):
            with pytest.raises(PoolFull, match="free"):
                run.step(model(large).sum())
            assert (tmp_path / "ads.pool" / "data").read_bytes() == data
            assert torch.equal(model[1].weight, head)
            run.skip()
            run.step(model(small).sum())
        run.step(model(large).sum())
        assert run.committed_batch == 4
    assert verify(tmp_path / "ads.pool") == []


def test_space_is_allocated_not_sparse(bench):
    """D6: a table whose blocks are missing would end in SIGBUS when the disk fills up later."""
    with bench.open() as pool:
        pool.create_tables([spec(rows=200_000)])
        for name in ("data", "log"):
            status = (pool.path / name).stat()
            assert status.st_blocks * 512 >= status.st_size


def test_last_row_of_a_table_beyond_32_bits(bench):
    """F8: 2^26 rows of 64 floats are 2^34 bytes; the last rows are looked up and updated as the
    first are.
    """
    rows, dim = 1 << 26, 64
    pool = bench.open(_medium="sparse")
    key = pool.core.add_table(name="big", rows=rows, dim=dim, optimizer=2, seed=0, key=0, scale=0.0)
    pool.core.commit_tables()
    ids = torch.tensor([[rows - 1], [0], [rows - 10], [rows - 1], [9]])
    config = tcxl.EmbeddingBagConfig(
        name="big", num_embeddings=rows, embedding_dim=dim, feature_names=["f"]
    )
    bags = tcxl.EmbeddingBagCollection(
        pool, tables=[config], optimizer=tcxl.optim.RowWiseAdagrad(lr=0.5, eps=0.0)
    )
    run = tcxl.FaultTolerantRun(pool, bags)
    for _ in range(2):
        run.step(bags(ids).sum())
    assert key == 0
    table = pool.tables["big"]
    # Gradient 2, then 2 for the last row: state 4, 8; steps 0.5 * 2 / 2, 0.5 * 2 / sqrt(8).
    twice, once = -0.5 - 1 / 8**0.5, -0.5 - 0.5 / 2**0.5
    np.testing.assert_allclose(table.weight[rows - 1], twice, rtol=1e-6)
    for row in (0, 9, rows - 10):
        np.testing.assert_allclose(table.weight[row], once, rtol=1e-6)
    assert table.state[rows - 1, 0] == 8.0
    assert not table.weight[rows - 9 : rows - 1].any()
    with torch.no_grad():
        np.testing.assert_allclose(bags(ids)[0].numpy(), twice, rtol=1e-6)
    assert (pool.path / "data").stat().st_blocks * 512 < 64 * MB
    with bench.open(
        crash_image(bench, pool), resume="latest"
    ) as again:  # rolled back and forth beyond 2^32 bytes
        assert np.array_equal(again.tables["big"].weight[rows - 1], table.weight[rows - 1])


def crash_image(bench, pool):
    """As bench.image(), for files with holes."""
    target = bench.folder / "sparse.pool"
    subprocess.run(["cp", "-r", "--sparse=always", pool.path, target], check=True)
    return target
