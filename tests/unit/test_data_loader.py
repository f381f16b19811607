"""The batch loader: order, position, resume, prefetch. Cases A1, A2, A4, A5, A10."""

import random
import threading
import time

import numpy as np
import pytest

from trainingcxl.data import BatchLoader, Dataset, Rows, SyntheticDataset, parse_spec
from trainingcxl.data.dataset import DataReport, Feature, Jagged, split_dataset
from trainingcxl.data.permutation import Permutation


class Counting(Dataset):
    """Sample i has label i; one plain and one jagged feature (i % 3 ids)."""

    def __init__(self, num_samples, *, jagged=False, fails_at=None):
        self.num_samples = num_samples
        self.dense_names = ("d",)
        self.features = (Feature("a", 1 << 40), Feature("b", 7))
        if jagged:
            self.features = (Feature("m", 1 << 40, is_jagged=True), *self.features)
        self.has_labels, self.fingerprint, self.report = True, {}, DataReport()
        self.fails_at, self.reads = fails_at, 0

    def read(self, samples):
        self.reads += 1
        if self.reads == self.fails_at:
            raise OSError("disk on fire")
        jagged = {}
        if self.features[0].is_jagged:
            jagged["m"] = Jagged(np.repeat(samples, samples % 3), samples % 3)
        return Rows(
            samples[:, None].astype(np.float32),
            np.stack([samples, samples % 7], axis=1),
            jagged,
            samples.astype(np.float32),
        )


def labels(batches):
    return [int(value) for batch in batches for value in batch.label]


@pytest.mark.parametrize("length", [1, 2, 3, 5, 16, 17, 100, 1000, 4097])
def test_permutation_is_one(length):
    permuted = Permutation(length, key=3)(np.arange(length))
    assert np.array_equal(np.sort(permuted), np.arange(length))


def test_permutation_of_huge_ranges():
    length = 45_840_617 * 1000
    index = np.array([0, 1, 2, length - 1])
    permuted = Permutation(length, key=0)(index)
    assert len(set(permuted.tolist())) == 4
    assert permuted.max() < length
    assert not np.array_equal(permuted, Permutation(length, key=1)(index))
    with pytest.raises(IndexError):
        Permutation(10, 0)(np.array([10]))


def test_permutation_mixes_well():
    """Place of each value in 1000 shuffles of 20: every place equally often (chi square)."""
    counts = np.zeros((20, 20))
    for key in range(1000):
        counts[np.arange(20), Permutation(20, key)(np.arange(20))] += 1
    chi_square = ((counts - 50) ** 2 / 50).sum()
    assert chi_square == pytest.approx(19 * 19, abs=6 * np.sqrt(2 * 19 * 19))
    big = Permutation(10_000, key=5)(np.arange(10_000))
    assert abs(np.corrcoef(big, np.arange(10_000))[0, 1]) < 0.04
    assert abs(np.corrcoef(big[1:], big[:-1])[0, 1]) < 0.04


def test_each_epoch_sees_every_sample_once_in_another_order():
    loader = BatchLoader(Counting(103), 10, seed=0)
    first, second = labels(loader), labels(loader)
    assert sorted(first) == sorted(second) == list(range(103))
    assert first != second
    assert len(loader) == 11


def test_order_depends_on_seed_alone():
    """Case A10: same seed, same order; draws from no global generator."""
    reference = labels(BatchLoader(Counting(50), 7, seed=4))
    random.seed(0)
    np.random.seed(0)
    before = (random.getstate(), np.random.get_state()[1].tolist())
    for prefetch in (0, 1, 5):
        assert labels(BatchLoader(Counting(50), 7, seed=4, prefetch=prefetch)) == reference
    assert before == (random.getstate(), np.random.get_state()[1].tolist())
    assert labels(BatchLoader(Counting(50), 7, seed=5)) != reference


def test_torch_generator_is_untouched():
    import torch

    before = torch.get_rng_state()
    labels(BatchLoader(Counting(50), 7, seed=4))
    assert torch.equal(before, torch.get_rng_state())


def test_plain_order_ranges_and_drop_last():
    data = Counting(100)
    assert labels(BatchLoader(data, 8, seed=0, shuffle=False)) == list(range(100))
    loader = BatchLoader(data, 8, seed=0, shuffle=False, start=10, stop=30, drop_last=True)
    assert labels(loader) == list(range(10, 26))
    shuffled = labels(BatchLoader(data, 8, seed=0, start=10, stop=30))
    assert sorted(shuffled) == list(range(10, 30))


