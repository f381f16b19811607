"""Text tables and Parquet by a schema, and the guess of a schema."""

import sys

import numpy as np
import polars
import pytest

from trainingcxl.data import BatchLoader, open_data
from trainingcxl.data.elementary import mix_scalar
from trainingcxl.data.guess import guess_schema
from trainingcxl.data.schema import CsvFormat, LabelColumn, Schema, SparseColumn, load_schema
from trainingcxl.errors import ConfigError, DataError

BASIC = """
[label]
column = "click"
[[dense]]
column = "age"
[[dense]]
column = "balance"
log = false
[[sparse]]
column = "site"
rows = 50
[[sparse]]
column = "hour"
kind = "modulo"
rows = 24
[[sparse]]
column = "shop"
kind = "id"
missing = 0
"""
ROWS = """click,age,site,hour,balance,shop
1,39,abc,14102100,-1.5,7
0,,,-1,1e3,
1,-5,abc,18446744073709551615,,3
"""


def rows_of(data):
    return data.read(np.arange(data.num_samples))


@pytest.fixture
def opened(tmp_path):
    """Write a text table and a schema, and open it."""

    def open_text(text, schema=BASIC, *, name="t.csv", **options):
        (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
        if schema is not None:
            (tmp_path / "schema.toml").write_text(schema)
            options["schema"] = tmp_path / "schema.toml"
        return open_data(f"csv:{tmp_path / name}", cache_dir=tmp_path / "cache", **options)

    return open_text


def test_kinds_of_columns(opened):
    data = opened(ROWS)
    rows = rows_of(data)
    assert rows.label.tolist() == [1, 0, 1]
    np.testing.assert_allclose(rows.dense, [[np.log(40), -1.5], [0, 1000], [0, 0]], rtol=1e-6)
    site, hour, shop = rows.ids.T
    assert site[0] == site[2]
    assert 1 <= site[0] < 50
    assert site[1] == 0
    assert hour.tolist() == [14102100 % 24, (2**64 - 1) % 24, (2**64 - 1) % 24]
    assert shop.tolist() == [7, 0, 3]
    assert data.cardinalities == {"site": 50, "hour": 24, "shop": 8}
    assert "hour (up to" in data.report.notes[0]
    assert "site" not in data.report.notes[0]


def test_hashes_are_fixed(opened):
    """A pool may outlive this version: texts keep their rows."""
    schema = '[label]\ncolumn = "y"\n[[sparse]]\ncolumn = "s"\n'
    texts = ("a", "b", "85f751fd", "f\u00fcr")
    ids = rows_of(opened("y,s\n" + "".join(f"1,{value}\n" for value in texts), schema)).ids[:, 0]
    for text, row in zip(texts, ids.tolist(), strict=True):
        total = 0xCBF29CE484222325
        for byte in text.encode():
            total = ((total ^ byte) * 0x100000001B3) % (1 << 64)
        assert row == 1 + mix_scalar(total) % 99_999
    assert ids.tolist() == [49136, 69511, 20735, 28804]


def test_hash_size_overrides_rows(opened):
    assert opened(ROWS, hash_size=10).cardinalities == {"site": 10, "hour": 10, "shop": 8}
    data = opened(ROWS, hash_size={"shop": 5})
    assert data.cardinalities == {"site": 50, "hour": 24, "shop": 5}
    assert rows_of(data).ids[:, 2].tolist() == [2, 0, 3]


def test_ids_beyond_the_rows_of_the_schema(opened):
    """Case F13 with a schema: both ranges, modulo as the way out, which then works."""
    schema = BASIC.replace('kind = "id"', 'kind = "id"\nrows = 1000000')
    text = ROWS + "1,1,a,1,1,9999999\n"
    with pytest.raises(DataError, match=r"in \[0, 10000000\), the table has 1000000 rows") as error:
        opened(text, schema)
    assert "--set data.hash_size=1000000" in str(error.value)
    assert rows_of(opened(text, schema, hash_size={"shop": 1_000_000})).ids[3, 2] == 999_999
    assert rows_of(opened(ROWS, schema)).ids[:, 2].tolist() == [7, 0, 3]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("2,1,a,1,1,1", "label click is '2', expected 0 or 1"),
        (",1,a,1,1,1", "label click is '', expected 0 or 1"),
        ("1,x,a,1,1,1", "age is 'x', expected a number or nothing"),
        ("1,1,a,one,1,1", r"hour is 'one', expected an integer in [0, 2^64)"),
        ("1,1,a,1.5,1,1", "hour is '1.5'"),
        ("1,1,a,1,1,-4", "shop is '-4', expected an integer in [0, 2^64)"),
        ("1,1,a,1,1,18446744073709551616", "shop is '18446744073709551616'"),
        ("1,1,a,1,1", "5 columns, expected 6"),
        ("1,1,a,1,1,1,1", "7 columns, expected 6"),
    ],
)
def test_bad_rows(opened, row, reason):
    lines = ROWS.splitlines()
    text = "\n".join([*lines[:3], row, *lines[3:]]) + "\n"
    with pytest.raises(DataError) as error:
        opened(text)
    assert f"t.csv, line 4: {reason}" in str(error.value)
    data = opened(text, max_bad_lines=1)
    assert data.num_samples == 3
    assert len(data.report.bad_lines) == 1
    quoted = text.replace("39,abc", '39,"abc"')
    with pytest.raises(DataError) as error:
        opened(quoted)
    assert f"t.csv, line 4: {reason}" in str(error.value)
    again = rows_of(opened(quoted, max_bad_lines=1))
    assert np.array_equal(again.ids, rows_of(data).ids)
    assert np.array_equal(again.dense, rows_of(data).dense)


