"""Checksums of rows: damage inside a table is found, and never laundered by an update."""

import json

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from pool_bytes import table_bytes

import trainingcxl as tcxl
from trainingcxl.cli import main
from trainingcxl.errors import PoolCorrupted
from trainingcxl.pool import Pool, inspect, verify

ROWS = {"a": 50, "b": 7}
DIM = 6
# Level power on an ordinary file, by force on tmpfs: with a journal.
FILE = {"durability": "power", "_medium": "block"}
OPTIMIZERS = [
    lambda: tcxl.optim.SGD(lr=0.1),
    lambda: tcxl.optim.Adagrad(lr=0.1),
    lambda: tcxl.optim.RowWiseAdagrad(lr=0.1),
]


def ids_of(count, seed=3):
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.stack([torch.randint(0, n, (12,), generator=generator) for n in ROWS.values()], 1)
        for _ in range(count)
    ]


def job_of(pool, optimizer):
    configs = [
        tcxl.EmbeddingBagConfig(name=n, num_embeddings=r, embedding_dim=DIM, feature_names=[n])
        for n, r in ROWS.items()
    ]
    rows = tcxl.EmbeddingBagCollection(pool, tables=configs, optimizer=optimizer)
    return rows, tcxl.FaultTolerantRun(pool, rows, sparse_of=lambda ids: ids, dense_every=1)


def train(pool, optimizer, batches):
    rows, run = job_of(pool, optimizer)
    for ids in run.batches(batches):
        run.step((rows(ids) - 1).square().sum())


