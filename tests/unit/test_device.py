"""Pools on a DAX device: what reads them. A file on tmpfs stands for the device.

Of a device there is one mapping at a time that may be written, and no private one: readers view it,
and copy the tables where rows must be put back. The file is opened in the same way.
"""

import shutil
import tempfile
from pathlib import Path

import pytest
from click.testing import CliRunner
from pool_bytes import BLOB, MB, area_of, flip, read, table_bytes, train

from trainingcxl.cli.program import main
from trainingcxl.errors import PoolError
from trainingcxl.pool import Pool, inspect, repair, verify

_DEVICE_BYTES = 48 * MB


class Device:
    """A pool's side folder, and the file that stands for its device."""

    def __init__(self, folder: Path) -> None:
        self.path, self.file = folder / "side", folder / "dax9.0"
        with self.file.open("wb") as file:
            file.truncate(_DEVICE_BYTES)

    def open(self, **options) -> Pool:
        usual = {"durability": "power", "threads": 1, "_medium": "devdax"}
        return Pool(self.path, device=str(self.file), **{**usual, **options})

    def read(self) -> Pool:
        return Pool(self.path, device=str(self.file), read_only=True, threads=1)

    def copy(self) -> "Device":
        """As a kill leaves it."""
        folder = self.path.parent / "copy"
        folder.mkdir()
        made = Device(folder)
        shutil.copytree(self.path, made.path)
        shutil.copyfile(self.file, made.file)
        return made

    def area_of(self, batch: int) -> int:
        """Offset of the dense part of a batch."""
        with tempfile.TemporaryDirectory() as folder:
            window = read(self.file.parent, 0, _DEVICE_BYTES // 4, self.file.name)
            Path(folder, "log").write_bytes(window)
            return int(area_of(Path(folder), batch))

    @property
    def look(self) -> tuple[str, str, str]:
        return str(self.path), "--device", str(self.file)


@pytest.fixture
def device(tmpfs_folder: Path) -> Device:
    return Device(tmpfs_folder)


def run(*arguments: str):
    return CliRunner().invoke(main, list(arguments))


def test_inspect_and_verify(device: Device) -> None:
    with device.open() as pool:
        assert pool.medium == "devdax"
        train(pool, 9, 1)
        found = inspect(device.path, device=str(device.file))
        assert (found["committed_batch"], found["clean"]) == (9, False)
        uuid, digest = pool.uuid, pool.digest()
    found = inspect(device.path, device=str(device.file), digest=True)
    assert found["uuid"] == uuid
    assert found["digest"] == digest
    assert found["medium"] == "devdax"
    assert found["committed_batch"] == found["durable_batch"] == 9
    assert found["clean"]
    assert [table["num_embeddings"] for table in found["tables"]] == [200, 37, 1]
    assert verify(device.path, device=str(device.file)) == []
    assert digest in run("inspect", "--digest", *device.look).output
    assert "no damage found" in run("verify", *device.look).output


def test_reader_after_a_kill(device: Device) -> None:
    """Rows are put back in the reader's memory, the device keeps every byte."""
    states: dict[int, bytes] = {}
    with device.open() as pool:
        train(pool, 7, 5, states=states)
        killed = device.copy()
        pool.core.drop_announced()
    before = killed.file.read_bytes()
    assert inspect(killed.path, device=str(killed.file))["dense_batch"] == 5
    assert verify(killed.path, device=str(killed.file)) == []
    with killed.read() as pool:
        assert pool.recovery is not None
        assert pool.recovery.batches_to_redo == 2
        assert table_bytes(pool) == states[5]
        digest = pool.digest()
    assert inspect(killed.path, device=str(killed.file), digest=True)["digest"] == digest
    assert killed.file.read_bytes() == before
    with killed.open() as pool:
        assert pool.digest() == digest


def test_verify_and_repair(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The dense part that the newest slot names is damaged: repair goes to an older one."""
    with device.open() as pool:
        train(pool, 6, 1)
    flip(device.file.parent, device.area_of(6) + BLOB + 200, device.file.name)
    damage = verify(device.path, device=str(device.file))
    assert [one.region for one in damage] == ["dense log"]
    assert run("verify", *device.look).exit_code == 3
    shown = run("repair", *device.look)
    assert shown.exit_code == 3
    assert "reachable" in shown.output
    make = repair._core.Pool
    monkeypatch.setattr(
        repair._core, "Pool", lambda **options: make(**{**options, "force_medium": "devdax"})
    )
    done = run("repair", "--yes", *device.look)
    assert done.exit_code == 0, done.output
    monkeypatch.undo()
    assert (device.path / "head.before-repair.1").stat().st_size == 4 * MB
    assert verify(device.path, device=str(device.file)) == []
    assert inspect(device.path, device=str(device.file))["committed_batch"] == 5


def test_a_copy_of_a_device_is_only_read(device: Device) -> None:
    with device.open() as pool:
        train(pool, 3, 1)
    before = device.file.read_bytes()
    with pytest.raises(PoolError, match=r"no DAX device: it can only be read\n  do: "):
        device.open(_medium="")
    assert device.file.read_bytes() == before
    assert inspect(device.path, device=str(device.file))["committed_batch"] == 3


def test_without_the_device_its_option_is_named(device: Device) -> None:
    with device.open() as pool:
        train(pool, 2, 1)
    for look in (inspect, verify):
        with pytest.raises(PoolError, match=r"holds no pool(.|\n)*--device"):
            look(device.path)
    assert "--device" in run("inspect", str(device.path)).output
    with pytest.raises(PoolError, match="a pool needs at least"):
        inspect(device.path, device=str(device.path / "lock"))
