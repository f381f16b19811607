"""System calls that fail, in the real core (faults: section "Faults" of docs/durability.md).

A library loaded before libc breaks the k-th call on a named file; the trainer's rows are compared
with a trainer in NumPy at each recovery point, and its digest with that of an undisturbed training.
`block` is forced on tmpfs: the code and its calls are those of an ordinary file.
"""

import errno
import os
import signal
from pathlib import Path
from typing import Any

import pytest

_ALWAYS = 1 << 40


def _is_undisturbed(report: dict[str, Any]) -> None:
    assert report["same"], report
    assert report["same_end"], report
    assert report["same_digest"], report
    assert report["damage"] == 0, report


def _says(report: dict[str, Any], *words: str) -> None:
    for word in (*words, "do:"):
        assert word in report["error"], report["error"]


# --- failed syncs: power on a file


@pytest.mark.parametrize("reboot", [False, True])
@pytest.mark.parametrize(
    ("call", "file", "first"),
    [
        *(("fdatasync", "/journal", k) for k in (1, 2, 3, 8)),
        ("fdatasync", "/data", 1),
        *(("msync", "/log", k) for k in (1, 2, 7)),
    ],
)
def test_failed_sync_of_a_journalled_pool(
    ask_faulty: Any, tmpfs_folder: Path, call: str, file: str, first: int, reboot: bool
) -> None:
    """EIO once: no sync is tried again, nothing commits, nothing later is called durable; the next
    opening, in this life of the machine or another, finds what was.
    """
    report = ask_faulty(
        "failed_sync",
        folder=str(tmpfs_folder),
        level="power",
        rule={"call": call, "file": file, "first": first},
        reboot=reboot,
    )
    _says(report, f"broken.pool{file}", "Input/output error", "open the pool again")
    assert report["calls_after"] == 0
    assert report["commits_after"] == 0
    assert "Input/output error" in report["next"]["error"]
    assert not report["clean"]
    assert report["inspected"] <= report["durable"] <= report["found"], report
    _is_undisturbed(report)


def test_failed_sync_that_nobody_was_told_of(ask_faulty: Any, tmpfs_folder: Path) -> None:
    """The last batch's sync fails in the background: the close says so."""
    rule = {"call": "fdatasync", "file": "/journal"}
    report = ask_faulty(
        "failed_sync", folder=str(tmpfs_folder), level="power", rule=rule, at="background"
    )
    _says(report, "broken.pool/journal", "Input/output error")
    assert report["calls_after"] == 0
    assert not report["clean"]
    assert report["inspected"] <= report["durable"] <= report["found"], report
    _is_undisturbed(report)


def test_failed_sync_of_a_slot_of_the_journal(ask_faulty: Any, tmpfs_folder: Path) -> None:
    """The ring is not used again before its slot is durable."""
    rule = {"call": "fdatasync", "file": "/journal", "first": 2, "after_slot": True}
    report = ask_faulty("failed_sync", folder=str(tmpfs_folder), level="power", rule=rule)
    _says(report, "broken.pool/journal", "Input/output error")
    assert report["calls_after"] == 0
    assert 0 < report["inspected"] <= report["durable"] <= report["found"], report
    _is_undisturbed(report)


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC])
def test_failed_write_of_a_frame(ask_faulty: Any, tmpfs_folder: Path, error: int) -> None:
    """A frame that was not written is a batch that is not durable, as one that was not synced."""
    rule = {"call": "pwrite", "file": "/journal", "first": 30, "error": error}
    report = ask_faulty("failed_sync", folder=str(tmpfs_folder), level="power", rule=rule)
    _says(report, "broken.pool/journal")
    assert report["calls_after"] == 0
    assert report["durable"] <= report["found"], report
    _is_undisturbed(report)


# --- failed syncs: process


@pytest.mark.parametrize("at", ["sync", "close"])
@pytest.mark.parametrize(("file", "first"), [("/data", 1), ("/log", 1), ("/data", 2), ("/log", 2)])
def test_failed_sync_of_a_pool_of_level_process(
    ask_faulty: Any, tmpfs_folder: Path, at: str, file: str, first: int
) -> None:
    """run.sync() or a close fails: said, and the pool is not marked closed."""
    report = ask_faulty(
        "failed_sync",
        folder=str(tmpfs_folder),
        level="process",
        rule={"call": "fdatasync", "file": file, "first": first},
        at=at,
    )
    _says(report, f"broken.pool{file}", "Input/output error", "open the pool again")
    assert report["errno"] == errno.EIO
    assert report["calls_after"] == 0
    assert not report["clean"]
    assert report["inspected"] is None
    assert report["durable"] <= report["found"]
    _is_undisturbed(report)


