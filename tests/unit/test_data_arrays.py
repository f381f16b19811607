"""MovieLens-100k files and NumPy arrays."""

import gzip
import zipfile

import numpy as np
import pytest

from trainingcxl.data import BatchLoader, open_data, split_dataset
from trainingcxl.errors import DataError

ITEM = "{}|A film|01-Jan-1995||http://nowhere|" + "|".join(["0"] * 17 + ["1", "1"])


def rows_of(data):
    return data.read(np.arange(data.num_samples))


@pytest.fixture
def films(tmp_path):
    """Three ratings in the layout of MovieLens-100k."""
    files = {
        "u.data": "1\t5\t4\t881250949\n2\t6\t3\t891717742\n2\t5\t5\t1\n",
        "u.user": "1|24|M|writer|85711\n2|53|F|other|T8H1N\n",
        "u.item": ITEM.format(5) + "\n" + ITEM.format(6)[:-3] + "0|0\n",
        "u.occupation": "other\nwriter\n\n",
        "u.genre": "unknown|0\n",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text, "latin-1")
    return tmp_path


def test_films(films):
    data = open_data(f"movielens:{films}")
    rows = rows_of(data)
    assert rows.label.tolist() == [1, 0, 1]
    assert rows.dense.shape == (3, 0)
    assert [f.name for f in data.features] == [
        "user", "item", "age", "gender", "occupation", "zip", "genre",
    ]  # fmt: skip
    assert rows.ids[:2].tolist() == [
        [1, 5, 4, 0, 1, 9 * 37 + 6],
        [2, 6, 10, 1, 0, 30 * 37 + 9],
    ]
    assert rows.jagged["genre"].values.tolist() == [17, 18, 17, 18]
    assert rows.jagged["genre"].lengths.tolist() == [2, 0, 2]
    again = open_data(f"movielens:{films}/u.data")
    assert again.fingerprint == data.fingerprint
    assert data.read(np.array([1, 0, 0])).jagged["genre"].lengths.tolist() == [0, 2, 2]


def test_packed_films(films):
    whole = open_data(f"movielens:{films}").fingerprint["num_samples"]
    for path in list(films.iterdir()):
        path.with_name(path.name + ".gz").write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()
    assert open_data(f"movielens:{films}").num_samples == whole
    (films / "u.user.gz").write_bytes((films / "u.user.gz").read_bytes()[:-9])
    with pytest.raises(DataError, match=r"cannot read .*u\.user\.gz"):
        open_data(f"movielens:{films}")


@pytest.mark.parametrize(
    ("name", "line", "reason"),
    [
        ("u.data", "1\t5\t6\t1", "'6' is not a rating of 1 to 5"),
        ("u.data", "1\t5", "2 columns, expected 4"),
        ("u.data", "9\t5\t1\t1", "'9' is not a user of u.user"),
        ("u.data", "-1\t5\t1\t1", "'-1' is not a user of u.user"),
        ("u.data", "1\t\t1\t1", "'' is not an item of u.item"),
        ("u.user", "3|200|M|writer|1", "age is '200', expected 0 .. 119"),
        ("u.user", "3|20|X|writer|1", "gender or occupation unknown: 'X'"),
        ("u.user", "3|20|M|king|1", "gender or occupation unknown: 'M', 'king'"),
        ("u.item", ITEM.format(7)[:-1] + "2", "the last 19 columns are not all 0 or 1"),
        ("u.item", ITEM.format("x"), "item is 'x'"),
    ],
)
def test_bad_lines_of_films(films, name, line, reason):
    with (films / name).open("a", encoding="latin-1") as stream:
        stream.write(line + "\n")
    number = (films / name).read_text("latin-1").count("\n")
    with pytest.raises(DataError, match="line") as error:
        open_data(f"movielens:{films}")
    assert f"{name}, line {number}: {reason}" in str(error.value)
    data = open_data(f"movielens:{films}", max_bad_lines=1)
    assert data.num_samples == 3
    assert len(data.report.bad_lines) == 1


def test_missing_films(films):
    (films / "u.item").unlink()
    with pytest.raises(DataError, match=r"neither it nor u\.item\.gz exists"):
        open_data(f"movielens:{films}")
    with pytest.raises(DataError, match="cannot read"):
        open_data(f"movielens:{films}/nothing/u.data")
    (films / "u.item").write_text(ITEM.format(5) + "\n")
    (films / "u.data").write_text("")
    with pytest.raises(DataError, match="holds no samples"):
        open_data(f"movielens:{films}")


@pytest.mark.samples
def test_films_sample(samples):
    data = open_data(f"movielens:{samples}/movielens-100k")
    assert data.num_samples == 100_000
    assert rows_of(data).label.mean() == pytest.approx(0.554, abs=5e-4)
    assert data.cardinalities == {
        "user": 944, "item": 1683, "age": 24, "gender": 2, "occupation": 21, "zip": 1369,
        "genre": 19,
    }  # fmt: skip
    train, held_out = split_dataset(data, 0.2, order=1)
    assert (train.num_samples, held_out.num_samples) == (80_000, 20_000)
    batch = next(iter(BatchLoader(train, 128, seed=0)))
    assert batch.dense.shape == (128, 0)
    assert batch.sparse.offsets.numel() == 7 * 128 + 1


