"""The built-in data set: fixed bits in Python and C++, its statistics, its text form."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from trainingcxl.data import SyntheticDataset, elementary, open_data, parse_spec
from trainingcxl.data.synthetic import DENSE_MISSING, SyntheticGenerator, field_pairs
from trainingcxl.data.synthetic_presets import CRITEO_ROWS, PRESETS, solve_bias
from trainingcxl.errors import ConfigError

VECTORS = json.loads(
    (Path(__file__).parent.parent / "data" / "synthetic_vectors.json").read_text("ascii")
)


def check_vector(vector, native):
    rows = SyntheticGenerator(parse_spec(vector["spec"]), native=native).generate(
        np.array(vector["samples"])
    )
    assert [[float(v).hex() for v in row] for row in rows.dense] == vector["dense"]
    assert rows.ids.tolist() == vector["ids"]
    assert rows.label.tolist() == vector["label"]
    assert [float(v).hex() for v in rows.score] == vector["score"]


@pytest.mark.parametrize("vector", VECTORS, ids=lambda v: v["spec"])
def test_numpy_gives_the_recorded_bits(vector):
    check_vector(vector, native=False)


@pytest.mark.parametrize("vector", VECTORS, ids=lambda v: v["spec"])
def test_native_gives_the_recorded_bits(vector):
    pytest.importorskip("trainingcxl._core")
    check_vector(vector, native=True)


@pytest.mark.parametrize("spec", ["small", "tiny?rho=0.5", "kaggle?seed=3", "rm1"])
def test_native_equals_numpy(spec):
    pytest.importorskip("trainingcxl._core")
    samples = np.concatenate([np.arange(777), np.array([(1 << 62) - 1])])
    native = SyntheticGenerator(parse_spec(spec), native=True).generate(samples)
    plain = SyntheticGenerator(parse_spec(spec), native=False).generate(samples)
    for name in ("dense", "ids", "label", "score"):
        assert getattr(native, name).tobytes() == getattr(plain, name).tobytes(), name


def test_native_refuses_wrong_buffers():
    core = pytest.importorskip("trainingcxl._core")
    assert core.SyntheticGenerator is not None
    batch = SyntheticGenerator(parse_spec("tiny"), native=True)._native
    good = {
        "samples": np.arange(4),
        "dense": np.empty((4, 13), np.float32),
        "ids": np.empty((4, 26), np.int64),
        "label": np.empty(4, np.float32),
        "score": np.empty(4, np.float64),
    }
    batch(**good)
    for name, value, error in [
        ("dense", np.empty((4, 13), np.float64), TypeError),
        ("ids", np.empty((26, 4), np.int64).T, TypeError),
        ("samples", np.arange(4, dtype=np.int32), TypeError),
        ("label", np.empty(3, np.float32), ValueError),
        ("ids", np.empty((4, 25), np.int64), ValueError),
    ]:
        with pytest.raises(error):
            batch(**{**good, name: value})


def test_elementary_functions_are_accurate():
    generator = np.random.default_rng(0)
    x = np.concatenate([np.exp(generator.uniform(-600, 600, 20_000)), [1.0, 2.0, 0.5]])
    np.testing.assert_allclose(elementary.log(x), np.log(x), rtol=1e-15, atol=1e-15)
    x = np.concatenate([generator.uniform(-690, 690, 20_000), [0.0, -0.0]])
    np.testing.assert_allclose(elementary.exp(x), np.exp(x), rtol=1e-15)
    u = np.concatenate([generator.uniform(0, 1, 20_000), np.arange(9) / 8])
    sine, cosine = elementary.sincos_turn(u)
    np.testing.assert_allclose(sine, np.sin(2 * np.pi * u), rtol=0, atol=2e-15)
    np.testing.assert_allclose(cosine, np.cos(2 * np.pi * u), rtol=0, atol=2e-15)
    x = np.array([0.0, 0.5, 0.9999999999999999, 1.0, 1.5, 2.5, 1e9 + 0.5, 2.0**50])
    assert elementary.floor(x).tolist() == np.floor(x).tolist()


def test_mix_is_the_splitmix_finaliser():
    # First outputs of SplitMix64 seeded with 1234567, a published sequence.
    state, expected = 1234567, [6457827717110365317, 3203168211198807973, 9817491932198370423]
    for value in expected:
        state = (state + 0x9E3779B97F4A7C15) % (1 << 64)
        assert elementary.mix_scalar(state) == value
        assert elementary.mix(np.array([state], np.uint64))[0] == value


def test_uniforms_lie_in_the_half_open_interval():
    ends = elementary.unit(np.array([0, (1 << 64) - 1], np.uint64))
    assert ends[0] == 2.0**-54
    assert ends[1] == 1.0


def test_a_sample_does_not_depend_on_its_batch():
    generator = SyntheticGenerator(parse_spec("tiny"))
    whole = generator.generate(np.arange(1000))
    order = np.random.default_rng(1).permutation(1000)
    again = generator.generate(order)
    assert np.array_equal(again.ids, whole.ids[order])
    assert np.array_equal(again.dense, whole.dense[order])
    assert np.array_equal(again.label, whole.label[order])


def test_seeds_give_different_data():
    first = SyntheticGenerator(parse_spec("tiny?seed=1")).generate(np.arange(100))
    second = SyntheticGenerator(parse_spec("tiny?seed=2")).generate(np.arange(100))
    assert not np.array_equal(first.ids, second.ids)
    assert not np.array_equal(first.label, second.label)


def test_dense_fields_follow_the_recipe():
    """Trap: I2 goes down to -1, and is 0 after log1p, like a missing value."""
    generator = SyntheticGenerator(parse_spec("tiny"))
    samples = np.arange(10_000)
    raw = generator.raw_dense(samples)
    missing = raw == DENSE_MISSING
    assert missing.mean(axis=0) == pytest.approx(
        [0.43, 0, 0.19, 0.21, 0.05, 0.24, 0.04, 0, 0.04, 0.43, 0.04, 0.78, 0.21], abs=0.02
    )
    assert raw[:, 1].min() == -1
    assert np.where(missing, 0, raw)[:, [0, *range(2, 13)]].min() == 0
    expected = np.log1p(np.maximum(np.where(missing, 0, raw), 0)).astype(np.float32)
    np.testing.assert_allclose(generator.generate(samples).dense, expected, rtol=1e-6)


def test_ranks_follow_zipf_and_rows_are_spread():
    spec = parse_spec("small")
    ids = SyntheticGenerator(spec).generate(np.arange(50_000)).ids
    assert ids.min() >= 0
    assert (ids.max(axis=0) < np.array(spec.cardinalities)).all()
    # Continuous Zipf law with exponent 0.99 over 100,000 rows: share of the most frequent row.
    counts = np.bincount(ids[:, 2], minlength=100_000)
    law = (2**0.01 - 1) / (100_001**0.01 - 1)
    assert counts.max() / 50_000 == pytest.approx(law, rel=0.05)
    assert counts.argmax() != 0


def test_click_rate_and_listed_biases():
    for name, make in PRESETS.items():
        if name == "tiny":
            assert solve_bias(make()) == parse_spec(name).bias
        rows = SyntheticGenerator(parse_spec(name)).generate(np.arange(4000))
        rate = float(np.mean(1 / (1 + np.exp(-rows.score))))
        assert rate == pytest.approx(0.25, abs=0.02)
        assert rows.label.mean() == pytest.approx(rate, abs=4 * math.sqrt(0.25 * 0.75 / 4000))


def test_locality_raises_recurrence():
    def recurring(spec):
        ids = SyntheticGenerator(parse_spec(spec)).generate(np.arange(4096)).ids[:, 2]
        return np.isin(np.unique(ids[2048:]), ids[:2048]).mean()

    assert recurring("small") < 0.35
    assert recurring("small") < recurring("small?rho=0.8") < recurring("small?rho=1")
    assert recurring("small?rho=1") > 0.9


def test_multi_hot_lookups_and_labels():
    data = open_data("synthetic:tiny?multi_hot=1")
    rows = data.read(np.arange(50))
    assert rows.ids.shape == (50, sum(not f.is_jagged for f in data.features))
    assert rows.jagged["C21"].lengths.tolist() == [100] * 50
    assert rows.jagged["C21"].values.shape == (5000,)
    plain = open_data("synthetic:tiny").read(np.arange(50))
    assert np.array_equal(plain.label, rows.label)
    assert np.array_equal(plain.ids[:, 0], rows.jagged["C1"].values[::3])


def test_pairs_are_of_different_fields():
    assert len(field_pairs(26)) == 8
    assert all(a != b for a, b in field_pairs(26))
    assert field_pairs(1) == []


def test_cardinalities_are_those_of_criteo():
    assert sum(CRITEO_ROWS) == pytest.approx(33.76e6, rel=1e-3)
    assert isinstance(open_data("synthetic:kaggle"), SyntheticDataset)
    assert open_data("synthetic:small?cap=7").cardinalities["C9"] == 3
    assert open_data("synthetic:small?cap=7").cardinalities["C1"] == 7


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("synthetic:huge", "unknown preset 'huge'"),
        ("synthetic:tiny?colour=3", "unknown option 'colour'"),
        ("synthetic:tiny?samples=many", "samples='many' is not of type int"),
        ("synthetic:tiny?samples=0", "samples is 0, must be in"),
        ("synthetic:tiny?rho=1.5", "rho is 1.5, must be in"),
        ("synthetic:rm1?multi_hot=1", "has no multi_hot variant"),
        ("synthetic:tiny?cap=0", "cap is 0, must be >= 1"),
        ("synthetic", "of no known kind"),
        ("carrier:pigeon", "of no known kind"),
    ],
)
def test_wrong_sources_are_refused(source, message):
    with pytest.raises(ConfigError, match=message.replace("?", r"\?")):
        open_data(source)


def test_options_of_other_kinds_are_refused():
    with pytest.raises(ConfigError, match=r"synthetic:tiny\?cap=ROWS"):
        open_data("synthetic:tiny", hash_size=100)
    with pytest.raises(ConfigError, match="schema is of no use"):
        open_data("synthetic:tiny", schema="s.toml")


def test_negative_and_large_sample_numbers():
    data = open_data("synthetic:tiny?samples=10")
    with pytest.raises(IndexError, match=r"has \[0, 10\)"):
        data.read(np.array([10]))
    with pytest.raises(IndexError, match="-1"):
        data.read(np.array([3, -1]))
    with pytest.raises(IndexError, match="negative"):
        SyntheticGenerator(parse_spec("tiny")).generate(np.array([-1]))
    assert data.read(np.empty(0, np.int64)).ids.shape == (0, 26)
