"""Row traces: the generator reaches the reuse asked for, statistics are exact, bad ones refused."""

import numpy as np
import pytest

from trainingcxl.sim import SYSTEMS, ParameterError, find_model, simulate
from trainingcxl.sim.trace import (
    read_trace,
    trace_localities,
    zipf_exponent,
    zipf_localities,
    zipf_rows,
)
from trainingcxl.sim.workload import Model, Tables


def small(batch=4, rows=10, lookups=1, tables=2, dim=8) -> Model:
    return Model(
        name="small",
        batch=batch,
        interaction="cat",
        source="C",
        bottom=(13, dim),
        top=(1,),
        tables=(Tables(count=tables, rows=rows, lookups=lookups, dim=dim),),
    )


def test_paper_reuse_gives_the_designs_exponents_and_unique_share(models):
    rm1, rm3 = models[0], models[2]
    assert zipf_exponent(rm1, 0.8) == pytest.approx(1.07, abs=0.01)
    assert zipf_exponent(rm3, 0.8) == pytest.approx(1.13, abs=0.01)
    found = zipf_localities(rm3, reuse=0.8, channels=4, batches=2)
    for locality in found:
        assert locality.reuse == pytest.approx(0.80, abs=0.01)
        assert locality.unique_share == pytest.approx(0.25, abs=0.01)


def test_zipf_rows_follow_the_law_beyond_the_head():
    rng = np.random.default_rng(1)
    rows, count, exponent = 4_000_000, 200_000, 0.8
    drawn = zipf_rows(rng, rows, count, exponent)
    assert drawn.min() >= 0
    assert drawn.max() < rows
    ranks = np.arange(1, rows + 1, dtype=np.float64) ** -exponent
    head = ranks[: 1 << 20].sum() / ranks.sum()
    scatter = 2_654_435_761
    while np.gcd(scatter, rows) != 1:
        scatter += 2
    inverse = pow(scatter % rows, -1, rows)
    rank_of = drawn * inverse % rows
    assert np.mean(rank_of < 1 << 20) == pytest.approx(head, abs=0.01)
    assert np.mean(rank_of < 100) == pytest.approx(ranks[:100].sum() / ranks.sum(), abs=0.01)


def test_uniform_rows():
    drawn = zipf_rows(np.random.default_rng(0), 1000, 100_000, 0.0)
    counts = np.bincount(drawn, minlength=1000)
    assert counts.min() > 50
    assert counts.max() < 160


def test_statistics_are_exact():
    # Batch 0: table 0 has rows 0 1 2 3, table 1 has 5 5 5 5; batch 1: 0 1 7 7 and 5 6 6 6.
    ids = np.array([[0, 5], [1, 5], [2, 5], [3, 5], [0, 5], [1, 6], [7, 6], [7, 6]])
    (locality,) = trace_localities(ids, small(), channels=2)
    assert locality.reuse == pytest.approx(3 / 8)
    assert locality.unique_share == pytest.approx(5 / 8)
    # Lookups on channel (row + table) mod 2: table 0 {0: 1, 1: 3}, table 1 {0: 1, 1: 3}.
    assert locality.lookup_balance == pytest.approx(6 / 4)
    # Distinct rows 0 1 7 and 5 6: channel 0 has rows 0 and 5, channel 1 has 1, 7 and 6.
    assert locality.update_balance == pytest.approx(3 / 2.5)


def test_both_engines_take_a_trace(hardware, models):
    localities = zipf_localities(models[2], reuse=0.6, channels=4, batches=4)
    closed = simulate(SYSTEMS["CXL-D"], hardware, models[2], localities=localities)
    event = simulate(
        SYSTEMS["CXL-D"], hardware, models[2], engine="event", batches=8, localities=localities
    )
    assert event.seconds_per_batch == pytest.approx(closed.seconds_per_batch, rel=0.02)
    plain = simulate(SYSTEMS["CXL-D"], hardware, models[2])
    assert closed.seconds_per_batch != pytest.approx(plain.seconds_per_batch, rel=1e-3)


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        (np.zeros((8, 3), int), r"shape is \(8, 3\)"),
        (np.zeros((8,), int), "shape is"),
        (np.zeros((8, 2, 4), int), "4 lookups a table"),
        (np.zeros((7, 2), int), "7 samples are fewer than two batches of 4"),
        (np.full((8, 2), 10), "id 10 of table 0 at sample 0"),
        (np.full((8, 2), -1), "id -1 of table 0"),
    ],
)
def test_traces_that_contradict_the_model(ids, words):
    with pytest.raises(ParameterError, match=words):
        trace_localities(ids, small(), channels=4)


def test_trace_files(tmp_path):
    path = tmp_path / "ids.npy"
    np.save(path, np.zeros((8, 2), dtype=np.int32))
    assert read_trace(path).shape == (8, 2)
    np.save(path, np.zeros((8, 2)))
    with pytest.raises(ParameterError, match="dtype is float64"):
        read_trace(path)
    np.save(path, np.array([{}], dtype=object), allow_pickle=True)
    with pytest.raises(ParameterError, match=r"not a \.npy array"):
        read_trace(path)
    path.write_text("hello")
    with pytest.raises(ParameterError, match=r"not a \.npy array"):
        read_trace(path)
    with pytest.raises(ParameterError, match="no such file"):
        read_trace(tmp_path / "none.npy")


def test_reuse_out_of_reach_is_refused():
    with pytest.raises(ParameterError, match="cannot be reached"):
        zipf_exponent(find_model("RM1"), 0.001)
