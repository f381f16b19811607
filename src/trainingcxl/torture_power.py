"""Makes of a killed pool what a power failure would have left of it (level power, ordinary file).

A kill leaves every store in the page cache. A power failure leaves of each sector of the tables any
version that it had since the last sync, of the log what was synced and anything else elsewhere, and
of the journal all that was synced and any part of what was written since.
"""

import json
import random
import shutil
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from trainingcxl.pool import Pool

__all__ = ["PowerCut", "forget_versions", "is_in_transaction", "keep_version"]

_SECTOR = 512
_PAGE = 4096
# docs/format.md
_SLOT = struct.Struct("<8Q")  # magic, seq, life, base, ring offset, ring bytes, head, first lsn
_SLOT_MAGIC = 0x544C534A4C584354
_HEADER = struct.Struct("<8Q")  # magic, lsn, life, id, kind, batch, bytes, acked lsn
_FRAME_MAGIC = 0x4D52464A4C584354
_LOG_SESSION = 8192
_LOG_SLOTS = (12288, 2 * _PAGE)  # both commit slots
_LOG_RESUME = (64 << 10, 128 << 10)
_LOG_DIRECTORY = (256 << 10, 256 << 10)
_COMMIT_SLOTS = (12288, 16384)
_FLAGS, _FLAG_BYTES = 4096, 64


def keep_version(path: str, pool: Pool, *, starts_anew: bool) -> None:
    """Keeps the tables of the committed batch beside the pool; older ones go when a life starts."""
    folder = _folder(path)
    if starts_anew:
        forget_versions(path)
    folder.mkdir(exist_ok=True)
    arrays: dict[str, Any] = {}
    offsets = {}
    for raw, table in zip(pool.core.tables(), pool.tables.values(), strict=True):
        for column, array in (("weight", table.weight), ("state", table.state)):
            name = f"{table.name}.{column}"
            arrays[name] = array
            offsets[name] = raw[f"{column}_offset"]
    part = folder / "part"
    with part.open("wb") as file:
        np.savez(file, **arrays)
    if not (folder / "facts.json").exists():
        slot = _newest_slot(Path(path, "journal")) or {}
        facts = {"offsets": offsets, "life": slot.get("life")}
        (folder / "facts.part").write_text(json.dumps(facts))
        (folder / "facts.part").rename(folder / "facts.json")
    part.rename(folder / f"{pool.committed_batch}.npz")  # a kill must not leave half of it


def forget_versions(path: str) -> None:
    """Of another run in the same place."""
    shutil.rmtree(_folder(path), ignore_errors=True)


class PowerCut:
    """Turns the files of a killed pool into those after a power failure.

    Args:
        seed: Of the choice of what survives.
    """

    def __init__(self, seed: str) -> None:
        self._random = random.Random(seed)
        self._numpy = np.random.default_rng(abs(hash(seed)) % 2**32)

    def apply(self, path: str, point: str) -> None:
        """Changes the pool at `path`, whose process died at the crash point `point`."""
        journal = Path(path, "journal")
        slot = _newest_slot(journal)
        if slot is None:
            return
        if point == "journal: slot written" and self._random.random() < 0.5:
            _zero(journal, _PAGE * (slot["seq"] & 1), _PAGE)
            slot = _newest_slot(journal)
            if slot is None:
                return
        if point == "journal: frames written":
            self._lose_frames(journal, slot)
        log = Path(path, "log")
        if not _is_clean(log):  # else all was synced and nothing changed since
            self._mix_tables(path, slot)
            self._spoil_log(log)

    def _lose_frames(self, journal: Path, slot: Mapping[str, int]) -> None:
        """Any sector of the frames that wait for their sync may be missing."""
        frames = list(_frames(journal, slot))
        if not frames:
            return
        acked = frames[-1]["acked_lsn"]
        all_or_nothing = self._random.choice((None, None, 0.0, 1.0))
        share = self._random.random() if all_or_nothing is None else all_or_nothing
        with journal.open("r+b") as file:
            for frame in frames:
                if frame["lsn"] <= acked:
                    continue
                for at in range(frame["offset"], frame["offset"] + frame["bytes"], _SECTOR):
                    if self._random.random() < share:
                        file.seek(at)
                        file.write(bytes(_SECTOR))

    def _mix_tables(self, path: str, slot: Mapping[str, int]) -> None:
        folder = _folder(path)
        if not (folder / "facts.json").exists():
            return
        facts = json.loads((folder / "facts.json").read_text())
        versions = [f for f in folder.glob("*.npz") if int(f.stem) >= slot["base"]]
        if not versions or facts["life"] != slot["life"]:
            return  # of a life before the last opening, which synced everything
        offsets = facts["offsets"]
        kept = [dict(np.load(file)) for file in versions]
        share = self._random.choice((0.0, 0.5, 0.9, 1.0))
        data = np.memmap(Path(path, "data"), np.uint8, "r+")
        for name, offset in offsets.items():
            choices = [version[name].reshape(-1).view(np.uint8) for version in kept]
            for at in range(0, choices[0].size, _SECTOR):
                if self._random.random() < share:
                    part = self._random.choice(choices)[at : at + _SECTOR]
                    data[offset + at : offset + at + part.size] = part
        data.flush()

    def _spoil_log(self, log: Path) -> None:
        """Slots, resume records and flags were never synced: they may be anything."""
        with log.open("r+b") as file:
            for begin, length in (_LOG_SLOTS, _LOG_RESUME, _LOG_DIRECTORY):
                kind = self._random.choice(("kept", "zero", "random"))
                if kind == "kept":
                    continue
                file.seek(begin)
                file.write(bytes(length) if kind == "zero" else self._numpy.bytes(length))