def test_state_at_the_end_of_an_epoch():
    """Case A1: a state taken right after an epoch makes 2 + 2 epochs equal to 4."""
    reference_loader = BatchLoader(Counting(100), 1, seed=9)
    reference = [labels(reference_loader) for _ in range(4)]
    loader = BatchLoader(Counting(100), 1, seed=9)
    seen = [labels(loader) for _ in range(2)]
    state = loader.state_dict()
    assert state == {"epoch": 2, "batch": 0}
    loader = BatchLoader(Counting(100), 1, seed=9)
    loader.load_state_dict(state)
    assert seen + [labels(loader) for _ in range(2)] == reference


def test_state_after_the_last_batch_but_before_the_loop_ends():
    """Case A1: in the loop body of the last batch the state is the next epoch already."""
    loader = BatchLoader(Counting(6), 2, seed=0)
    states = [loader.state_dict() for _ in loader]
    assert states == [{"epoch": 0, "batch": 1}, {"epoch": 0, "batch": 2}, {"epoch": 1, "batch": 0}]


@pytest.mark.parametrize("stop_after", [0, 1, 4, 9, 10])
def test_resume_in_mid_epoch(stop_after):
    """Case A5: at the start, at 10, 40 and 90 % and after the last batch of an epoch."""
    reference_loader = BatchLoader(Counting(100), 10, seed=3)
    reference = labels(reference_loader) + labels(reference_loader)
    loader, seen = BatchLoader(Counting(100), 10, seed=3), []
    iterator = iter(loader)
    for _ in range(stop_after):
        seen += labels([next(iterator)])
    state = loader.state_dict()
    iterator.close()
    resumed = BatchLoader(Counting(100), 10, seed=3)
    resumed.load_state_dict(state)
    while len(seen) < 200:
        seen += labels(resumed)
    assert seen == reference


def test_state_soon_after_a_resume():
    """Case A2: state, resume, one batch, state, resume again; prefetched batches don't count."""
    reference = labels(BatchLoader(Counting(60), 5, seed=1))
    seen, state = [], {"epoch": 0, "batch": 0}
    for _ in range(12):
        loader = BatchLoader(Counting(60), 5, seed=1, prefetch=4)
        loader.load_state_dict(state)
        assert loader.state_dict() == state
        iterator = iter(loader)
        seen += labels([next(iterator)])
        state = loader.state_dict()
        iterator.close()
    assert seen == reference
    assert state == {"epoch": 1, "batch": 0}


def test_seek_and_break():
    loader = BatchLoader(Counting(20), 5, seed=1)
    whole = labels(loader)
    loader.seek(0, 2)
    assert labels(loader) == whole[10:]
    loader.seek(0)
    for batch in loader:
        assert labels([batch]) == whole[:5]
        break
    assert labels(loader) == whole[5:]
    loader.seek(0, 4)
    assert labels(loader) == []
    assert loader.state_dict() == {"epoch": 1, "batch": 0}
    for epoch, batch in [(-1, 0), (0, 5), (0, -1)]:
        with pytest.raises(ValueError, match="an epoch has 4 batches"):
            loader.seek(epoch, batch)
    with pytest.raises(ValueError, match="expected epoch and batch"):
        loader.load_state_dict({"epoch": 1})


def test_wrong_arguments():
    for arguments, message in [
        ({"batch_size": 0}, "batch_size 0"),
        ({"batch_size": 4, "prefetch": -1}, "prefetch -1"),
        ({"batch_size": 4, "stop": 11}, "data has 10"),
        ({"batch_size": 11, "drop_last": True}, "no batch of 11"),
        ({"batch_size": 4, "start": 10}, "no batch of 4"),
        ({"batch_size": 4, "fields": ["a", "zz"]}, "zz"),
    ]:
        with pytest.raises(ValueError, match=message):
            BatchLoader(Counting(10), seed=0, **arguments)


