"""Criteo text: both formats, parser traps, bad lines, the cache of conversions. Case F13."""

import errno
import gzip
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from trainingcxl.data import cache as cache_module
from trainingcxl.data import open_data
from trainingcxl.errors import ConfigError, DataError

HEADER = "\t".join(["Label", *(f"I{k}" for k in range(1, 14)), *(f"C{j}" for j in range(1, 27))])


def line(label="0", dense=None, ids=None):
    dense = dense or ["1"] * 13
    ids = ids or ["0000000a"] * 26
    return "\t".join(([] if label is None else [label]) + [*dense, *ids])


def ranked(*ids, label="1"):
    return line(label, ids=[str(i) for i in ids] + ["0"] * (26 - len(ids)))


@pytest.fixture
def opened(tmp_path):
    """Write lines to a file and open it."""

    def open_lines(content, *, name="train.txt", **options):
        path = tmp_path / name
        if isinstance(content, list):
            content = "\n".join(content) + "\n"
        path.write_bytes(content if isinstance(content, bytes) else content.encode("latin-1"))
        options.setdefault("cache_dir", tmp_path / "cache")
        return open_data(f"criteo:{path}", **options)

    return open_lines


def rows_of(data):
    return data.read(np.arange(data.num_samples))


def test_official_lines(opened):
    dense = ["", "-3", "0", "5", "12345678901", "", "1", "2", "3", "4", "5", "6", ""]
    ids = ["68fd1e64", "", "FFFFFFFF", "80000000", *["00000000"] * 21, ""]
    data = opened([line("1", dense, ids), line("0")], hash_size=1 << 40)
    rows = rows_of(data)
    assert rows.label.tolist() == [1.0, 0.0]
    values = np.array([0, 0, 0, 5, 12345678901, 0, 1, 2, 3, 4, 5, 6, 0], np.float64)
    np.testing.assert_allclose(rows.dense[0], np.log1p(values).astype(np.float32), rtol=1e-7)
    assert rows.ids[0].tolist() == [0x68FD1E64, 0, 0xFFFFFFFF, 0x80000000, *[0] * 22]
    assert rows.ids[1].tolist() == [10] * 26
    assert set(data.cardinalities.values()) == {1 << 40}
    assert data.dense_names[0] == "I1"
    assert [feature.name for feature in data.features][:2] == ["C1", "C2"]


def test_ids_are_taken_modulo_the_hash_size(opened):
    data = opened([line(ids=["ffffffff"] * 26)], hash_size={"C2": 1000})
    row = rows_of(data).ids[0]
    assert row[:2].tolist() == [0xFFFFFFFF % 100_000, 0xFFFFFFFF % 1000]
    assert data.cardinalities["C2"] == 1000
    with pytest.raises(ConfigError, match="no feature 'C27'"):
        opened([line()], hash_size={"C27": 5})


def test_ids_of_64_bits(opened):
    """Trap: ids above 2^31 and 2^63, decimal and hexadecimal; beyond 2^64 the line is bad."""
    big = (1 << 64) - 1
    text = [HEADER, ranked(big, 1 << 63, (1 << 63) - 1, 1 << 31, 10**19)]
    ids = rows_of(opened(text, hash_size=1 << 60)).ids[0]
    mask = 1 << 60
    expected = [big % mask, 0, (1 << 63) % mask - 1 + mask, 1 << 31, 10**19 % mask]
    assert ids[:5].tolist() == [value % mask for value in expected]
    for value in (1 << 64, 10**20, 99999999999999999999):
        with pytest.raises(
            DataError, match=r"line 2: C1 is '\d+', expected a decimal number below"
        ):
            opened([HEADER, ranked(value)])
    ids = rows_of(opened([line(ids=["ffffffffffffffff"] * 26)], hash_size=1 << 60)).ids[0]
    assert ids[0] == (1 << 60) - 1
    with pytest.raises(DataError, match="C1 is '10000000000000000', expected a hexadecimal"):
        opened([line(ids=["10000000000000000"] * 26)])
    assert rows_of(opened([HEADER, ranked("00000000000000000012")])).ids[0, 0] == 12