def test_missing_ids_need_a_row(opened):
    with pytest.raises(DataError, match="shop is '', expected an integer"):
        opened(ROWS, BASIC.replace("missing = 0\n", ""))


def test_quotes(opened):
    schema = '[label]\ncolumn = "y"\n[[sparse]]\ncolumn = "a,b"\n[[sparse]]\ncolumn = "s"\n'
    text = '"y","a,b",s\n1,"x, ""y""",p\n0,"two\nlines",p\n\n1,plain,"x\x0cy"\nbad\n'
    with pytest.raises(DataError, match="line 7: 1 columns, expected 3"):
        opened(text, schema)
    rows = rows_of(opened(text, schema, max_bad_lines=1))
    assert rows.label.tolist() == [1, 0, 1]
    assert rows.ids[0, 1] == rows.ids[1, 1]
    assert len(set(rows.ids[:, 0].tolist())) == 3
    with pytest.raises(DataError, match=r"line 2: .*\n  do:    correct the quotes"):
        opened('y,"a,b",s\n1,"never ends,p\n0,x,y\n', schema)
    with pytest.raises(DataError, match="line 2: "):
        opened('y,"a,b",s\n1,"x"y,p\n', schema)


def test_form_of_the_text(opened):
    """Other separators, no header, spaces, missing words, CRLF, a byte order mark, blank lines."""
    schema = """
[csv]
separator = ";"
header = false
trim = true
missing = ["", "?"]
[label]
column = "column_3"
positive = [">50K", ">50K."]
[[dense]]
column = "column_1"
log = false
[[sparse]]
column = "column_2"
"""
    text = "\ufeff1; a ;>50K\r\n?; ?;<=50K\r\n\r\n3;a;>50K.\r\n\r\n"
    rows = rows_of(opened(text, schema))
    assert rows.label.tolist() == [1, 0, 1]
    assert rows.dense[:, 0].tolist() == [1, 0, 3]
    assert rows.ids[0, 0] == rows.ids[2, 0] != 0
    assert rows.ids[1, 0] == 0
    with pytest.raises(DataError, match="label column_3 is missing"):
        opened("1;a;?\n", schema)


def test_split_fields_are_jagged(opened):
    schema = """
[label]
column = "y"
threshold = 4
[[sparse]]
column = "genres"
split = "|"
[[sparse]]
column = "numbers"
kind = "id"
split = " "
"""
    text = "y,genres,numbers\n4.5,Drama|Comedy,3 4 5\n3,,\n5,Comedy,7\n"
    data = opened(text, schema)
    rows = rows_of(data)
    assert rows.label.tolist() == [1, 0, 1]
    genres, numbers = rows.jagged["genres"], rows.jagged["numbers"]
    assert genres.lengths.tolist() == [2, 0, 1]
    assert genres.values[1] == genres.values[2] != genres.values[0]
    assert numbers.values.tolist() == [3, 4, 5, 7]
    assert data.read(np.array([2, 0])).jagged["numbers"].values.tolist() == [7, 3, 4, 5]
    assert data.cardinalities["numbers"] == 8
    sparse = next(iter(BatchLoader(data, 3, seed=0, shuffle=False))).sparse
    assert np.diff(sparse.offsets).tolist() == [2, 0, 1, 3, 0, 1]
    with pytest.raises(DataError, match="line 3: numbers is '3 x'"):
        opened("y,genres,numbers\n4,a,1\n4,a,3 x\n4,a,1\n", schema)
    bad = opened("y,genres,numbers\n4,a,1\n4,a,3 x\n4,a,1\n", schema, max_bad_lines=1)
    assert rows_of(bad).jagged["numbers"].values.tolist() == [1, 1]


