"""`trainingcxl doctor`: true about this machine, and it leaves no trace.

A user trusts what it says of durability, and runs it beside a pool that took days to train.
"""

import copy
import json
import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner, Result

from trainingcxl.cli import main
from trainingcxl.doctor import diagnose, disk, machine, measure, report, trial
from trainingcxl.doctor.advice import advise
from trainingcxl.errors import DurabilityUnavailable, PoolError
from trainingcxl.pool import Pool, TableSpec


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["doctor", *arguments])


def tree(folder: Path) -> dict[str, tuple[int, int, bytes]]:
    """Every file and folder below, with size, time of change and content."""
    found = {}
    for path in sorted(folder.rglob("*")):
        status = path.lstat()
        content = path.read_bytes() if path.is_file() else b""
        found[str(path)] = (status.st_size, status.st_mtime_ns, content)
    return found


def make_pool(path: Path) -> Pool:
    pool = Pool(path, threads=1)
    pool.create_tables(
        [
            TableSpec(
                name="t",
                num_embeddings=100,
                embedding_dim=4,
                optimizer="sgd",
                init_scale=0.1,
                init_seed=0,
            )
        ]
    )
    return pool


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


# --- a path


def test_report_has_every_part_and_is_plain_data(medium_folder: Path) -> None:
    found = json.loads(json.dumps(diagnose(medium_folder)))
    assert found["path"] == str(medium_folder)
    assert found["kind"] == "folder"
    assert found["medium"]["medium"] in ("tmpfs", "block", "fsdax")
    assert found["medium"]["page_bytes"] in (4096, 2 << 20)
    assert found["medium"]["free_bytes"] > 0
    assert 0 < found["speed"]["sync_p50_ms"] <= found["speed"]["sync_max_ms"]
    assert found["speed"]["durable_bytes_per_s"] > 0
    assert found["memory"]["total_bytes"] >= found["memory"]["available_bytes"] > 0
    assert found["memory"]["dirty"]["dirty_expire_centisecs"] is not None
    assert found["versions"]["torch"]
    assert found["cpu"]["vector_width"] in ("scalar", "avx2", "avx512")
    assert found["advice"]


def test_level_is_the_one_that_the_engine_gives(medium_folder: Path) -> None:
    """What the report calls possible can be had, and what it calls impossible can't."""
    level = diagnose(medium_folder)["level"]
    with Pool(medium_folder / "a.pool", durability=level["possible"], threads=1):
        pass
    for refused, why in level["why_not_higher"].items():
        with pytest.raises(DurabilityUnavailable) as caught:
            Pool(medium_folder / "b.pool", durability=refused, threads=1)
        here, there = str(medium_folder / "b.pool"), str(medium_folder)
        assert why == str(caught.value).partition("\n")[0].replace(here, there)


def test_nothing_is_left_behind(medium_folder: Path) -> None:
    (medium_folder / "data").mkdir()  # named like a file of a pool, but none
    (medium_folder / "data" / "theirs").write_text("keep")
    before = tree(medium_folder)
    assert diagnose(medium_folder)["kind"] == "folder"
    assert diagnose(medium_folder / "new.pool")["kind"] == "new pool"
    assert tree(medium_folder) == before


def test_pool_is_read_and_never_written(medium_folder: Path) -> None:
    path = medium_folder / "a.pool"
    make_pool(path).close()
    before, changed = tree(medium_folder), path.stat().st_mtime_ns
    found = diagnose(path)
    assert found["kind"] == "pool"
    assert found["pool"]["durability"] == "process"
    assert found["pool"]["clean"]
    assert found["speed"]["syncs"] > 0  # beside the pool, on the same file system
    assert tree(medium_folder) == before
    assert path.stat().st_mtime_ns == changed


def test_pool_in_use_is_no_hindrance(tmpfs_folder: Path) -> None:
    with make_pool(tmpfs_folder / "a.pool"):
        found = diagnose(tmpfs_folder / "a.pool")
    assert not found["pool"]["clean"]
    assert any("next open recovers it" in text for text in found["advice"])


def test_damaged_pool_is_a_finding(tmpfs_folder: Path) -> None:
    path = tmpfs_folder / "a.pool"
    make_pool(path).close()
    (path / "log").write_bytes(b"\xff" * (4 << 20))
    found = diagnose(path)
    assert "no valid superblock" in found["pool"]["unreadable"]
    assert found["level"]["possible"] == "process"