def test_ranked_ids_are_used_as_they_are(opened):
    data = opened([HEADER, ranked(7, 3), ranked(2, 0, label="0")])
    assert rows_of(data).ids[:, :2].tolist() == [[7, 3], [2, 0]]
    assert data.cardinalities["C1"] == 8
    assert data.features[0].largest_source_id == 7
    assert data.report.notes == []
    capped = opened([HEADER, ranked(7, 3)], hash_size=5)
    assert rows_of(capped).ids[0, :2].tolist() == [2, 3]
    assert "C1 (up to 7, 5 rows)" in capped.report.notes[0]
    assert opened([HEADER, ranked(7)], hash_size={"C1": 50}).cardinalities["C1"] == 50


def test_range_of_ids_against_the_tables_of_a_model(opened):
    """Case F13: made with range 10M, model of 1M rows: both ranges, and modulo as the way out."""
    lines = [HEADER, ranked(9_999_999)]
    data = opened(lines, hash_size=10_000_000)
    with pytest.raises(
        DataError, match=r"'C1': the data was made with ids in \[0, 10000000\)"
    ) as e:
        data.check_tables({"C1": 1_000_000})
    assert "the table has 1000000 rows" in str(e.value)
    assert "--set data.hash_size=1000000 takes ids modulo" in str(e.value)
    data.check_tables({"C1": 10_000_000, "C2": 1})
    opened(lines, hash_size=1_000_000).check_tables({"C1": 1_000_000})
    with pytest.raises(DataError, match="no feature 'C99'"):
        data.check_tables({"C99": 5})


def test_line_ends(opened):
    """Traps: CRLF, blank lines, an empty last column, a last line without newline."""
    lines = [line("1"), line("0", ids=["0000000b"] * 25 + [""]), line("1")]
    crlf = rows_of(opened("\r\n".join(lines) + "\r\n"))
    plain = rows_of(opened("\n".join(lines), name="b.txt"))
    blank = rows_of(opened("\n\n" + "\n\n".join(lines) + "\n\n", name="c.txt"))
    for rows in (crlf, blank):
        assert np.array_equal(rows.ids, plain.ids)
        assert np.array_equal(rows.dense, plain.dense)
    assert plain.ids[1, 25] == 0
    assert plain.label.tolist() == [1, 0, 1]


def test_truncated_last_line(opened):
    whole = line("1") + "\n" + line("0")
    with pytest.raises(DataError, match="line 2: the file ends within this line, at '00000'"):
        opened(whole[:-3])
    with pytest.raises(DataError, match="line 2: 17 columns, expected 40"):
        opened(whole[: len(line("1")) + 1 + 2 * 14 + 9 * 2 + 4])
    data = opened(whole[:-3], max_bad_lines=1)
    assert data.num_samples == 1


def test_labels(opened):
    """Trap: labels written 0.0 and 1.0."""
    assert rows_of(opened([line("1.0"), line("0.0")])).label.tolist() == [1, 0]
    for label in ("2", "", "-1", "x", "nan", "0.5"):
        with pytest.raises(DataError, match=r"label is .*, expected 0 or 1"):
            opened([line("1"), line(label)])


def test_files_of_39_columns_have_no_labels(opened):
    lines = [line(None), line(None)]
    with pytest.raises(DataError, match="39 columns: a test file without labels"):
        opened(lines)
    data = opened(lines, require_labels=False)
    assert not data.has_labels
    assert np.isnan(rows_of(data).label).all()
    assert rows_of(data).ids.tolist() == [[10] * 26] * 2


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (line() + "\tmore", "41 columns, expected 40"),
        ("one two three", "1 columns, expected 40"),
        (line(dense=["abc"] + ["1"] * 12), "I1 is 'abc', expected a number or nothing"),
        (line(dense=["1"] * 12 + ["--1"]), "I13 is '--1'"),
        (line(dense=["inf"] * 13), "I1 is 'inf'"),
        (line(ids=["0000000g"] * 26), "C1 is '0000000g', expected a hexadecimal number"),
        (line(ids=["\xff\xfe"] * 26), "C1 is "),
        (line(ids=["a" * 2000] * 26), "a field has more than 1024 bytes: 'aaaa"),
        (line(ids=[" 000000a"] * 26), "C1 is ' 000000a'"),
    ],
)
def test_bad_lines(opened, bad, reason):
    lines = [line(), line(), bad, line(), bad]
    with pytest.raises(DataError) as error:
        opened(lines)
    assert f"train.txt, line 3: {reason}" in str(error.value)
    assert "--set data.max_bad_lines=N (now 0)" in str(error.value)
    with pytest.raises(DataError, match=r"line 5: .*\(1 bad lines before it were skipped\)"):
        opened(lines, max_bad_lines=1)
    data = opened(lines, max_bad_lines=2)
    assert data.num_samples == 3
    assert [text.split(": ")[0].split("/")[-1] for text in data.report.bad_lines] == [
        "train.txt, line 3",
        "train.txt, line 5",
    ]
    with pytest.raises(DataError, match="line 5"):  # the cache remembers
        opened(lines, max_bad_lines=1)


