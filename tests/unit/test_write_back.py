"""When the kernel writes changed pages back, and who is told of it."""

from pathlib import Path

from trainingcxl.pool import write_back


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def test_dirty_bytes_win_over_ratios(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "sys/vm/dirty_background_ratio": "10",
            "sys/vm/dirty_ratio": "0",
            "sys/vm/dirty_background_bytes": "0",
            "sys/vm/dirty_bytes": "1048576",
            "sys/vm/dirty_expire_centisecs": "3000",
        },
    )
    found = write_back.dirty_limits(1 << 30, tmp_path)
    assert found["write_back_from_bytes"] == (1 << 30) // 10
    assert found["writers_wait_from_bytes"] == 1 << 20
    assert found["written_after_s"] == 30
    assert found["dirty_writeback_centisecs"] is None
    assert write_back.dirty_limits(None, tmp_path)["write_back_from_bytes"] is None


def test_tables_beyond_the_limits_of_write_back_get_a_notice(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "meminfo": "MemTotal: 9000000 kB\nMemAvailable: 8000000 kB\n",
            "sys/vm/dirty_background_ratio": "10",
            "sys/vm/dirty_ratio": "20",
        },
    )
    unhurried = (8_000_000 << 10) * 15 // 100
    assert write_back.write_back_notice(unhurried, tmp_path) is None
    told = write_back.write_back_notice(unhurried + 10**8, tmp_path)
    assert told is not None
    assert "1.3 GB; once about 1.2 GB" in told
    assert write_back.SETTING in told


def test_a_machine_that_tells_nothing_gets_no_notice(tmp_path: Path) -> None:
    assert write_back.memory(tmp_path) == {"total_bytes": None, "available_bytes": None}
    assert write_back.write_back_notice(1 << 60, tmp_path) is None