def test_after_a_failed_sync_everything_is_written_again(
    ask_faulty: Any, tmpfs_folder: Path
) -> None:
    """The kernel calls pages clean that it could not write: a sync that then succeeds says nothing.

    Seen on ext4: the second fdatasync after EIO returns 0 while the disk holds the old bytes. A
    pool closed after it would be taken for durable.
    """
    report = ask_faulty("written_again", folder=str(tmpfs_folder))
    assert report["broken"] >= report["bytes"] > 2 * report["undisturbed"], report
    assert report["notices"] == 1


# --- creation and growth


@pytest.mark.parametrize(
    ("level", "call", "file", "error"),
    [
        ("process", "fallocate", "/log", errno.ENOSPC),
        ("process", "fallocate", "/data", errno.EDQUOT),
        ("process", "msync", "/log", errno.EIO),
        ("power", "fallocate", "/log", errno.ENOSPC),
        ("power", "fallocate", "/journal", errno.ENOSPC),
        ("power", "fsync", "/log", errno.EIO),
        ("power", "fsync", "/data", errno.EIO),
        ("power", "fsync", "/new.pool", errno.EIO),
        ("power", "mmap", "/log", errno.ENOMEM),
    ],
)
def test_failed_creation(
    ask_faulty: Any, tmpfs_folder: Path, level: str, call: str, file: str, error: int
) -> None:
    """Nothing is left behind, and the same command creates the pool once it can."""
    report = ask_faulty(
        "failed_creation",
        folder=str(tmpfs_folder),
        level=level,
        rule={"call": call, "file": file, "error": error},
    )
    assert report["kind"] == ("OSError" if error in (errno.EIO, errno.ENOMEM) else "PoolFull")
    assert report["left"] == []
    assert not report["folder"]
    _is_undisturbed(report)


@pytest.mark.parametrize(
    ("call", "file", "first"),
    [
        ("fdatasync", "/journal", 1),
        ("fdatasync", "/data", 1),
        ("fsync", "/data", 2),
        ("fsync", "/log", 2),
        ("msync", "/log", 2),
        ("msync", "/log", 4),
    ],
)
def test_failed_sync_before_batch_0_is_durable(
    ask_faulty: Any, tmpfs_folder: Path, call: str, file: str, first: int
) -> None:
    """The pool was never there, or it is there at batch 0: both begin the same training."""
    report = ask_faulty(
        "failed_creation",
        folder=str(tmpfs_folder),
        level="power",
        rule={"call": call, "file": file, "first": first},
    )
    _says(report, f"new.pool{file}", "Input/output error")
    _is_undisturbed(report)


@pytest.mark.parametrize("goes_on", [False, True])
@pytest.mark.parametrize(
    ("level", "call", "file"),
    [
        ("process", "fallocate", "/log"),
        ("power", "fallocate", "/log"),
        ("power", "fallocate", "/journal"),
        ("power", "pwrite", "/journal"),
    ],
)
def test_no_room_to_grow(
    ask_faulty: Any, tmpfs_folder: Path, level: str, call: str, file: str, goes_on: bool
) -> None:
    """Undo log and journal get their rings with the first batch: refused before any change; the
    trainer may skip it, or stop and come back.
    """
    report = ask_faulty(
        "failed_growth",
        folder=str(tmpfs_folder),
        level=level,
        rule={"call": call, "file": file, "error": errno.ENOSPC},
        goes_on=goes_on,
    )
    assert report["kind"] == "PoolFull", report
    _says(report, f"small.pool{file}", "needs", "free")
    assert report["unchanged"]
    assert report["committed"] == 0
    if goes_on:
        assert report["skipped"] == 1
    else:
        _is_undisturbed(report)


@pytest.mark.parametrize(
    ("call", "file", "error"),
    [
        ("fallocate", "/copy/log", errno.ENOSPC),
        ("pwrite", "/copy/data", errno.ENOSPC),
        ("fdatasync", "/copy/data", errno.EIO),
        ("fdatasync", "/copy/log", errno.EIO),
        ("fsync", "/copy", errno.EIO),
    ],
)
def test_failed_snapshot(ask_faulty: Any, tmp_path: Path, call: str, file: str, error: int) -> None:
    """The snapshot fails and leaves nothing; the training does not notice."""
    report = ask_faulty(
        "failed_snapshot",
        folder=str(tmp_path),
        rule={"call": call, "file": file, "error": error},
    )
    assert report["kind"] == ("PoolFull" if error == errno.ENOSPC else "OSError"), report
    assert not report["left"]
    assert report["same_end"]
    assert report["same_digest"]
    assert report["same_copy"]


# --- calls that are continued