def test_pool_that_is_a_mount_point_is_not_probed(
    tmpfs_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside it lies another file system, which would be described instead."""
    path = tmpfs_folder / "a.pool"
    make_pool(path).close()
    stat = Path.stat

    def on_another_device(self: Path, **options: bool) -> os.stat_result:
        found = stat(self, **options)
        return os.stat_result((*found[:2], 1, *found[3:])) if self.name == ".." else found

    monkeypatch.setattr(Path, "stat", on_another_device)
    before = names(path), names(tmpfs_folder)
    found = diagnose(path)
    assert found["level"]["possible"] is None
    assert not found["level"]["is_probed"]
    assert "a mount point" in found["speed"]["not_measured"]
    assert found["medium"]["medium"] == "tmpfs"
    assert (names(path), names(tmpfs_folder)) == before


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("absent/a.pool", r"nor does the folder .*absent'\n  do:    make that folder"),
        ("file", r"file' is a file, a pool is a folder\n  do:    name a folder"),
    ],
)
def test_path_that_can_hold_no_pool_is_an_error(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(PoolError, match=message):
        diagnose(tmp_path / name)
    result = run(str(tmp_path / name))
    assert result.exit_code == 1
    assert "do:" in result.stderr


def test_folder_in_which_nothing_can_be_made_is_a_finding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(trial.tempfile, "mkdtemp", refuse)
    monkeypatch.setattr(report, "measure_writes", refuse)
    found = diagnose(tmp_path)
    assert found["level"]["possible"] is None
    assert "Permission denied" in found["level"]["why_not_higher"]["process"]
    assert found["speed"] == {"not_measured": "Permission denied"}
    assert found["advice"][0].startswith("no pool can be made here")


def test_interrupted_probe_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Pool, "create_tables", interrupt)
    with pytest.raises(KeyboardInterrupt):
        diagnose(tmp_path)
    assert names(tmp_path) == []


def test_what_a_killed_doctor_left_goes_with_the_next_one(tmp_path: Path) -> None:
    old, young = (tmp_path / f".trainingcxl-doctor-{name}" for name in ("old", "young"))
    for folder in (old, young):
        folder.mkdir()
        make_pool(folder / "pool").close()
    os.utime(old, (time.time() - 7200,) * 2)
    diagnose(tmp_path)
    assert names(tmp_path) == [young.name]  # that one may be at work


def test_file_without_a_name_is_used_where_there_is_no_better(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Network file systems know no O_TMPFILE."""
    opened = os.open

    def refuse(path: object, flags: int, *rest: int, **options: object) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(95, "Operation not supported")
        return opened(path, flags, *rest, **options)

    monkeypatch.setattr(measure.os, "open", refuse)
    assert measure.measure_writes(tmp_path, 1 << 30)["syncs"] > 0
    assert names(tmp_path) == []


def test_full_disk_is_not_filled_further(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="only 1000 bytes are free"):
        measure.measure_writes(tmp_path, 1000)


# --- DAX devices


def test_dax_device_is_described_from_sysfs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = write(
        tmp_path,
        {
            "bus/dax/devices/null/size": "1073741824\n",
            "bus/dax/devices/null/align": "2097152\n",
            "bus/dax/devices/null/target_node": "1\n",
        },
    )
    monkeypatch.setattr(report.disk, "dax_device", partial(disk.dax_device, sys=root))
    found = diagnose("/dev/null")
    assert found["kind"] == "dax device"
    assert found["medium"]["total_bytes"] == 1 << 30
    assert found["medium"]["align_bytes"] == 2 << 20
    assert found["medium"]["is_dax"]
    assert found["speed"] == {"not_measured": "a write to a device would damage a pool on it"}
    if found["cpu"]["best_flush"]:
        assert found["level"]["possible"] == "power"
        assert found["medium"]["flush"] == found["cpu"]["best_flush"]


def test_other_character_devices_are_refused() -> None:
    with pytest.raises(PoolError, match=r"no DAX device.*\n  do:    name /dev/daxX\.Y"):
        diagnose("/dev/null")


def test_persistence_domains_are_shown(tmp_path: Path) -> None:
    write(tmp_path, {"bus/nd/devices/region0/persistence_domain": "memory_controller\n"})
    assert disk.persistence_domains(tmp_path) == ["memory_controller"]
    assert disk.persistence_domains(tmp_path / "absent") == []


# --- what the kernel says


def test_mount_is_found_by_device_then_by_place(tmp_path: Path) -> None:
    number = tmp_path.stat().st_dev
    device = f"{os.major(number)}:{os.minor(number)}"
    lines = [
        f"20 1 {device} / / rw,relatime shared:1 - ext4 /dev/sda1 rw,dax=always,upperdir=/home/me",
        "21 1 0:99 / / rw - btrfs /dev/sdb rw,nodatacow",
        f"22 1 0:98 / {tmp_path} rw - nfs4 server:/export/me rw,addr=10.0.0.1",
    ]
    write(tmp_path, {"self/mountinfo": "\n".join(lines)})
    found = disk.mount_of(tmp_path, tmp_path)
    assert found == disk.Mount(device, "ext4", ["dax=always", "relatime"])
    write(tmp_path, {"self/mountinfo": "\n".join(lines[1:])})
    found = disk.mount_of(tmp_path, tmp_path)
    assert (found.type, found.options, found.is_network) == ("nfs4", [], True)
    write(tmp_path, {"self/mountinfo": lines[1]})
    found = disk.mount_of(tmp_path, tmp_path)
    assert (found.type, found.is_copy_on_write) == ("btrfs", True)
    assert disk.mount_of(tmp_path, tmp_path / "absent") == disk.Mount(device)


def test_partition_is_described_by_its_disk(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "devices/nvme0n1/dev": "259:0\n",
            "devices/nvme0n1/device/model": "Amazon Elastic Block Store \n",
            "devices/nvme0n1/queue/rotational": "0\n",
            "devices/nvme0n1/queue/write_cache": "write back\n",
            "devices/nvme0n1/nvme0n1p1/partition": "1\n",
        },
    )
    (tmp_path / "dev/block").mkdir(parents=True)
    (tmp_path / "dev/block/259:1").symlink_to("../../devices/nvme0n1/nvme0n1p1")
    assert disk.block_device("259:1", tmp_path) == {
        "disk": "259:0",
        "model": "Amazon Elastic Block Store",
        "is_rotational": False,
        "write_cache": "write back",
    }
    assert disk.block_device("0:42", tmp_path) is None