def flip_in_table(path, table, row, column=0, what="weight"):
    record = next(t for t in inspect(path)["tables"] if t["name"] == table)
    with Pool(path, read_only=True) as pool:
        raw = next(t for t in pool.core.tables() if t["name"] == table)
    width = record[f"{what}_bytes"] // record["num_embeddings"]
    place = raw[f"{what}_offset"] + row * width + 4 * column
    with (path / "data").open("r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 4]))
    return place


@pytest.mark.parametrize("level", [{}, FILE])
@pytest.mark.parametrize("form", ["background", "fused"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_training_is_the_same_with_checksums(bench, optimizer, form, level):
    """Not a bit of rows, state or digest differs, and verify finds every row whole."""
    found = []
    for check in (False, True):
        path = bench.folder / f"check{check}"
        pool = bench.open(path, check_rows=check, undo_log=form, **level)
        train(pool, optimizer(), ids_of(9))
        found.append((table_bytes(pool), pool.digest()))
        pool.close()
        assert verify(path) == []
        assert inspect(path)["tables_checked"] is check
    assert found[0] == found[1]


@pytest.mark.parametrize("level", [{}, FILE])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_flip_in_a_table_is_found(bench, optimizer, level):
    pool = bench.open(check_rows=True, **level)
    train(pool, optimizer(), ids_of(3))
    pool.close()
    columns = {"weight": DIM, "state": {0: 1, 1: DIM + 1, 2: 2}[OPTIMIZERS.index(optimizer)]}
    for what, width in columns.items():
        for column in range(width):
            for table, row in (("a", 0), ("a", 49), ("b", 3)):
                flip_in_table(bench.path, table, row, column, what)
                damages = verify(bench.path)
                assert [d.region for d in damages] == ["table"]
                assert damages[0].where == f"table '{table}', row {row}"
                flip_in_table(bench.path, table, row, column, what)
    assert verify(bench.path) == []


@pytest.mark.parametrize("level", [{}, FILE])
@pytest.mark.parametrize("form", ["background", "fused"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_damaged_row_is_not_trained_on(bench, optimizer, form, level):
    """The batch that would change it is refused, and taken back by the next opening."""
    batches = ids_of(6)
    pool = bench.open(check_rows=True, undo_log=form, **level)
    train(pool, optimizer(), batches[:4])
    pool.close()
    row = next(int(i) for i in batches[5][:, 0] if i not in batches[4][:, 0])
    flip_in_table(bench.path, "a", row)
    pool = bench.open(undo_log=form, **level)
    rows, run = job_of(pool, optimizer())
    run.step((rows(batches[4]) - 1).square().sum())
    before = table_bytes(pool)
    with pytest.raises(PoolCorrupted, match=rf"row {row} of table 'a'[\s\S]*do:"):
        run.step((rows(batches[5]) - 1).square().sum())
    with pytest.raises(tcxl.errors.PoolError):
        run.step((rows(batches[4]) - 1).square().sum())
    pool.close()
    assert [d.where for d in verify(bench.path)] == [f"table 'a', row {row}"]
    with bench.open(**level) as again:
        assert again.committed_batch == 5
        assert table_bytes(again) == before


def test_killed_in_an_update_is_no_damage(bench):
    """Rows of the batch in flight are the undo log's business; recovery leaves them whole."""
    pool = bench.open(check_rows=True, undo_log="background")
    rows, run = job_of(pool, tcxl.optim.Adagrad(lr=0.1))
    batches = ids_of(5)
    for ids in batches[:4]:
        run.step((rows(ids) - 1).square().sum())
    pool.core.announce([rows.group_input(batches[4])])
    for _ in range(200):
        if pool.core.log_bytes_live() > 0:
            break
    image = bench.image()
    assert verify(image) == []
    with bench.open(image) as again:
        assert table_bytes(again) == table_bytes(pool)
    assert verify(image) == []


@pytest.mark.parametrize("resume", ["exact", "latest"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_recovered_from_the_journal_rows_are_whole(bench, optimizer, resume):
    """After a power failure rows come from the journal, whatever the tables hold of them: old rows,
    torn ones, rows without their checksum. A row that it does not hold keeps its damage, and its
    name.
    """
    pool = bench.open(check_rows=True, **FILE)
    data = ids_of(12)
    rows, run = job_of(pool, optimizer())
    for ids in run.batches(data[:6]):
        run.step((rows(ids) - 1).square().sum())
    pool.close()
    pool = bench.open(**FILE)  # a new base
    rows, run = job_of(pool, optimizer())
    for ids in data[6:]:
        run.step((rows(ids) - 1).square().sum())
    run.sync()
    expected, image = table_bytes(pool), bench.image()
    pool.close()
    changed = set(torch.cat(data[6:])[:, 0].tolist())
    kept = next(row for row in range(ROWS["a"]) if row not in changed)
    for row in changed:  # as if the kernel had written half of it
        flip_in_table(image, "a", row)
    with bench.open(image, resume=resume, _assume_reboot=True, **FILE) as again:
        assert again.committed_batch == 12
        assert again.recovery is not None
        assert again.recovery.rows_changed >= len(changed)
        assert table_bytes(again) == expected
    assert verify(image) == []
    flip_in_table(image, "a", kept)
    assert [d.where for d in verify(image)] == [f"table 'a', row {kept}"]


def test_snapshot_keeps_the_checksums(bench, tmp_path):
    pool = bench.open(check_rows=True)
    train(pool, tcxl.optim.SGD(lr=0.1), ids_of(3))
    pool.snapshot(tmp_path / "copy")
    assert inspect(tmp_path / "copy")["tables_checked"] is True
    assert verify(tmp_path / "copy") == []
    flip_in_table(tmp_path / "copy", "b", 2)
    assert [d.where for d in verify(tmp_path / "copy")] == ["table 'b', row 2"]


def test_many_damaged_rows_are_counted(bench):
    pool = bench.open(check_rows=True)
    train(pool, tcxl.optim.SGD(lr=0.1), ids_of(1))
    pool.close()
    for row in range(20):
        flip_in_table(bench.path, "a", row)
    damages = verify(bench.path)
    assert len(damages) == 9
    assert "20 rows" in damages[-1].what


def test_asked_for_too_late(bench):
    pool = bench.open()
    train(pool, tcxl.optim.SGD(lr=0.1), ids_of(1))
    pool.close()
    pool = bench.open(check_rows=True)
    job_of(pool, tcxl.optim.SGD(lr=0.1))
    assert any("without checksums" in notice for notice in pool.notices)


def test_command_says_what_it_cannot_see(bench):
    pool = bench.open()
    train(pool, tcxl.optim.SGD(lr=0.1), ids_of(1))
    pool.close()
    said = CliRunner().invoke(main, ["verify", str(bench.path)])
    assert said.exit_code == 0
    assert "no checksums" in said.output
    other = bench.folder / "checked"
    with bench.open(other, check_rows=True) as pool:
        train(pool, tcxl.optim.SGD(lr=0.1), ids_of(1))
    said = CliRunner().invoke(main, ["verify", str(other)])
    assert "no checksums" not in said.output
    flip_in_table(other, "a", 1)
    said = CliRunner().invoke(main, ["verify", "--json", str(other)])
    assert said.exit_code == 3
    assert json.loads(said.output)["damage"][0]["region"] == "table"


def test_state_view_has_no_checksum(bench):
    pool = bench.open(check_rows=True)
    train(pool, tcxl.optim.RowWiseAdagrad(lr=0.1), ids_of(2))
    state = pool.tables["a"].state
    assert state.shape == (50, 1)
    assert np.isfinite(state).all()