def test_split_against_python(opened):
    generator = np.random.default_rng(0)
    lists = [generator.integers(0, 99, generator.integers(0, 4)).tolist() for _ in range(300)]
    text = "y,n\n" + "".join(f"1,{'|'.join(map(str, values))}\n" for values in lists)
    schema = '[label]\ncolumn="y"\n[[sparse]]\ncolumn="n"\nkind="id"\nsplit="|"\n'
    for variant in (text, text.replace("1,", '"1",')):
        jagged = rows_of(opened(variant, schema)).jagged["n"]
        assert jagged.lengths.tolist() == [len(values) for values in lists]
        assert jagged.values.tolist() == [value for values in lists for value in values]


def test_wrong_schemas(opened, tmp_path):
    cases = [
        ("[[sparse]]\ncolum = 'a'", r"number 1: unknown key 'colum'\n.*did you mean 'column'"),
        ("[[sparse]]\nkind = 'id'", "'column' is missing"),
        ("[[sparse]]\ncolumn = 'a'\nkind = 'ids'", "must be one of hash, modulo, id"),
        ("[[sparse]]\ncolumn = 'a'\nrows = true", "rows is True, must be an integer"),
        ("[[sparse]]\ncolumn = 'a'\nrows = -1", "rows is -1, must be in"),
        ("[[sparse]]\ncolumn = 'a'\nrows = 3\nmissing = 3", "missing is 3"),
        ("[[sparse]]\ncolumn = 'a'\n[[sparse]]\ncolumn = 'a'", "named twice: a"),
        ("[[sparse]]\ncolumn = 'a'\nsplit = '::'", "must be one ASCII character"),
        ("[csv]\nseparator = ''", "must be one ASCII character"),
        ("[csv]\nheader = 1", "header is 1, must be true or false"),
        ("[csv]\nmissing = [1]", "must be a list of texts"),
        ("[label]\ncolumn = 'a'\npositive = ['x']\nthreshold = 1", "either positive or threshold"),
        ("[sparse]\ncolumn = 'a'", r"must be written \[\[sparse\]\]"),
        ("[colums]", "unknown section 'colums'"),
        ("label = 3", r"\[label\] must be a table"),
        ("", "nothing to embed"),
        ("[", "cannot read the schema"),
    ]
    for text, message in cases:
        with pytest.raises(ConfigError, match=message):
            opened(ROWS, text)
    with pytest.raises(ConfigError, match="cannot read the schema"):
        open_data("csv:x", cache_dir=tmp_path, schema=tmp_path / "none.toml")
    with pytest.raises(DataError, match="has no column 'zip'\n  do:    correct the schema; there"):
        opened(ROWS, BASIC.replace('"shop"', '"zip"'))
    unlabelled = '[[sparse]]\ncolumn = "site"\n'
    with pytest.raises(DataError, match=r"has no \[label\]"):
        opened(ROWS, unlabelled)
    assert not opened(ROWS, unlabelled, require_labels=False).has_labels
    with pytest.raises(DataError, match="column named twice: 'click'"):
        opened("click,click\n1,1\n")
    for text in ("", "\n", ROWS.splitlines()[0]):
        with pytest.raises(DataError, match="holds no samples"):
            opened(text)


def test_schema_text_round_trip(tmp_path):
    schema = Schema(
        csv=CsvFormat(separator="\t", missing=["", 'a "b" \\']),
        label=LabelColumn(column="y", threshold=4.0),
        sparse=[SparseColumn(column="s", kind="id", rows=5, missing=1, split="|")],
    )
    (tmp_path / "s.toml").write_text(schema.as_toml())
    assert load_schema(tmp_path / "s.toml") == schema


