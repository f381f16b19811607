"""Errors of damage and of recovery: each says what, where, and which command is the way out."""

import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from pool_bytes import BLOB, dense_areas, flip, frames, train
from small_job import Job, batches

from trainingcxl.cli.program import main
from trainingcxl.errors import PoolCorrupted, RecoveryError
from trainingcxl.pool import Pool, verify

_CORE = Path(__file__).parents[2] / "csrc"
_USERS = ("kCorrupted", "kRecovery", "kFull", "kLocked", "kVersion", "kDurability")
_ADVICE = ("do:", "repair_advice", "copy_advice", "segments_fault")


def _calls(source: str) -> Iterator[str]:
    """What stands between the parentheses of each call of fail()."""
    for found in re.finditer(r"\bfail\(", source):
        depth, at, is_text = 1, found.end(), False
        while depth:
            char = source[at]
            if is_text:
                at += char == "\\"
                is_text = char != '"'
            else:
                is_text = char == '"'
                depth += (char == "(") - (char == ")")
            at += 1
        yield source[found.end() : at - 1]


def test_each_error_of_the_core_says_what_to_do() -> None:
    seen, silent = 0, []
    for path in sorted(_CORE.glob("*.[ch]*")):
        for call in _calls(path.read_text()):
            kind = re.match(r"\s*ErrorKind::(\w+)", call)
            if kind is None or kind[1] not in _USERS:
                continue
            seen += 1
            is_passed_on = re.fullmatch(r"\s*ErrorKind::\w+,\s*error", call) is not None
            if not is_passed_on and not any(word in call for word in _ADVICE):
                silent.append(f"{path.name}: {' '.join(call.split())[:100]}")
    assert seen > 40
    assert silent == []


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"cannot create pool folder '.*'.*\n  do:    check the path"):
        Pool(tmp_path / "no" / "such" / "pool")
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(OSError, match=r"\n  do:    check the path"):
        Pool(tmp_path / "file" / "pool")


def _refusal(path: Path) -> str:
    with pytest.raises(PoolCorrupted) as refused:
        Pool(path, threads=1)
    return str(refused.value)


def test_a_damaged_dense_part_names_repair(closed) -> None:
    for area in dense_areas(closed.path):
        flip(closed.path, area + BLOB + 300)
    text = _refusal(closed.path)
    assert f"do:    'trainingcxl repair {closed.path}'" in text
    assert f"'trainingcxl verify {closed.path}'" in text
    shown = CliRunner().invoke(main, ["verify", str(closed.path)])
    assert shown.exit_code == 3
    assert f"do:    'trainingcxl repair {closed.path}'" in shown.output


def test_a_damaged_record_of_a_committed_batch_names_repair(crashed) -> None:
    batch, offset, size, _ = frames(crashed.path)[-1]
    assert batch == crashed.committed
    flip(crashed.path, offset + size // 2)
    text = _refusal(crashed.path)
    assert f"where: pool '{crashed.path}'" in text
    assert f"do:    'trainingcxl repair {crashed.path}'" in text
    damage = verify(crashed.path)
    assert [one.region for one in damage] == ["undo log"]
    assert "\n" not in damage[0].what


def test_a_damaged_record_of_a_batch_in_flight_names_no_repair(bench) -> None:
    """Its rows may have changed: without it they are of no batch, and repair reaches nothing."""
    pool = bench.open(undo_log="background")
    job = Job(pool, sparse_of=lambda ids: ids)
    for ids in job.run.batches(batches(6)):
        job.run.step(job.loss(ids))
        if job.run.committed_batch == 4:
            break
        while frames(pool.path)[-1][0] == job.run.committed_batch:
            time.sleep(0.001)  # the next batch is flagged once this one has committed
        image = bench.image()
    flip(image, frames(image)[-1][1] + 128)  # behind header and segment: the first row's number
    text = _refusal(image)
    assert "do:    restore the pool from a copy or a snapshot" in text
    assert "repair" not in text


def test_a_batch_out_of_reach_names_the_list(bench) -> None:
    with bench.open() as pool:
        train(pool, 3, 1)
    wanted = rf"'trainingcxl rewind {bench.path} --list'"
    with bench.open() as pool, pytest.raises(RecoveryError, match=wanted):
        pool.rewind(to=17)
