"""The built-in data set written and read again, its facts, and the two commands."""

import gzip
import json
from dataclasses import replace

import numpy as np
import pytest
from click.testing import CliRunner

from trainingcxl.cli import export_data, schema
from trainingcxl.data import SyntheticDataset, open_data, parse_spec
from trainingcxl.data.dataset import DataReport, Dataset, Feature, Jagged, Rows
from trainingcxl.data.describe import describe, rank_auc
from trainingcxl.data.export import write_criteo, write_npy
from trainingcxl.errors import ConfigError


def silent(what, done, total):
    assert done <= total


def assert_equal(one, other):
    samples = np.arange(one.num_samples)
    first, second = one.read(samples), other.read(samples)
    assert np.array_equal(first.dense, second.dense)
    assert np.array_equal(first.ids, second.ids)
    assert np.array_equal(first.label, second.label)
    assert first.jagged.keys() == second.jagged.keys()
    for name, jagged in first.jagged.items():
        assert np.array_equal(jagged.values, second.jagged[name].values)
        assert np.array_equal(jagged.lengths, second.jagged[name].lengths)


@pytest.mark.parametrize("name", ["train.txt", "train.txt.gz"])
def test_criteo_round_trip(tmp_path, name):
    data = open_data("synthetic:tiny?samples=9000")
    write_criteo(data, tmp_path / name, silent)
    again = open_data(
        f"criteo:{tmp_path / name}", cache_dir=tmp_path / "c", hash_size=data.cardinalities
    )
    assert_equal(data, again)
    assert again.cardinalities == data.cardinalities
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == [name]


@pytest.mark.parametrize("multi_hot", [0, 1])
def test_npy_round_trip(tmp_path, multi_hot):
    data = open_data(f"synthetic:tiny?samples=300&multi_hot={multi_hot}")
    write_npy(data, tmp_path / "d", silent)
    again = open_data(f"npy:{tmp_path / 'd'}", hash_size=data.cardinalities)
    assert_equal(data, again)
    sparse = "sparse_multi_hot.npz" if multi_hot else "sparse.npy"
    assert sorted(p.name for p in (tmp_path / "d").iterdir()) == ["dense.npy", "labels.npy", sparse]


def test_equal_data_gives_equal_files(tmp_path):
    data = open_data("synthetic:tiny?samples=50")
    for name in ("a.gz", "b.gz"):
        write_criteo(data, tmp_path / name, silent)
    assert (tmp_path / "a.gz").read_bytes() == (tmp_path / "b.gz").read_bytes()


def test_interrupted_export_leaves_nothing(tmp_path):
    def interrupt(what, done, total):
        raise KeyboardInterrupt

    data = open_data("synthetic:tiny?samples=50")
    with pytest.raises(KeyboardInterrupt):
        write_criteo(data, tmp_path / "a.txt", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_npy(data, tmp_path / "d", interrupt)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_what_criteo_text_cannot_hold(tmp_path):
    with pytest.raises(ConfigError, match="one id a field"):
        write_criteo(open_data("synthetic:tiny?multi_hot=1"), tmp_path / "a", silent)
    with pytest.raises(ConfigError, match="26 categories"):
        write_criteo(
            SyntheticDataset(replace(parse_spec("rm1"), hotness=(1,) * 10)), tmp_path, silent
        )


def test_export_command(tmp_path):
    arguments = ["--data", "synthetic:tiny", "--samples", "5000", "--criteo", f"{tmp_path}/t.gz"]
    arguments += ["--npy", f"{tmp_path}/d", "--json"]
    result = CliRunner().invoke(export_data.command, arguments, catch_exceptions=False)
    facts = json.loads(result.stdout)
    assert facts["click_rate"] == pytest.approx(0.25, abs=0.03)
    assert gzip.decompress((tmp_path / "t.gz").read_bytes()).count(b"\n") == 5000
    assert open_data(f"npy:{tmp_path}/d").num_samples == 5000
    result = CliRunner().invoke(export_data.command, ["--samples", "10"], catch_exceptions=False)
    assert "samples=10\n" in result.stdout
    with pytest.raises(ConfigError, match="only synthetic:NAME"):
        CliRunner().invoke(export_data.command, ["--data", "csv:x"], catch_exceptions=False)


def test_schema_command(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("click,site\n" + "".join(f"{i % 2},s{i % 3}\n" for i in range(50)))
    result = CliRunner().invoke(schema.command, [str(path)], catch_exceptions=False)
    assert '[label]\ncolumn = "click"\n' in result.stdout
    out = ["--output", f"{tmp_path}/s.toml"]
    CliRunner().invoke(schema.command, [str(path), *out], catch_exceptions=False)
    assert (tmp_path / "s.toml").read_text() == result.stdout
    data = open_data(f"csv:{path}", cache_dir=tmp_path / "c", schema=tmp_path / "s.toml")
    assert data.num_samples == 50
    with pytest.raises(FileExistsError):
        CliRunner().invoke(schema.command, [str(path), *out], catch_exceptions=False)


def test_facts_of_the_built_in_data():
    """The shape of Criteo's skew: recurrence of rows and lookups, Bayes AUC, click rate."""
    facts = describe(SyntheticDataset(parse_spec("small")), batch_size=2048, batches=6)
    assert facts.click_rate == pytest.approx(0.25, abs=0.01)
    assert facts.recurring_rows == pytest.approx(0.30, abs=0.02)
    assert facts.recurring_lookups == pytest.approx(0.79, abs=0.01)
    assert facts.distinct_share == pytest.approx(0.266, abs=0.01)
    assert facts.bayes_auc == pytest.approx(0.876, abs=0.005)


class Known(Dataset):
    """Four samples; ids 0 0 | 0 1 plain, [5] [] | [5] [6] jagged."""

    num_samples, dense_names, has_labels, report = 4, (), True, DataReport()
    features = (Feature("j", 7, is_jagged=True), Feature("a", 2))
    fingerprint = {}  # noqa: RUF012 a constant of a test

    def read(self, samples):
        lists = [[5], [], [5], [6]]
        return Rows(
            np.empty((samples.size, 0), np.float32),
            np.array([[0], [0], [0], [1]])[samples],
            {"j": Jagged(np.array([i for s in samples for i in lists[s]], np.int64), samples)},
            np.array([0, 1, 1, 0], np.float32)[samples],
        )


def test_facts_of_known_data():
    facts = describe(Known(), batch_size=2, batches=5)
    assert facts.as_dict() == {
        "samples": 4, "batch_size": 2, "click_rate": 0.5, "distinct_share": 6 / 7,
        "recurring_rows": 0.5, "recurring_lookups": 0.5, "bayes_auc": None,
    }  # fmt: skip
    assert np.isnan(describe(Known(), batch_size=100).recurring_rows)


def test_rank_auc_against_all_pairs():
    generator = np.random.default_rng(0)
    score = generator.integers(0, 20, 300) / 4.0
    label = (generator.random(300) < 0.3).astype(np.float32)
    positive, negative = score[label == 1], score[label == 0]
    wins = (positive[:, None] > negative).sum() + (positive[:, None] == negative).sum() / 2
    assert rank_auc(score, label) == pytest.approx(wins / (positive.size * negative.size))
    assert np.isnan(rank_auc(score, np.zeros(300, np.float32)))
