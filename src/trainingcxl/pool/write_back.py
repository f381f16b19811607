"""When the kernel writes changed pages of a mapped file back, and when a training waits for that.

A store to a clean page of an ordinary file makes it dirty; beyond the limits of vm.dirty_* the next
such store waits until others are written. Where a batch changes rows all over tables that are
larger than these limits, steps take seconds instead of milliseconds (docs/performance.md, "Long
runs on a disk").
"""

from collections.abc import Mapping
from pathlib import Path

__all__ = [
    "SETTING",
    "dirty_limits",
    "memory",
    "read_number",
    "read_text",
    "unhurried_bytes",
    "write_back_notice",
]

PROC = Path("/proc")
SETTING = "vm.dirty_background_ratio=80 vm.dirty_ratio=90 vm.dirty_expire_centisecs=360000"
"""For sysctl: changed pages stay in memory as long as they fit. What a process kill leaves is the
same; what a power loss takes is more, of other programs' files, too.
"""


def read_text(path: Path) -> str | None:
    """Return a small file's text, stripped; None if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None


def read_number(path: Path) -> int | None:
    """Return the whole number in a small file; None if there is none."""
    text = read_text(path)
    return int(text) if text is not None and text.isdecimal() else None


def memory(proc: Path = PROC) -> dict[str, int | None]:
    """Return bytes of memory: all, and what can be had without swapping."""
    fields = {}
    for line in (read_text(proc / "meminfo") or "").splitlines():
        key, _, value = line.partition(":")
        fields[key] = value.split()
    return {
        name: int(fields[key][0]) << 10 if key in fields else None
        for name, key in (("total_bytes", "MemTotal"), ("available_bytes", "MemAvailable"))
    }


def dirty_limits(available_bytes: int | None, proc: Path = PROC) -> dict[str, int | float | None]:
    """Return when the kernel writes changed pages back (vm.dirty_*).

    Args:
        available_bytes: Memory that the ratios are taken of.
        proc: Root of /proc.

    Returns:
        The sysctls by name, and what they come to: bytes from which write-back starts, bytes from
        which writers wait for it, and seconds after which a changed page is written in any case.
    """
    names = (
        "dirty_background_ratio", "dirty_ratio", "dirty_background_bytes", "dirty_bytes",
        "dirty_expire_centisecs", "dirty_writeback_centisecs",
    )  # fmt: skip
    found: dict[str, int | float | None] = {
        name: read_number(proc / "sys/vm" / name) for name in names
    }

    def threshold(kind: str) -> int | None:
        bytes_set, ratio = found[f"{kind}bytes"], found[f"{kind}ratio"]
        if bytes_set:
            return int(bytes_set)
        if ratio is None or available_bytes is None:
            return None
        return int(available_bytes * ratio / 100)

    expire = found["dirty_expire_centisecs"]
    return {
        **found,
        "write_back_from_bytes": threshold("dirty_background_"),
        "writers_wait_from_bytes": threshold("dirty_"),
        "written_after_s": None if expire is None else expire / 100,
    }


def unhurried_bytes(dirty: Mapping[str, int | float | None]) -> int | None:
    """Return bytes that may be changed and unwritten before the kernel slows writers down: half
    way between the two limits. None where it does not tell.
    """
    begins, waits = dirty["write_back_from_bytes"], dirty["writers_wait_from_bytes"]
    return None if begins is None or waits is None else int(begins + waits) // 2


def write_back_notice(table_bytes: int, proc: Path = PROC) -> str | None:
    """Return what to tell who trains tables of so many bytes in a file; None for nothing."""
    unhurried = unhurried_bytes(dirty_limits(memory(proc)["available_bytes"], proc))
    if unhurried is None or table_bytes <= unhurried:
        return None
    return (
        f"the tables have {table_bytes / 1e9:.1f} GB; once about {unhurried / 1e9:.1f} GB of them "
        f"are changed and not yet on the disk, steps wait for it, for seconds. As root: 'sysctl "
        f"{SETTING}', or put the pool on tmpfs (docs/performance.md, 'Long runs on a disk')"
    )
