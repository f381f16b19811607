"""Level power on ordinary files: simulated power failures (cases A, D).

Ordinary files stand on tmpfs here, by force: the code and the order of its system calls are those
of a disk; what a failure takes along is simulated (torture_power.py).
"""

import os
import struct
from pathlib import Path
from typing import Any

import pytest
import torch

import trainingcxl as tcxl
from trainingcxl.errors import PoolCorrupted
from trainingcxl.pool import inspect, verify

_SCENARIO = {"medium": "block", "has_power_cuts": True}


def test_random_power_cuts(ask: Any, tmpfs_folder: Path) -> None:
    """Any moment of any of nine trainings.

    Durable: the journal up to its last sync, dense generations whose header was synced, tables as
    of the last checkpoint. Lost or torn: any sector of the tables back to any version since, slots
    and flags of the log, frames that waited for their sync. Found must be the durable batch or a
    later one, with the bits of the training that was left alone.
    """
    found = ask("power_cuts", folder=str(tmpfs_folder), kills=6, seed=3)
    assert found["differences"] == []
    assert found["kills"] >= 25
    assert found["rows_changed"] > 0


@pytest.mark.parametrize(
    "point",
    ["journal: frames written", "journal: synced", "journal: slot written", "data: synced"],
)
def test_power_cut_at_each_step_of_the_journal(ask: Any, tmpfs_folder: Path, point: str) -> None:
    """The k-th frame, sync, cut of the ring, and sync of the tables, one after the other.

    A cut of the ring before the tables or the dense part were durable, previous bytes synced after
    their rows changed, or a base that the head of the ring does not fit, would each leave rows of
    no batch.
    """
    found = ask(
        "planned_kills",
        folder=str(tmpfs_folder),
        scenario={**_SCENARIO, "epochs": 4, "dense_every": 3},
        plans=[[{"countdown": k, "point": point}] for k in range(1, 8)],
    )
    assert found["differences"] == []
    assert found["died_at"].get(point, 0) >= 4


def test_power_cut_at_the_end(ask: Any, tmpfs_folder: Path) -> None:
    """The end of a training is another dense generation of its last batch: no slot that a power
    failure leaves says which of the two is the later one.
    """
    found = ask(
        "planned_kills",
        folder=str(tmpfs_folder),
        scenario={
            **_SCENARIO, "epochs": 1, "dense_every": 3, "resume": "latest", "has_dense": False
        },
        plans=[
            [{"countdown": k, "point": point}] * times
            for point in ("journal: frames written", "journal: synced")
            for k in range(44, 56)
            for times in (1, 2)
        ],
    )  # fmt: skip
    assert found["differences"] == []
    assert found["kills"] >= 24


def test_power_cuts_in_recovery(ask: Any, tmpfs_folder: Path) -> None:
    """Recovery from the journal dies at each of its points, then succeeds: evidence stays."""
    found = ask(
        "planned_kills",
        folder=str(tmpfs_folder),
        scenario={**_SCENARIO, "dense_every": 7, "epochs": 1},
        plans=[
            [{"countdown": 13, "point": "commit: rows stored"}]
            + [{"countdown": k, "point": "recovery: row"} for k in range(1, 200, 20)]
            + [{"countdown": k} for k in range(1, 24, 2)]
        ],
    )
    assert found["differences"] == []
    assert found["kills_in_recovery"] >= 6


class _Small:
    """A pool with one table and a loop by hand."""

    def __init__(self, path: Path, **options: Any) -> None:
        self.pool = tcxl.Pool(
            path, durability="power", **{"_medium": "block", "threads": 1, **options}
        )
        config = tcxl.EmbeddingBagConfig(
            name="t", num_embeddings=500, embedding_dim=8, feature_names=["t"]
        )
        self.rows = tcxl.EmbeddingBagCollection(
            self.pool, tables=[config], optimizer=tcxl.optim.Adagrad(lr=0.1)
        )
        self.run = tcxl.FaultTolerantRun(self.pool, self.rows)

    def train(self, batches: int) -> None:
        for k in range(batches):
            generator = torch.Generator().manual_seed(self.run.committed_batch + k)
            ids = torch.randint(0, 500, (64, 1), generator=generator)
            self.run.step(self.rows(ids).square().sum())


def test_durable_batch_follows(tmp_path: Path) -> None:
    small = _Small(tmp_path / "pool", lag_max=2)
    small.train(50)
    assert 48 <= small.run.durable_batch <= small.run.committed_batch == 50
    small.run.sync()
    assert small.run.durable_batch == 50
    small.pool.close()
    assert verify(tmp_path / "pool") == []
    assert inspect(tmp_path / "pool")["durability"] == "power"