def test_guess_of_text(opened, tmp_path):
    generator = np.random.default_rng(0)
    lines = ["id;click;age;price;C1;site;tags;big"]
    for i in range(500):
        age, code = generator.integers(18, 90), generator.integers(0, 9)
        tags = "|".join(generator.choice(["a", "b", "c"], 2))
        price = "NULL" if i % 7 == 0 else f"{generator.normal():.3f}"
        big = generator.integers(1 << 40, 1 << 50)
        lines.append(f"x{i};{i % 2};{age};{price};{code};s{i % 40};{tags};{big % 999 + (1 << 40)}")
    data = opened("\n".join(lines) + "\n", None)
    schema = guess_schema(tmp_path / "t.csv")
    assert schema.csv == CsvFormat(separator=";", missing=["", "NULL"])
    assert schema.label == LabelColumn(column="click")
    assert [(c.column, c.log) for c in schema.dense] == [("age", True), ("price", False)]
    assert [(c.column, c.kind, c.split) for c in schema.sparse] == [
        ("C1", "modulo", ""),
        ("site", "hash", ""),
        ("tags", "hash", "|"),
        ("big", "hash", ""),
    ]
    assert data.num_samples == 500
    (tmp_path / "s.toml").write_text(schema.as_toml())
    assert load_schema(tmp_path / "s.toml") == schema


def test_guess_without_header_or_categories(tmp_path):
    (tmp_path / "a").write_text("".join(f"{i % 2}\t{i * 7919}\tw{i % 5}\n" for i in range(200)))
    schema = guess_schema(tmp_path / "a")
    assert not schema.csv.header
    assert (schema.label.column, schema.sparse[0].column) == ("column_1", "column_3")
    (tmp_path / "b").write_text("y,x\n0,1.5\n1,2.5\n")
    with pytest.raises(DataError, match="no column looks like a category"):
        guess_schema(tmp_path / "b")
    with pytest.raises(DataError, match="cannot read"):
        guess_schema(tmp_path / "none")
    (tmp_path / "c").write_text("")
    with pytest.raises(DataError, match="holds no samples"):
        guess_schema(tmp_path / "c")


def test_guess_of_few_lines(tmp_path):
    (tmp_path / "a").write_text("y,s\n0,a\n1,b")
    assert guess_schema(tmp_path / "a").label == LabelColumn(column="y")
    (tmp_path / "b").write_text("\n\n")
    with pytest.raises(DataError, match="holds no samples"):
        guess_schema(tmp_path / "b")


@pytest.fixture
def parquet(tmp_path):
    """Write a data frame and a schema, and open it."""

    def open_frame(frame, schema, **options):
        frame.write_parquet(tmp_path / "t.parquet")
        if schema is not None:
            (tmp_path / "schema.toml").write_text(schema)
            options["schema"] = tmp_path / "schema.toml"
        path = tmp_path / "t.parquet"
        return open_data(f"parquet:{path}", cache_dir=tmp_path / "cache", **options)

    return open_frame


FRAME = polars.DataFrame(
    {
        "y": [True, False, True],
        "age": [39, None, -5],
        "f": [1.5, float("nan"), None],
        "site": ["abc", None, "abc"],
        "u": polars.Series([2**63 + 5, 1, None], dtype=polars.UInt64),
        "l": [[1, 2], None, []],
        "t": [["a"], ["b", "a"], [None]],
        "n": [-1, 3, 4],
    }
)
SCHEMA = """
[label]
column = "y"
[[dense]]
column = "age"
[[dense]]
column = "f"
log = false
[[sparse]]
column = "site"
rows = 50
[[sparse]]
column = "u"
kind = "modulo"
missing = 7
[[sparse]]
column = "l"
kind = "id"
[[sparse]]
column = "t"
[[sparse]]
column = "n"
"""