def test_errors_reach_the_loop_and_the_thread_ends():
    loader = BatchLoader(Counting(100, fails_at=4), 10, seed=0)
    seen = []
    with pytest.raises(OSError, match="disk on fire"):
        seen.extend(loader)
    assert len(seen) == 3
    assert loader.state_dict() == {"epoch": 0, "batch": 3}
    assert len(labels(loader)) == 70


def test_threads_end_with_the_iteration():
    def alive():
        return sum(thread.name == "trainingcxl-loader" for thread in threading.enumerate())

    loader = BatchLoader(Counting(10_000), 1, seed=0, prefetch=3)
    for _ in range(20):
        iterator = iter(loader)
        next(iterator)
        assert alive() == 1
        iterator.close()
        assert alive() == 0
    for _ in loader:
        break
    assert alive() == 0


def test_prefetch_stays_bounded():
    data = Counting(1000)
    iterator = iter(BatchLoader(data, 1, seed=0, prefetch=3))
    next(iterator)
    deadline = time.monotonic() + 10
    while data.reads < 5 and time.monotonic() < deadline:
        time.sleep(0.001)
    time.sleep(0.05)
    assert data.reads == 5  # one handed out, three waiting, one in the producer's hand
    iterator.close()


def test_jagged_features_and_fields():
    loader = BatchLoader(Counting(9, jagged=True), 9, seed=0, shuffle=False)
    sparse = next(iter(loader)).sparse
    assert list(sparse.keys) == ["m", "a", "b"]
    expected = [i for i in range(9) for _ in range(i % 3)]
    assert sparse.values.tolist() == [*expected, *range(9), *(i % 7 for i in range(9))]
    assert np.diff(sparse.offsets).tolist() == [*(i % 3 for i in range(9)), *[1] * 18]
    loader = BatchLoader(
        Counting(9, jagged=True), 4, seed=0, shuffle=False, fields=["b", "m"], start=2
    )
    sparse = next(iter(loader)).sparse
    assert list(sparse.keys) == ["b", "m"]
    assert sparse.values.tolist() == [2, 3, 4, 5, 2, 2, 4, 5, 5]
    only_plain = BatchLoader(Counting(9, jagged=True), 4, seed=0, shuffle=False, fields=["b"])
    assert next(iter(only_plain)).sparse.values.tolist() == [0, 1, 2, 3]


def test_batches_of_the_built_in_data():
    import torch

    loader = BatchLoader(SyntheticDataset(parse_spec("tiny")), 32, seed=0)
    batch = next(iter(loader))
    assert batch.dense.shape == (32, 13)
    assert batch.dense.dtype == torch.float32
    assert batch.label.shape == (32,)
    assert batch.sparse.values.shape == (26 * 32,)
    assert batch.sparse.values.dtype == torch.int64
    ids = loader.dataset.read(loader.samples(0, 0)).ids
    assert np.array_equal(batch.sparse.values.numpy().reshape(26, 32), ids.T)


def test_split_holds_out_the_last_part():
    train, held_out = split_dataset(Counting(100), 0.2)
    assert labels(BatchLoader(train, 100, seed=0, shuffle=False)) == list(range(80))
    assert labels(BatchLoader(held_out, 100, seed=0, shuffle=False)) == list(range(80, 100))
    train, held_out = split_dataset(Counting(100), 0.2, order=7)
    both = [labels(BatchLoader(part, 100, seed=0)) for part in (train, held_out)]
    assert [len(part) for part in both] == [80, 20]
    assert sorted(both[0] + both[1]) == list(range(100))
    assert sorted(both[1]) != list(range(80, 100))
    assert train.fingerprint != held_out.fingerprint
    assert split_dataset(Counting(100), 0)[1] is None
    with pytest.raises(ValueError, match=r"in \[0, 1\)"):
        split_dataset(Counting(100), 1.0)
    with pytest.raises(ValueError, match="none to train on"):
        split_dataset(Counting(1), 0.9)
    with pytest.raises(IndexError, match=r"has \[0, 20\)"):
        held_out.read(np.array([20]))


def test_the_cursor_costs_next_to_nothing():
    """Case A4: a state at every one of 2000 batches costs under 50 us each."""
    loader = BatchLoader(Counting(2000), 1, seed=0, prefetch=0)
    started = time.thread_time()
    for _ in range(2000):
        loader.state_dict()
        loader.seek(1, 7)
    assert (time.thread_time() - started) / 2000 < 50e-6