@pytest.mark.parametrize("lookahead", [1, 2, 8])
@pytest.mark.parametrize("is_announced", [True, False])
def test_small_ring_beside_a_slow_dense_part(
    tmpfs_folder: Path, lookahead: int, is_announced: bool
) -> None:
    """The smallest ring there can be gets full while a generation of 8 MB is being written.

    The checkpoint that makes room begins with a generation: it must not be put off until the ring
    is full because another one is in hand. Nor may the frames that a checkpoint leaves behind be
    too many for the next one to begin.
    """
    pool = tcxl.Pool(
        tmpfs_folder / "pool", durability="power", _medium="block", threads=1, journal_bytes=4096,
        lookahead=lookahead,
    )  # fmt: skip
    config = tcxl.EmbeddingBagConfig(
        name="t", num_embeddings=20_000, embedding_dim=8, feature_names=["t"]
    )
    model = torch.nn.Module()
    model.rows = tcxl.EmbeddingBagCollection(
        pool, tables=[config], optimizer=tcxl.optim.Adagrad(lr=0.1)
    )
    model.ballast = torch.nn.Parameter(torch.zeros(2_000_000), requires_grad=False)
    run = tcxl.FaultTolerantRun(pool, model, dense_every=7, sparse_of=lambda ids: ids)
    generator = torch.Generator().manual_seed(1)
    sizes = [500, *[740] * 119]  # the ring is chosen by the first
    data = [torch.randint(0, 20_000, (size, 1), generator=generator) for size in sizes]
    for ids in run.batches(data) if is_announced else data:
        run.step(model.rows(ids).square().sum())
    assert run.committed_batch == 120
    assert pool.core.stats()["checkpoints"] > 5
    run.sync()
    assert run.durable_batch == 120
    pool.close()
    assert verify(tmpfs_folder / "pool") == []


def _open_after_reboot(path: Path) -> tcxl.Pool:
    return tcxl.Pool(path, durability="power", _medium="block", _assume_reboot=True)


def _left_open(tmp_path: Path) -> Path:
    """A pool whose machine went down: its process ends without closing it."""
    path = tmp_path / "pool"
    pid = os.fork()
    if pid == 0:
        try:
            small = _Small(path)
            small.train(30)
            small.run.sync()
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    return path


def _frames(journal: bytes) -> list[tuple[int, int]]:
    """Offset and bytes of the frames of the newest life."""
    slots = [struct.unpack_from("<8Q", journal, at) for at in (0, 4096)]
    _, _, life, _, ring, _, head, lsn = max(slots, key=lambda slot: slot[1])
    found, at = [], ring + head
    while struct.unpack_from("<3Q", journal, at)[1:] == (lsn, life):
        size = struct.unpack_from("<7Q", journal, at)[6]
        found.append((at, size))
        at, lsn = at + size, lsn + 1
    return found


@pytest.mark.parametrize("frame", [0, 10, 30])
def test_damaged_frame_that_had_been_durable(tmp_path: Path, frame: int) -> None:
    """A later frame says so: this is no power failure, and nothing may be guessed."""
    path = _left_open(tmp_path)
    journal = bytearray((path / "journal").read_bytes())
    at, size = _frames(journal)[frame]
    journal[at + size // 2] ^= 4
    journal[at + 200] ^= 4
    (path / "journal").write_bytes(journal)
    before = {name: (path / name).read_bytes() for name in ("log", "data", "journal")}
    with pytest.raises(PoolCorrupted, match="was durable and is not whole"):
        _open_after_reboot(path)
    for name, content in before.items():
        assert (path / name).read_bytes() == content


def test_lost_journal(tmp_path: Path) -> None:
    path = _left_open(tmp_path)
    (path / "journal").unlink()
    with pytest.raises(PoolCorrupted, match="journal' is missing"):
        _open_after_reboot(path)


def test_journal_of_another_pool(tmp_path: Path) -> None:
    """After a restart only the pool's own journal tells what is durable; nothing is changed."""
    paths = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        paths.append(_left_open(tmp_path / name))
    (paths[0] / "journal").write_bytes((paths[1] / "journal").read_bytes())
    before = {name: (paths[0] / name).read_bytes() for name in ("log", "data", "journal")}
    with pytest.raises(PoolCorrupted, match="holds no valid slot"):
        _open_after_reboot(paths[0])
    for name, content in before.items():
        assert (paths[0] / name).read_bytes() == content


def test_inspect_says_what_is_durable(tmp_path: Path) -> None:
    """While a pool is trained, and after a kill: never more than the trainer would."""
    small = _Small(tmp_path / "pool", lag_max=8)
    assert inspect(tmp_path / "pool")["durable_batch"] == 0
    for _ in range(20):
        small.train(1)
        assert inspect(tmp_path / "pool")["durable_batch"] <= (small.run.durable_batch or 0)
    small.run.sync()
    assert 12 <= inspect(tmp_path / "pool")["durable_batch"] <= 20
    small.pool.close()
    assert inspect(tmp_path / "pool")["durable_batch"] == 20


def test_cut_off_journal(tmp_path: Path) -> None:
    path = _left_open(tmp_path)
    os.truncate(path / "journal", (path / "journal").stat().st_size - 4096)
    with pytest.raises(PoolCorrupted, match="truncated"):
        _open_after_reboot(path)


def test_a_restart_finds_the_durable_batch(tmp_path: Path) -> None:
    path = _left_open(tmp_path)
    with tcxl.Pool(
        path, durability="power", _medium="block", _assume_reboot=True, read_only=True
    ) as pool:
        assert pool.recovery.committed_batch == 30
    with _open_after_reboot(path) as pool:
        assert pool.recovery.committed_batch == 30
        assert pool.durable_batch == 30
        digest = pool.digest()
    with tcxl.Pool(path, durability="power", _medium="block") as pool:
        assert pool.digest() == digest