def test_the_first_line_decides(opened):
    with pytest.raises(DataError, match="line 1: 3 TAB-separated columns, expected 40"):
        opened(["a\tb\tc"])
    assert opened(["a\tb\tc", line()], max_bad_lines=1).num_samples == 1
    assert opened("a\tb\n" + line(), name="b.txt", max_bad_lines=1).num_samples == 1
    with pytest.raises(DataError, match=r"line 1: I1 is 'a\\rb', expected a number"):
        opened([line(dense=["a\rb"] * 13)])
    with pytest.raises(DataError, match="the header is not label, I1"):
        opened([HEADER.replace("I1\tI2", "I2\tI1"), ranked(1)])
    torchrec = "\t".join(
        ["label", *(f"int_{k}" for k in range(13)), *(f"cat_{j}" for j in range(26))]
    )
    assert rows_of(opened([torchrec, ranked(12)])).ids[0, 0] == 12


def test_numbers_that_are_not_integers(opened):
    dense = ["1.5", "-0.5", "1e3", *["0"] * 10]
    np.testing.assert_allclose(
        rows_of(opened([line(dense=dense)])).dense[0, :3], np.log1p([1.5, 0, 1000]), rtol=1e-6
    )


def test_unreadable_files(opened, tmp_path):
    cases = {
        "criteo:": "of no known kind",
        f"criteo:{tmp_path}": "it is a folder",
        f"criteo:{tmp_path}/none.txt": "none.txt: No such file",
        f"criteo:{tmp_path}/a,": "empty file name",
    }
    for source, message in cases.items():
        with pytest.raises((DataError, ConfigError), match=message):
            open_data(source, cache_dir=tmp_path)
    for content in ("", "\n\n", HEADER, HEADER + "\n"):
        with pytest.raises(DataError, match="holds no samples"):
            opened(content)
    with pytest.raises(ConfigError, match="no folder for them was named"):
        opened([line()], cache_dir=None)
    with pytest.raises(ConfigError, match="max_bad_lines is -1"):
        opened([line()], max_bad_lines=-1)


def test_gzip(opened):
    """Trap: .gz by content, whatever the name; cut off or damaged it is named."""
    text = ("\n".join([line("1"), line("0")] * 2000) + "\n").encode()
    packed = gzip.compress(text)
    assert opened(packed, name="day_0").num_samples == 4000
    assert opened(packed + gzip.compress(text), name="two.gz").num_samples == 8000
    with pytest.raises(DataError, match="reading stops after line"):
        opened(packed[:-20], name="cut.gz")
    with pytest.raises(DataError, match=r"damaged\.gz: reading stops"):
        opened(packed[:200] + b"\0" * 50 + packed[250:], name="damaged.gz")
    with pytest.raises(DataError, match="reading stops"):
        opened(b"\x1f\x8bnot gzip", name="fake.gz")


def test_blocks_do_not_show(opened, monkeypatch):
    """Lines, numbers and errors are the same however the file falls into blocks."""
    lines = [line("1", ids=[f"{i:08x}"] * 26) for i in range(40)]
    reference = rows_of(opened(lines)).ids
    for size in (1, 97, 1000):
        monkeypatch.setattr(
            "trainingcxl.data.text.read_blocks.__kwdefaults__", {"block_bytes": size}
        )
        assert np.array_equal(rows_of(opened(lines, name=f"{size}.txt")).ids, reference)
        with pytest.raises(DataError, match="line 40: 1 columns"):
            opened([*lines[:39], "x"], name=f"bad{size}.txt")