@pytest.mark.parametrize("reboot", [False, True])
def test_interrupted_and_partial_calls_are_continued(
    ask_faulty: Any, tmpfs_folder: Path, reboot: bool
) -> None:
    """EINTR and short counts are no errors: every batch is durable, and read back."""
    interrupted = {"error": errno.EINTR, "last": 3}
    rules = [
        {"call": "pwrite", "file": "/journal", "error": 0, "only": 5000, "last": _ALWAYS},
        {"call": "pread", "file": "/journal", "error": 0, "only": 3000, "last": _ALWAYS},
        {"call": "fdatasync", "file": "/journal", **interrupted},
        {"call": "fdatasync", "file": "/data", **interrupted},
        {"call": "fsync", "file": "/data", **interrupted},
        {"call": "msync", "file": "/log", **interrupted},
        {"call": "fallocate", "file": "/log", **interrupted},
        {"call": "fallocate", "file": "/journal", **interrupted},
    ]
    report = ask_faulty(
        "continued", folder=str(tmpfs_folder), level="power", rules=rules, reboot=reboot
    )
    assert min(report["seen"]) > 3, report["seen"]
    assert report["found"] >= 30
    _is_undisturbed(report)


def test_journal_goes_on_through_the_page_cache_where_direct_writes_are_refused(
    ask_faulty: Any, tmpfs_folder: Path
) -> None:
    """A file system may take O_DIRECT at the opening and refuse a write."""
    try:
        os.close(os.open(tmpfs_folder / "probe", os.O_WRONLY | os.O_CREAT | os.O_DIRECT))
    except OSError:
        return  # refused at the opening: then every other test is of this
    rule = {"call": "pwrite", "file": "/journal", "error": errno.EINVAL, "first": 1, "last": 1}
    report = ask_faulty(
        "continued", folder=str(tmpfs_folder), level="power", rules=[rule], reboot=True
    )
    assert report["seen"][0] > 3, report["seen"]
    assert report["found"] >= 30
    _is_undisturbed(report)


@pytest.mark.parametrize(
    "rule",
    [
        {"call": "pread", "file": "/journal", "first": 1},
        {"call": "pread", "file": "/journal", "first": 9},
        {"call": "fdatasync", "file": "/data", "first": 1},
        {"call": "fdatasync", "file": "/log", "first": 1},
        {"call": "fdatasync", "file": "/journal", "first": 1},
        {"call": "msync", "file": "/log", "first": 1},
    ],
)
def test_fault_in_recovery(ask_faulty: Any, tmpfs_folder: Path, rule: dict[str, Any]) -> None:
    """Said, and the evidence stays: the next recovery finds the same point."""
    report = ask_faulty("failed_recovery", folder=str(tmpfs_folder), rule=rule)
    assert report["errno"] == errno.EIO, report
    assert f"copy.pool{rule['file']}" in report["error"]
    assert report["found"] >= 30
    _is_undisturbed(report)


# --- bus errors


@pytest.mark.parametrize("read_only", [False, True])
@pytest.mark.parametrize("handler", ["", "faulthandler", "python"])
def test_file_cut_under_an_open_pool(
    ask_faulty: Any, tmpfs_folder: Path, handler: str, read_only: bool
) -> None:
    """The process ends by SIGBUS as ever, but says which file and where; whoever handled the
    signal before is called after that.
    """
    report = ask_faulty(
        "bus_error",
        folder=str(tmpfs_folder),
        file="data",
        keep=4096,
        handler=handler,
        read_only=read_only,
    )
    assert report["signal"] == signal.SIGBUS, report
    said = report["said"]
    assert said.count("trainingcxl: bus error at byte ") == 1, report
    offset = int(said.partition("at byte ")[2].split()[0])
    assert 4096 <= offset < 6 << 20
    assert "cut.pool/data'" in said
    assert "trainingcxl verify" in said
    assert ("Fatal Python error: Bus error" in said) == (handler == "faulthandler")


def test_log_cut_under_an_open_pool(ask_faulty: Any, tmpfs_folder: Path) -> None:
    report = ask_faulty(
        "bus_error",
        folder=str(tmpfs_folder), file="log", keep=0, handler="", read_only=False,
    )  # fmt: skip
    assert report["signal"] == signal.SIGBUS
    assert "cut.pool/log'" in report["said"]


@pytest.mark.parametrize("file", ["other", "kill"])
@pytest.mark.parametrize("handler", ["", "faulthandler"])
def test_bus_errors_of_others_are_not_explained(
    ask_faulty: Any, tmpfs_folder: Path, file: str, handler: str
) -> None:
    report = ask_faulty(
        "bus_error",
        folder=str(tmpfs_folder), file=file, keep=0, handler=handler, read_only=False,
    )  # fmt: skip
    assert report["signal"] == signal.SIGBUS
    assert "trainingcxl" not in report["said"].replace("trainingcxl/", "")
    assert ("Fatal Python error: Bus error" in report["said"]) == (handler == "faulthandler")