def test_tightest_level_of_unified_groups_counts(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/user.slice/user-1000.slice\n",
            "sys/fs/cgroup/memory.max": "max\n",
            "sys/fs/cgroup/user.slice/memory.max": "4000000000\n",
            "sys/fs/cgroup/user.slice/user-1000.slice/memory.max": "8000000000\n",
            "sys/fs/cgroup/user.slice/user-1000.slice/memory.high": "3000000000\n",
            "sys/fs/cgroup/user.slice/user-1000.slice/memory.current": "17\n",
            "sys/fs/cgroup/user.slice/cpu.max": "150000 100000\n",
            "sys/fs/cgroup/user.slice/io.max": "8:16 wbps=1\n8:0 rbps=max wbps=1048576 wiops=max\n",
        },
    )
    assert machine.cgroup_limits("8:0", tmp_path / "proc", tmp_path / "sys") == {
        "memory_bytes": 4_000_000_000,
        "memory_high_bytes": 3_000_000_000,
        "memory_used_bytes": 17,
        "cpus": 1.5,
        "write_bytes_per_s": 1 << 20,
        "writes_per_s": None,
    }


def test_groups_of_version_one_are_read(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "proc/self/cgroup": "4:memory:/job\n3:cpu,cpuacct:/job\n2:blkio:/\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            "sys/fs/cgroup/memory/job/memory.limit_in_bytes": "5000000\n",
            "sys/fs/cgroup/memory/job/memory.usage_in_bytes": "4000000\n",
            "sys/fs/cgroup/cpu/job/cpu.cfs_quota_us": "-1\n",
            "sys/fs/cgroup/cpu/job/cpu.cfs_period_us": "100000\n",
            "sys/fs/cgroup/blkio/blkio.throttle.write_bps_device": "8:0 77\n8:16 5\n",
            "sys/fs/cgroup/blkio/blkio.throttle.write_iops_device": "8:0 9\n",
        },
    )
    assert machine.cgroup_limits("8:0", tmp_path / "proc", tmp_path / "sys") == {
        "memory_bytes": 5_000_000,
        "memory_high_bytes": None,
        "memory_used_bytes": 4_000_000,
        "cpus": None,
        "write_bytes_per_s": 77,
        "writes_per_s": 9,
    }


def test_machine_that_tells_nothing_gives_a_report_with_gaps(tmp_path: Path) -> None:
    assert machine.cpu(tmp_path)["best_flush"] is None
    assert set(machine.cgroup_limits(None, tmp_path, tmp_path).values()) == {None}