def test_several_files_follow_each_other(opened, tmp_path):
    opened([line("1")], name="a.txt")
    opened([line("0")] * 2, name="b.txt")
    opened([HEADER, ranked(1)], name="c.txt")
    data = open_data(f"criteo:{tmp_path}/a.txt,{tmp_path}/b.txt", cache_dir=tmp_path / "cache")
    assert rows_of(data).label.tolist() == [1, 0, 0]
    with pytest.raises(DataError, match="differ in format"):
        open_data(f"criteo:{tmp_path}/a.txt,{tmp_path}/c.txt", cache_dir=tmp_path / "cache")


def test_conversion_is_done_once(opened, tmp_path):
    seen = []
    lines = [line("1")] * 50
    first = opened(lines, progress=lambda *args: seen.append(args))
    size = (tmp_path / "train.txt").stat().st_size
    assert seen[-1] == ("converting train.txt", size, size)
    times = (tmp_path / "train.txt").stat()
    os.utime(tmp_path / "train.txt", ns=(times.st_atime_ns, times.st_mtime_ns))
    seen.clear()
    second = open_data(
        f"criteo:{tmp_path}/train.txt",
        cache_dir=tmp_path / "cache",
        progress=lambda *args: seen.append(args),
    )
    assert seen == []
    assert second.fingerprint == first.fingerprint
    json.dumps(second.fingerprint)


def test_changed_sources_are_converted_again(opened, tmp_path):
    first = opened([line("1")] * 2)
    second = opened([line("0")] * 2)
    assert rows_of(second).label.tolist() == [0, 0]
    assert rows_of(first).label.tolist() == [1, 1]  # the arrays of before stay as they are
    assert first.fingerprint != second.fingerprint
    os.utime(tmp_path / "train.txt", (1, 1))  # another time, the same content
    again = open_data(f"criteo:{tmp_path}/train.txt", cache_dir=tmp_path / "cache")
    assert again.fingerprint == second.fingerprint


def test_source_changed_during_conversion(opened, tmp_path):
    def append_a_line(what, done, total):
        with (tmp_path / "train.txt").open("a") as stream:
            stream.write(line() + "\n")

    with pytest.raises(DataError, match="was changed while it was read"):
        opened([line()], progress=append_a_line)
    assert list((tmp_path / "cache").glob("*/meta.json")) == []


