"""Opening a pool: what may be asked for, and what a user should know about what was found."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainingcxl.errors import DurabilityUnavailable

__all__ = ["check_lookup", "check_options", "notices_of"]


def check_options(
    path: str | os.PathLike[str],
    resume: str,
    lookahead: int,
    lookup: str,
    undo_log: str,
    threads: int | None,
    lag_max: int,
    keep_dense: int | str,
) -> None:
    """Refuses options of `Pool` that cannot be.

    Raises:
        ValueError: Names the option, its value and what is expected.
    """
    if resume not in ("exact", "latest"):
        raise ValueError(f"resume is '{resume}', expected 'exact' or 'latest'")
    if Path(path).is_char_device():
        raise ValueError(f"'{path}' is a device: pass a folder as path and device='{path}'")
    if not 1 <= lookahead <= 8:
        raise ValueError(f"lookahead is {lookahead}, expected 1 to 8")
    if lookup not in ("strict", "relaxed"):
        raise ValueError(f"lookup is '{lookup}', expected 'strict' or 'relaxed'")
    if undo_log not in ("auto", "background", "fused"):
        raise ValueError(f"undo_log is '{undo_log}', expected 'auto', 'background' or 'fused'")
    if threads is not None and threads < 1:
        raise ValueError(f"threads is {threads}, expected 1 or more")
    if keep_dense != "auto" and not (isinstance(keep_dense, int) and 0 <= keep_dense <= 14):
        raise ValueError(f"keep_dense is {keep_dense!r}, expected 'auto' or 0 to 14")
    if lag_max < 1:
        raise ValueError(f"lag_max is {lag_max}, expected 1 or more")


def check_lookup(path: Path, lookup: str, found: Mapping[str, Any]) -> None:
    """Refuses relaxed lookups where the rows before a batch do not survive what the pool does.

    Raises:
        DurabilityUnavailable: Level "power" on an ordinary file.
    """
    if lookup == "relaxed" and found["has_journal"]:
        raise DurabilityUnavailable(
            "lookup is 'relaxed', which a power failure on an ordinary file would not survive bit "
            "for bit: its journal does not keep the rows as they were before the last batch\n"
            f"  where: pool '{path}', level power on {found['medium']}\n"
            "  state: the pool is unchanged\n"
            "  do:    lookup='strict', level 'process', or persistent memory"
        )


def notices_of(found: Mapping[str, Any]) -> list[str]:
    """What a user should know about this medium, and about how the pool was found."""
    notices = [found["creation_note"]] if found["creation_note"] else []
    if found["had_failed_sync"]:
        notices.append(
            "a sync failed when this pool was open last: all of it is written again now; look at "
            "the medium and the kernel's log"
        )
    system = found["file_system"]
    if found["is_network"]:
        notices.append(
            f"the pool lies on {system}, a network file system: a kill is survived, but only "
            "this machine may use it"
        )
    if found["is_copy_on_write"]:
        notices.append(
            f"the pool lies on {system}, a copy-on-write file system: in-place updates cost "
            "extra writes there; "
            "ext4, xfs or 'chattr +C' on the pool's folder avoid them"
        )
    return notices