# --- advice


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict:
    """A report on a slow ordinary disk without limits."""
    found = diagnose(tmp_path_factory.mktemp("plain"))
    found["level"] = {"possible": "process", "is_probed": True, "why_not_higher": {"power": "no"}}
    found["medium"] |= {
        "medium": "block", "file_system": "ext4", "mounted_as": "ext4", "mount_options": [],
        "is_network": False, "is_copy_on_write": False, "disk_model": None, "free_bytes": 1 << 40,
    }  # fmt: skip
    found["speed"] = {"sync_p50_ms": 4.0}
    found["memory"]["total_bytes"] = 24 << 30
    found["memory"]["dirty"] |= {
        "write_back_from_bytes": 16 << 30, "writers_wait_from_bytes": 18 << 30,
    }  # fmt: skip
    found["memory"]["cgroup"] = dict.fromkeys(found["memory"]["cgroup"])
    return found


def test_ordinary_disk_needs_few_words(plain: dict) -> None:
    first, second = advise(plain)
    assert "kill -9" in first
    assert "spot machine" in second


@pytest.mark.parametrize(
    ("part", "values", "expected"),
    [
        ("medium", {"medium": "tmpfs", "mounted_as": "tmpfs"}, "tmpfs is memory"),
        ("medium", {"is_network": True, "mounted_as": "nfs4"}, "nfs4 is a network file system"),
        ("medium", {"is_copy_on_write": True, "mounted_as": "btrfs"}, "btrfs is a copy-on-write"),
        ("medium", {"mounted_as": "overlay"}, "lost with the container"),
        ("medium", {"mount_options": ["ro"]}, "mounted read only"),
        ("medium", {"mount_options": ["nobarrier"]}, "without barriers"),
        ("medium", {"disk_model": "Amazon EC2 NVMe Instance Storage"}, "lost with a spot machine"),
        ("medium", {"disk_model": "nvme_card-pd"}, "'nvme_card-pd', a network block volume"),
        ("medium", {"free_bytes": 1 << 20}, "only 1048576 bytes are free"),
        ("speed", {"sync_p50_ms": 0.09}, "a sync took 0.09 ms"),
        ("level", {"possible": "power"}, "--durability power"),
        ("level", {"possible": None}, "no pool can be made here"),
    ],
)
def test_advice_names_what_matters(plain: dict, part: str, values: dict, expected: str) -> None:
    changed = copy.deepcopy(plain)
    changed[part] |= values
    assert any(expected in text for text in advise(changed))


@pytest.mark.parametrize(
    ("part", "name", "value", "expected"),
    [
        ("dirty", "write_back_from_bytes", 2 << 30, "once about 10737418240 bytes of tables"),
        ("cgroup", "memory_bytes", 5, "the control group allows 5 bytes"),
        ("cgroup", "writes_per_s", 5, "limits writes to this disk"),
    ],
)
def test_limits_are_explained(plain: dict, part: str, name: str, value: int, expected: str) -> None:
    changed = copy.deepcopy(plain)
    changed["memory"][part][name] = value
    assert any(expected in text for text in advise(changed))


# --- the command


def test_text_and_json_tell_the_same(tmpfs_folder: Path) -> None:
    shown, as_json = run(str(tmpfs_folder)), run(str(tmpfs_folder), "--json")
    assert shown.exit_code == as_json.exit_code == 0
    found = json.loads(as_json.stdout)
    lines = [line.split(maxsplit=1) for line in shown.stdout.splitlines()]
    assert ["possible", found["level"]["possible"]] in lines
    assert ["kernel", found["versions"]["kernel"]] in lines
    for text in found["advice"]:
        assert f"  - {text}\n" in shown.stdout


def test_report_names_no_machine_and_no_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is pasted into public bug reports."""
    real = os.uname()
    faked = SimpleNamespace(
        sysname=real.sysname, nodename="secret-host", release=real.release, machine=real.machine
    )
    monkeypatch.setattr(machine.os, "uname", lambda: faked)
    monkeypatch.setenv("USER", "secret-user")
    home = tmp_path / "home-of-secret-user"
    home.mkdir()
    make_pool(home / "a.pool").close()
    monkeypatch.chdir(home)
    for path in (".", "new.pool", "a.pool"):
        for options in ([], ["--json"]):
            output = run(path, *options).stdout
            assert "secret" not in output
            assert str(tmp_path) not in output
            assert path in output


def test_torch_is_not_imported(tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "from trainingcxl.cli import main\n"
        "try:\n"
        "    main(['doctor', sys.argv[1], '--json'])\n"
        "except SystemExit as end:\n"
        "    assert end.code == 0\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout)["versions"]["torch"]