def is_in_transaction(path: str) -> bool:
    """Whether the flag of a batch was set and its commit was not, in the log of a killed pool."""
    log = Path(path, "log")
    if not log.exists():
        return False
    with log.open("rb") as file:
        slots = [_read(file, at) for at in _COMMIT_SLOTS]  # magic, seq, batch, life
        _, seq, batch, life = max(slots, key=lambda slot: slot[1])
        flag = _read(file, _LOG_DIRECTORY[0] + _FLAG_BYTES * ((batch + 1) % _FLAGS))
    return seq > 0 and flag[1:3] == (batch + 1, life)  # magic, batch, life


def _read(file: BinaryIO, at: int) -> tuple[int, int, int, int]:
    file.seek(at)
    raw = file.read(32)
    return struct.unpack("<4Q", raw) if len(raw) == 32 else (0, 0, 0, 0)


def _folder(path: str) -> Path:
    return Path(path + ".versions")


def _is_clean(log: Path) -> bool:
    with log.open("rb") as file:
        file.seek(_LOG_SESSION + 8)
        return file.read(1) == b"\1"


def _zero(file: Path, at: int, count: int) -> None:
    with file.open("r+b") as opened:
        opened.seek(at)
        opened.write(bytes(count))


def _newest_slot(journal: Path) -> dict[str, int] | None:
    if not journal.exists():
        return None
    names = ("magic", "seq", "life", "base", "ring_offset", "ring_bytes", "head", "first_lsn")
    newest: dict[str, int] | None = None
    with journal.open("rb") as file:
        for page in (0, _PAGE):
            file.seek(page)
            raw = file.read(_SLOT.size)
            if len(raw) < _SLOT.size:
                continue
            slot = dict(zip(names, _SLOT.unpack(raw), strict=True))
            if slot["magic"] == _SLOT_MAGIC and (newest is None or slot["seq"] > newest["seq"]):
                newest = slot
    return newest


def _frames(journal: Path, slot: Mapping[str, int]) -> Iterator[dict[str, Any]]:
    """Headers of the frames from the base on."""
    names = ("magic", "lsn", "life", "id", "kind", "batch", "bytes", "acked_lsn")
    at, lsn, travelled = slot["head"], slot["first_lsn"], 0
    with journal.open("rb") as file:
        while travelled < slot["ring_bytes"]:
            if at >= slot["ring_bytes"]:
                at = 0
            file.seek(slot["ring_offset"] + at)
            frame: dict[str, Any] = dict(
                zip(names, _HEADER.unpack(file.read(_HEADER.size)), strict=True)
            )
            is_next = frame["magic"] == _FRAME_MAGIC and frame["life"] == slot["life"]
            if not is_next or frame["lsn"] != lsn:
                return
            frame["offset"] = slot["ring_offset"] + at
            yield frame
            lsn += 1
            at += frame["bytes"]
            travelled += frame["bytes"]