def save_day(folder, prefix, count, *, ids=None, labels=None, dense=None):
    generator = np.random.default_rng(count)
    folder.mkdir(exist_ok=True)
    dense = generator.random((count, 3), np.float32) if dense is None else dense
    ids = generator.integers(0, 50, (count, 2), np.int32) if ids is None else ids
    labels = generator.integers(0, 2, (count, 1), np.int32) if labels is None else labels
    np.save(folder / f"{prefix}dense.npy", dense)
    if ids is not False:
        np.save(folder / f"{prefix}sparse.npy", ids)
    np.save(folder / f"{prefix}labels.npy", labels)
    return dense, ids, labels


def test_days_follow_in_numerical_order(tmp_path):
    days = {n: save_day(tmp_path, f"day_{n}_", count) for n, count in [(0, 5), (10, 4), (2, 6)]}
    data = open_data(f"npy:{tmp_path}")
    rows = rows_of(data)
    for place, values in [(0, rows.dense), (1, rows.ids), (2, rows.label[:, None])]:
        assert np.array_equal(values, np.concatenate([days[n][place] for n in (0, 2, 10)]))
    order = np.array([14, 0, 7, 7, 4])
    assert np.array_equal(data.read(order).ids, rows.ids[order])
    assert data.fingerprint["num_samples"] == 15


def test_ids_of_arrays(tmp_path):
    """Case F13, and raw hashes above 2^31 that were stored as negative int32."""
    ids = np.array([[9_999_999, -1], [3, 5]], np.int32)
    save_day(tmp_path, "", 2, ids=ids, labels=np.array([0, 1]))
    data = open_data(f"npy:{tmp_path}", hash_size=1 << 40)
    assert rows_of(data).ids.tolist() == [[9_999_999, 0xFFFFFFFF], [3, 5]]
    assert data.cardinalities == {"C1": 10_000_000, "C2": 1 << 32}
    with pytest.raises(DataError, match=r"in \[0, 10000000\), the table has 1000000 rows"):
        data.check_tables({"C1": 1_000_000})
    data = open_data(f"npy:{tmp_path}", hash_size={"C1": 1_000_000})
    assert rows_of(data).ids[0].tolist() == [999_999, 0xFFFFFFFF % 100_000]
    assert "C1 (up to 9999999, 1000000 rows)" in data.report.notes[0]
    save_day(tmp_path, "", 2, ids=np.array([[-1, 1 << 40], [0, 0]]), labels=np.array([0, 1]))
    assert rows_of(open_data(f"npy:{tmp_path}", hash_size=1 << 50)).ids[0].tolist() == [
        (1 << 50) - 1,
        1 << 40,
    ]


def test_multi_hot_archive_is_mapped(tmp_path):
    save_day(tmp_path, "day_0_", 4, ids=False, labels=np.array([0, 1, 1, 0], np.float64))
    one, three = np.arange(4, dtype=np.int32)[:, None], np.arange(12, dtype=np.int32).reshape(4, 3)
    path = tmp_path / "day_0_sparse_multi_hot.npz"
    np.savez(path, **{"0": one, "1": three})
    data = open_data(f"npy:{tmp_path}")
    rows = data.read(np.array([2, 0]))
    assert rows.ids.tolist() == [[2], [0]]
    assert rows.jagged["C2"].values.tolist() == [6, 7, 8, 0, 1, 2]
    assert rows.jagged["C2"].lengths.tolist() == [3, 3]
    assert isinstance(data._parts[0].columns[1], np.memmap)
    np.savez_compressed(path, **{"0": one, "1": three})
    with pytest.raises(DataError, match=r"member 0\.npy is compressed"):
        open_data(f"npy:{tmp_path}")
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("0.npy", b"nonsense")
    with pytest.raises(DataError, match="cannot read"):
        open_data(f"npy:{tmp_path}")


def test_wrong_arrays(tmp_path):
    with pytest.raises(DataError, match=r"no dense\.npy and no day_0_dense\.npy"):
        open_data(f"npy:{tmp_path}")
    cases = [
        ({"labels": np.zeros(2)}, r"expected integers \[2, columns\]"),
        ({"ids": np.zeros((3, 2))}, "expected integers"),
        ({"ids": np.zeros(3, np.int32)}, "expected integers"),
        ({"ids": np.zeros((4, 2), np.int32)}, "expected integers"),
        ({"labels": np.array([0, 1, 2])}, "row 2: label is 2, expected 0 or 1"),
        ({"labels": np.array([0, np.nan, 0])}, "row 1: label is nan"),
        ({"dense": np.array([["a"]] * 3)}, "expected numbers"),
        ({"dense": np.array([[{}]] * 3)}, "must be a .npy file"),
    ]
    for changes, message in cases:
        save_day(tmp_path, "", 3, **changes)
        with pytest.raises(DataError, match=message):
            open_data(f"npy:{tmp_path}")
    save_day(tmp_path, "", 3)
    (tmp_path / "sparse.npy").write_bytes((tmp_path / "sparse.npy").read_bytes()[:-5])
    with pytest.raises(DataError, match=r"sparse\.npy"):
        open_data(f"npy:{tmp_path}")
    save_day(tmp_path, "day_0_", 3)
    save_day(tmp_path, "day_1_", 3, ids=np.zeros((3, 5), np.int32))
    (tmp_path / "dense.npy").unlink()
    with pytest.raises(DataError, match="dense columns and lookups"):
        open_data(f"npy:{tmp_path}")