def test_parquet(parquet, opened):
    data = parquet(FRAME, SCHEMA)
    rows = rows_of(data)
    assert rows.label.tolist() == [1, 0, 1]
    np.testing.assert_allclose(rows.dense, [[np.log(40), 1.5], [0, 0], [0, 0]], rtol=1e-6)
    assert rows.ids[:, 1].tolist() == [(2**63 + 5) % 100_000, 1, 7]
    assert rows.jagged["l"].values.tolist() == [1, 2]
    assert rows.jagged["l"].lengths.tolist() == [2, 0, 0]
    texts = rows.jagged["t"]
    assert texts.lengths.tolist() == [1, 2, 1]
    assert texts.values[0] == texts.values[2] != texts.values[1]
    assert texts.values[3] == 0
    assert rows.ids[1, 0] == 0
    # The same text has the same row in a text file.
    assert rows.ids[0, 0] == rows_of(opened(ROWS)).ids[0, 0]


def test_bad_rows_of_parquet(parquet):
    frame = FRAME.with_columns(n=polars.Series([5, -2, 4]))
    schema = SCHEMA + 'kind = "id"\n'
    with pytest.raises(DataError, match=r"t\.parquet, row 2: n is -2, expected an integer"):
        parquet(frame, schema)
    data = parquet(frame, schema, max_bad_lines=1)
    rows = rows_of(data)
    assert rows.jagged["t"].lengths.tolist() == [1, 1]
    assert rows.ids[:, 2].tolist() == [5, 4]
    with pytest.raises(DataError, match="column 'site' has type String, expected integers"):
        parquet(FRAME, SCHEMA.replace('"site"', '"site"\nkind = "id"'))
    with pytest.raises(DataError, match="column 'f' has type Float64, expected texts or integers"):
        parquet(FRAME, SCHEMA + '[[sparse]]\ncolumn = "f"\n')
    with pytest.raises(DataError, match="has no column 'zip'"):
        parquet(FRAME, SCHEMA.replace('"site"', '"zip"'))
    with pytest.raises(DataError, match="holds no samples"):
        parquet(FRAME.clear(), SCHEMA)


def test_unreadable_parquet(tmp_path):
    for name, content in [("empty", b""), ("text", b"hello"), ("cut", b"PAR1xxxx")]:
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match=f"cannot read .*{name}"):
            open_data(f"parquet:{tmp_path / name}", cache_dir=tmp_path / "c")
    with pytest.raises(DataError, match="cannot read"):
        open_data(f"parquet:{tmp_path}/none", cache_dir=tmp_path / "c")


def test_parquet_in_chunks(parquet, monkeypatch):
    whole = rows_of(parquet(FRAME, SCHEMA))
    monkeypatch.setattr("trainingcxl.data.parquet_source._CHUNK_ROWS", 1)
    parts = rows_of(parquet(FRAME.vstack(FRAME), SCHEMA))
    assert np.array_equal(parts.ids, np.concatenate([whole.ids, whole.ids]))
    assert np.array_equal(parts.jagged["t"].values[4:], whole.jagged["t"].values)


def test_guess_of_parquet(parquet, tmp_path):
    data = parquet(FRAME, None)
    schema = guess_schema(tmp_path / "t.parquet")
    assert schema.label == LabelColumn(column="y")
    assert [c.column for c in schema.dense] == ["f"]
    assert {c.column for c in schema.sparse} == {"age", "site", "u", "l", "t", "n"}
    assert data.num_samples == 3


def test_without_polars(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "polars", None)
    with pytest.raises(DataError, match=r"pip install 'trainingcxl\[data\]'"):
        open_data(f"parquet:{tmp_path}/t.parquet", cache_dir=tmp_path)


@pytest.mark.samples
def test_adult_sample(samples, tmp_path):
    """Traps: spaces after commas, '?' for missing, a blank last line."""
    data = open_data(f"csv:{samples}/adult/adult.data.gz", cache_dir=tmp_path)
    rows = rows_of(data)
    assert data.num_samples == 32_561
    assert rows.label.mean() == pytest.approx(0.241, abs=5e-4)
    assert data.num_dense == 5
    assert len(data.features) == 9
    assert (rows.ids[:, 0] == 0).sum() == 1836


@pytest.mark.samples
def test_avazu_sample(samples, tmp_path):
    """Traps: ids of 20 digits, C20 = -1, hour 14102100."""
    data = open_data(f"csv:{samples}/avazu-sample/train.head.csv.gz", cache_dir=tmp_path)
    rows = rows_of(data)
    assert data.num_samples == 7000
    assert rows.label.mean() == pytest.approx(0.17, abs=5e-3)
    assert "id" not in data.cardinalities
    assert len(data.features) == 22
