"""What the facts of a report mean for somebody who trains there."""

from collections.abc import Iterator
from typing import Any

from trainingcxl.pool.write_back import SETTING, unhurried_bytes

__all__ = ["advise"]

_GIB = 1 << 30
_SYNC_MS_OF_DISKS = 0.2
_SHARE_UNWRITTEN = 0.6  # of the memory: then the limits have been raised
# Models of disks that clouds give to one instance and take back with it.
_LOCAL_DISKS = ("Instance Storage", "nvme_card", "EphemeralDisk", "NVMe Direct Disk")
_NETWORK_DISKS = ("Elastic Block Store", "nvme_card-pd", "PersistentDisk")


def advise(report: dict[str, Any]) -> list[str]:
    """Return one sentence or two for each thing a user should know or do, the gravest first."""
    return [
        *_advise_level(report["level"]),
        *_advise_place(report["medium"]),
        *_advise_syncs(report["medium"], report["speed"]),
        *_advise_limits(report),
        *_advise_pool(report.get("pool")),
    ]


def _advise_level(level: dict[str, Any]) -> Iterator[str]:
    if not level["is_probed"]:
        yield "no level was tried: name a folder on this file system that is not a pool itself"
    elif level["possible"] is None:
        yield "no pool can be made here: see why_not_higher, and choose another folder"
    elif level["possible"] == "process":
        yield (
            "kill -9, exceptions and preemption of the process lose nothing here. A power loss or "
            "kernel crash while a pool is open does: the pool is then refused on the next open "
            "(trust_after_reboot opens it after an orderly shutdown)"
        )
    else:
        yield "ask for the level: trainingcxl train --durability power (process is the default)"


def _advise_place(medium: dict[str, Any]) -> Iterator[str]:
    """Where a pool may live, on a spot machine above all."""
    name = medium["mounted_as"] or medium["file_system"] or "this file system"
    if "ro" in medium["mount_options"]:
        yield f"{name} is mounted read only: no pool can be made or trained here"
    if medium["medium"] == "tmpfs" or name in ("tmpfs", "ramfs", "hugetlbfs"):
        yield (
            f"{name} is memory: a pool here is lost with the machine, a restart included. On a "
            "spot machine put it on a disk that outlives the instance"
        )
    elif medium["is_network"]:
        yield (
            f"{name} is a network file system: one machine at a time may use the pool, syncs cost "
            "a round trip, and what this machine had not written back is lost with it"
        )
    elif name == "overlay":
        yield (
            "this is the writable layer of a container: a pool here is lost with the container. "
            "Mount a volume and put the pool there"
        )
    elif medium["medium"] == "block":
        yield from _advise_disk(medium["disk_model"] or "")
    if medium["is_copy_on_write"]:
        yield (
            f"{name} is a copy-on-write file system: rows updated in place are written elsewhere "
            "each time. ext4 or xfs avoid that; on btrfs 'chattr +C' on the empty folder does"
        )
    if {"nobarrier", "barrier=0"} & set(medium["mount_options"]):
        yield (
            "the file system is mounted without barriers: fdatasync does not reach the disk, so "
            "that nothing survives a power loss for certain. Mount it with barriers"
        )


def _advise_disk(model: str) -> Iterator[str]:
    outlives = "a network block volume does, a disk inside the instance does not"
    if any(known in model for known in _NETWORK_DISKS):
        yield (
            f"the disk calls itself '{model}', a network block volume: it outlives a spot "
            "instance if it is not set to be deleted with it"
        )
    elif any(known in model for known in _LOCAL_DISKS):
        yield (
            f"the disk calls itself '{model}', a disk inside the instance: it is lost with a spot "
            f"machine. Put the pool on a disk that outlives it; {outlives}"
        )
    else:
        yield f"on a spot machine the pool must lie on a disk that outlives it: {outlives}"


def _advise_syncs(medium: dict[str, Any], speed: dict[str, Any]) -> Iterator[str]:
    took = speed.get("sync_p50_ms")
    if medium["medium"] == "block" and took is not None and took < _SYNC_MS_OF_DISKS:
        yield (
            f"a sync took {took} ms, less than a disk needs to write. Either its cache survives a "
            "power loss, or something below (a virtual machine's host, say) does not pass flushes "
            "on: then no program's syncs survive a power loss there"
        )


def _advise_limits(report: dict[str, Any]) -> Iterator[str]:
    free, dirty = report["medium"]["free_bytes"], report["memory"]["dirty"]
    if free is not None and free < _GIB:
        yield (
            f"only {free} bytes are free. A pool takes rows x dim x 4 bytes, again the optimizer's "
            "state (adagrad as much, rowwise-adagrad 4 a row), and an undo log of some batches"
        )
    group = report["memory"]["cgroup"]
    if group["memory_bytes"] is not None:
        yield (
            f"the control group allows {group['memory_bytes']} bytes of memory, page cache "
            "included: tables and log beyond that are written back and read again while training"
        )
    unhurried, total = unhurried_bytes(dirty), report["memory"]["total_bytes"]
    is_raised = unhurried is None or unhurried >= _SHARE_UNWRITTEN * (total or 0)
    if report["medium"]["medium"] == "block" and not is_raised:
        yield (
            f"steps wait for this disk, for seconds, once about {unhurried} bytes of tables are "
            "changed and not yet written (vm.dirty_*): for larger tables, as root: "
            f"sysctl {SETTING}; or a pool on tmpfs"
        )
    if (
        report["memory"]["cgroup"]["write_bytes_per_s"]
        or report["memory"]["cgroup"]["writes_per_s"]
    ):
        yield "the control group limits writes to this disk: syncs wait for that limit"


def _advise_pool(pool: dict[str, Any] | None) -> Iterator[str]:
    if pool is None:
        return
    if "unreadable" in pool:
        yield "the pool could not be read; 'trainingcxl verify' lists damage"
    elif not pool["clean"]:
        yield "the pool is open in a process, or its process died: the next open recovers it"
