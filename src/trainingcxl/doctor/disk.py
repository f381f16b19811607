"""Facts about the medium below a path, read from the kernel; nothing is written here."""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainingcxl.doctor.machine import PROC, SYS
from trainingcxl.errors import PoolError
from trainingcxl.pool.write_back import read_text

__all__ = ["Mount", "block_device", "dax_device", "mount_of", "persistence_domains", "space"]

# What a mount option says about durability or speed. Others may hold paths, hosts and users.
_OPTIONS = (
    "ro", "sync", "dax", "dax=always", "dax=inode", "dax=never", "barrier=0", "nobarrier",
    "data=ordered", "data=journal", "data=writeback", "noatime", "relatime", "discard",
    "nodatacow", "huge=always", "huge=within_size", "huge=advise", "huge=never",
)  # fmt: skip


# Kernel names of file systems; every fuse.NAME counts as a network, as its server may be anywhere.
_NETWORKS = ("nfs", "nfs4", "cifs", "smb3", "9p", "ceph", "lustre", "gpfs", "afs", "virtiofs")
_COPY_ON_WRITE = ("btrfs", "zfs", "bcachefs", "f2fs")


@dataclass(frozen=True, slots=True)
class Mount:
    """The mount that a folder belongs to.

    Attributes:
        device: "major:minor" of the file system.
        type: The kernel's name of the file system; None where the mount is not listed.
        options: Those of its options that matter here.
    """

    device: str
    type: str | None = None
    options: list[str] = field(default_factory=list)

    @property
    def is_network(self) -> bool:
        """Whether the bytes lie on another machine, or may."""
        return self.type in _NETWORKS or (self.type or "").startswith("fuse")

    @property
    def is_copy_on_write(self) -> bool:
        """Whether nothing is ever written in place."""
        return self.type in _COPY_ON_WRITE


def mount_of(folder: Path, proc: Path = PROC) -> Mount:
    """Find the mount of a folder; its source and its place, which may hold names, are not kept.

    The device number decides, then the longest mount point above the folder: the numbers of btrfs
    are not those of its mounts.
    """
    number = folder.stat().st_dev
    device = f"{os.major(number)}:{os.minor(number)}"
    here = f"{folder.resolve()}/"
    best: tuple[tuple[bool, int], str, list[str]] | None = None
    for line in (read_text(proc / "self/mountinfo") or "").splitlines():
        left, _, right = line.partition(" - ")
        fields, kind = left.split(), right.split()
        if len(fields) < 6 or not kind:
            continue
        point = fields[4].replace("\\040", " ").rstrip("/") + "/"
        rank = (fields[2] == device, len(point) if here.startswith(point) else 0)
        if rank > (False, 0) and (best is None or rank >= best[0]):
            best = rank, kind[0], [*fields[5].split(","), *kind[-1].split(",")]
    if best is None:
        return Mount(device)
    return Mount(device, best[1], [name for name in _OPTIONS if name in best[2]])


def space(folder: Path) -> dict[str, int]:
    """Return bytes of the file system: all, and what this user may still fill."""
    found = os.statvfs(folder)
    return {
        "free_bytes": found.f_bavail * found.f_frsize,
        "total_bytes": found.f_blocks * found.f_frsize,
    }


def block_device(device: str, sys: Path = SYS) -> dict[str, Any] | None:
    """Return what the kernel says about the disk below a file system.

    Args:
        device: "major:minor" of the file system.
        sys: Root of /sys.

    Returns:
        disk ("major:minor" of the whole disk), model, is_rotational, write_cache; None where the
        file system has no block device of its own (tmpfs, network, btrfs, overlays).
    """
    folder = sys / "dev/block" / device
    if not folder.exists():
        return None
    folder = folder.resolve()
    if (folder / "partition").exists():
        folder = folder.parent
    rotational = read_text(folder / "queue/rotational")
    return {
        "disk": read_text(folder / "dev") or device,
        "model": read_text(folder / "device/model"),
        "is_rotational": None if rotational is None else rotational == "1",
        "write_cache": read_text(folder / "queue/write_cache"),
    }


def dax_device(path: Path, sys: Path = SYS) -> dict[str, Any]:
    """Return size, alignment and NUMA node of a DAX device.

    Raises:
        PoolError: It is a character device of another kind.
    """
    folder = sys / "bus/dax/devices" / path.name
    size = read_text(folder / "size")
    if size is None or not size.isdecimal():
        raise PoolError(
            f"'{path}' is a character device, but no DAX device: '{folder}' does not exist\n"
            "  do:    name /dev/daxX.Y, a folder or a pool; 'ndctl create-namespace -m devdax' "
            "makes DAX devices of persistent memory"
        )
    align, node = read_text(folder / "align"), read_text(folder / "target_node")
    return {
        "total_bytes": int(size),
        "align_bytes": int(align) if align and align.isdecimal() else None,
        "numa_node": int(node) if node and node.isdecimal() else None,
    }


def persistence_domains(sys: Path = SYS) -> list[str]:
    """Return how far stores must get to survive a power loss, for each region of persistent memory.

    memory_controller: caches are lost, lines must be flushed; cpu_cache: caches survive.
    """
    files = sorted((sys / "bus/nd/devices").glob("region*/persistence_domain"))
    return [text for file in files if (text := read_text(file)) is not None]