def test_interrupted_conversion_leaves_nothing(opened, tmp_path):
    def interrupt(what, done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        opened([line()], progress=interrupt)
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["lock"]
    assert opened([line()]).num_samples == 1


def test_cache_folder_deleted_during_conversion(opened, tmp_path):
    def delete(what, done, total):
        for path in sorted((tmp_path / "cache").rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()

    with pytest.raises(DataError, match="cannot write converted data"):
        opened([line()], progress=delete)
    assert opened([line()]).num_samples == 1


def test_cache_folder_that_cannot_be_written(opened, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"cannot write converted data to .*file/cache"):
        opened([line()], cache_dir=tmp_path / "file" / "cache")


def test_read_only_cache_still_serves(opened, tmp_path):
    """What is converted is opened without writing, so without the lock too."""
    opened([line()])
    (tmp_path / "cache" / "lock").unlink()
    (tmp_path / "cache" / "lock").mkdir()
    assert open_data(f"criteo:{tmp_path}/train.txt", cache_dir=tmp_path / "cache").num_samples == 1
    with pytest.raises(DataError, match=r"cannot write converted data .*: Is a directory"):
        opened([line("1")], name="other.txt")


def test_full_disk(opened, tmp_path, monkeypatch):
    """Case D10 for the cache: path, what is free and about what is needed; nothing stays."""

    def fail(*arguments):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(cache_module.ArrayWriter, "_append", fail)
        with pytest.raises(
            DataError, match=r"/cache: No space left on device \(\d+ bytes are free"
        ):
            opened([line()])
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["lock"]
    assert opened([line()]).num_samples == 1


def test_damaged_cache_is_named(opened, tmp_path):
    opened([line()] * 3)
    folder = next((tmp_path / "cache").glob("*/meta.json")).parent
    (folder / "dense.bin").write_bytes(b"short")
    path = f"criteo:{tmp_path}/train.txt"
    with pytest.raises(DataError, match=r"dense\.bin has 5 bytes, expected 156"):
        open_data(path, cache_dir=tmp_path / "cache")
    (folder / "meta.json").write_text("{}")
    with pytest.raises(DataError, match="is damaged"):
        open_data(path, cache_dir=tmp_path / "cache")


def test_two_conversions_at_once_take_turns(tmp_path):
    path = tmp_path / "t.txt"
    path.write_text((line() + "\n") * 10)
    entered, messages, results = threading.Event(), [], []

    def slow(what, done, total):
        entered.set()
        while not messages:
            time.sleep(0.001)

    def first():
        results.append(open_data(f"criteo:{path}", cache_dir=tmp_path / "c", progress=slow))

    thread = threading.Thread(target=first)
    thread.start()
    assert entered.wait(10)
    second = open_data(
        f"criteo:{path}", cache_dir=tmp_path / "c", progress=lambda *args: messages.append(args)
    )
    thread.join()
    assert messages == [("waiting for another process that converts data", 0, 0)]
    assert results[0].num_samples == second.num_samples == 10


def test_killed_conversion_is_begun_anew(tmp_path):
    """SIGKILL within a conversion leaves a folder that is never taken for a whole one."""
    path = tmp_path / "t.txt"
    path.write_text((line() + "\n") * 10)
    program = (
        "import sys, time\nfrom trainingcxl.data import open_data\n"
        "def hang(*args):\n    print('here', flush=True)\n    time.sleep(60)\n"
        f"open_data('criteo:{path}', cache_dir='{tmp_path / 'c'}', progress=hang)\n"
    )
    child = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert child.stdout.readline() == b"here\n"
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    assert len(list((tmp_path / "c").glob("*.unfinished"))) == 1
    assert open_data(f"criteo:{path}", cache_dir=tmp_path / "c").num_samples == 10
    assert list((tmp_path / "c").glob("*.unfinished")) == []


def test_content_of_large_files_is_sampled(tmp_path, monkeypatch):
    monkeypatch.setattr(cache_module, "_WHOLE_BYTES", 1000)
    monkeypatch.setattr(cache_module, "_EDGE_BYTES", 100)
    monkeypatch.setattr(cache_module, "_PROBE_BYTES", 10)
    path = tmp_path / "big"
    content = bytearray(np.random.default_rng(0).bytes(10_000))
    path.write_bytes(content)
    first = cache_module.identify(path).digest
    for place in (0, 99, 9_900, 9_999, 100 + 9800 // 63):
        changed = bytearray(content)
        changed[place] ^= 1
        path.write_bytes(changed)
        assert cache_module.identify(path).digest != first
    path.write_bytes(content + b"x")
    assert cache_module.identify(path).digest != first


@pytest.mark.samples
def test_official_sample(samples: Path, tmp_path):
    data = open_data(f"criteo:{samples}/criteo-kaggle-sample/train.head.txt.gz", cache_dir=tmp_path)
    rows = rows_of(data)
    assert data.num_samples == 1999
    assert rows.label.mean() == pytest.approx(0.209, abs=5e-4)
    assert rows.ids[0, 0] == 0x68FD1E64 % 100_000
    np.testing.assert_allclose(rows.dense[0, 4], np.log1p(1382), rtol=1e-6)


@pytest.mark.samples
def test_ranked_sample(samples: Path, tmp_path):
    path = f"{samples}/criteo-kaggle-sample/train.ranked.part10.tsv.gz"
    data = open_data(f"criteo:{path}", cache_dir=tmp_path, hash_size=20_000_000)
    rows = rows_of(data)
    assert data.num_samples == 10_000
    assert rows.label.mean() == pytest.approx(0.2445)
    assert rows.ids[0, :3].tolist() == [1, 84, 3380029]
    assert data.report.notes == []
    assert max(data.cardinalities.values()) == 10_126_518
    capped = open_data(f"criteo:{path}", cache_dir=tmp_path)
    assert np.array_equal(rows_of(capped).ids[:, 2], rows.ids[:, 2] % 100_000)
    assert "C3 (up to 10126517, 100000 rows)" in capped.report.notes[0]
