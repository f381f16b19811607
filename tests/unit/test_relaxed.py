"""Relaxed lookup: looked up before the update of the batch before, corrected after it."""

import numpy as np
import pytest
import torch
from small_job import Job, batches

import trainingcxl as tcxl
from trainingcxl.errors import DurabilityUnavailable, RecoveryError

BIG_ROWS = 3000


def pooled_by_formula(before, after, changed, ids, weights=None):
    """Bags of `ids` (B, L), float32, in the order of docs/design.md; one sum of at most 1024
    lookups.
    """
    out = np.zeros((len(ids), before.shape[1]), np.float32)
    for bag, rows in enumerate(ids):
        factor = np.ones(len(rows), np.float32) if weights is None else weights[bag]
        for row, w in zip(rows, factor, strict=True):
            out[bag] += w * before[row]
        for row in sorted(set(rows) & changed):
            for other, w in zip(rows, factor, strict=True):
                if other == row:
                    out[bag] += w * (after[row] - before[row])
    return out


class Bags:
    """One table in a pool, trained by gradients that are a function of what was looked up."""

    def __init__(self, path, *, is_announced=True, lookup="relaxed", dense_every="auto", **options):
        self.pool = tcxl.Pool(path, lookup=lookup, **options)
        self.bags = tcxl.EmbeddingBag(
            self.pool,
            BIG_ROWS,
            20,
            name="t",
            mode="sum",
            optimizer=tcxl.optim.SGD(lr=0.01),
        )
        self.run = tcxl.FaultTolerantRun(
            self.pool,
            self.bags,
            dense_every=dense_every,
            sparse_of=lambda batch: batch if is_announced else None,
        )
        self.seen = []

    def step(self, ids):
        pooled = self.bags(ids)
        self.seen.append(pooled.detach().numpy().copy())
        self.run.step((pooled * pooled).sum())

    def train(self, data):
        for ids in self.run.batches(data):
            self.step(ids)
        return self

    @property
    def weight(self):
        (table,) = self.pool.tables.values()
        return table.weight


def some_ids(count, *, bags=700, length=9, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, BIG_ROWS, (bags, length), generator=generator) for _ in range(count)]


@pytest.mark.parametrize("undo_log", ["background", "fused"])
def test_lookups_follow_the_formula_to_the_bit(tmp_path, undo_log):
    data = some_ids(4, bags=60)
    job = Bags(tmp_path / "p", undo_log=undo_log)
    versions = [job.weight.copy()]
    for ids in job.run.batches(data):
        job.step(ids)
        versions.append(job.weight.copy())
    stats = job.run.stats
    job.pool.close()
    assert np.array_equal(
        job.seen[0], pooled_by_formula(versions[0], versions[0], set(), data[0].numpy())
    )
    corrected = 0
    for n in range(1, 4):
        changed = set(data[n - 1].flatten().tolist())
        corrected += sum(row in changed for row in data[n].flatten().tolist())
        expected = pooled_by_formula(versions[n - 1], versions[n], changed, data[n].numpy())
        assert expected.tobytes() == job.seen[n].tobytes()
    assert stats.corrected_lookups == corrected > 0
    assert stats.late_lookups == 0


def test_a_batch_that_was_not_announced_gives_the_same_bits(tmp_path):
    data = some_ids(5)
    early = Bags(tmp_path / "early").train(data)
    late = Bags(tmp_path / "late", is_announced=False).train(data)
    for a, b in zip(early.seen, late.seen, strict=True):
        assert a.tobytes() == b.tobytes()
    assert early.weight.tobytes() == late.weight.tobytes()
    assert (early.run.stats.late_lookups, late.run.stats.late_lookups) == (0, 4)


def test_threads_and_vector_widths_give_the_same_bits(tmp_path):
    from trainingcxl import _core

    data = some_ids(3)
    expected = Bags(tmp_path / "one", threads=1).train(data).weight.copy()
    widest = _core.isa()
    try:
        for isa in ("scalar", "avx2", "avx512"):
            if _core.use_isa(isa):
                job = Bags(tmp_path / isa, threads=2).train(data)
                assert job.weight.tobytes() == expected.tobytes(), isa
    finally:
        _core.use_isa(widest)


def test_weighted_bags_of_mean_and_wide_rows(tmp_path):
    """The coefficient of a correction is that of the lookup; rows of more than one block of
    columns.
    """
    dim = 300
    with tcxl.Pool(tmp_path / "p", lookup="relaxed") as pool:
        config = tcxl.EmbeddingBagConfig(
            name="t", num_embeddings=50, embedding_dim=dim, feature_names=["x"], pooling="mean"
        )
        bags = tcxl.EmbeddingBagCollection(pool, tables=[config], optimizer=tcxl.optim.SGD(lr=0.5))
        run = tcxl.FaultTolerantRun(pool, bags, sparse_of=lambda features: features)
        generator = torch.Generator().manual_seed(3)
        data = [
            tcxl.SparseFeatures(
                ["x"],
                torch.randint(0, 50, (24,), generator=generator),
                lengths=torch.full((6,), 4),
                weights=torch.rand(24, generator=generator),
            )
            for _ in range(3)
        ]
        versions, seen = [pool.tables["t"].weight.copy()], []
        for _ in run.epochs(1):
            for features in run.batches(data):
                pooled = bags(features)
                seen.append(pooled.detach().numpy().copy())
                run.step(pooled.square().sum())
                versions.append(pool.tables["t"].weight.copy())
        for n in (1, 2):
            changed = set(data[n - 1].values.tolist())
            ids = data[n].values.numpy().reshape(6, 4)
            factors = data[n].weights.numpy().reshape(6, 4)
            exact = np.einsum("bl,bld->bd", factors, versions[n][ids]) / 4
            assert np.allclose(seen[n], exact, atol=1e-5)
            assert changed & set(ids.flatten().tolist())


def test_evaluation_is_strict(tmp_path):
    job = Bags(tmp_path / "p").train(some_ids(3))
    ids = some_ids(1, seed=9)[0]
    with torch.no_grad():
        shown = job.bags(ids).numpy()
    with_grad = job.bags(ids).detach().numpy()
    strict = pooled_by_formula(job.weight, job.weight, set(), ids.numpy())
    assert shown.tobytes() == strict.tobytes()
    assert np.allclose(with_grad, strict, atol=1e-5)
    assert with_grad.tobytes() != strict.tobytes()  # else this test would show nothing


class Seekable(list):
    """Batches that can be entered anywhere."""

    start = 0

    def seek(self, epoch, batch):
        self.start = batch

    def __iter__(self):
        return (self[k] for k in range(self.start, len(self)))


def digest_after(path, data, *, stops=(), lookup="relaxed", **options):
    """Trains to the end, dropping the pool without closing it after each batch in `stops`."""
    for stop in (*stops, None):
        job = Bags(path, lookup=lookup, dense_every=3, **options)
        for ids in job.run.batches(data):
            job.step(ids)
            if job.run.committed_batch == stop:
                break
        if stop is None:
            digest = job.pool.digest()
            job.pool.close()
            return digest
        job.pool.core.close(False)  # as a kill leaves it
    raise AssertionError


@pytest.mark.parametrize("undo_log", ["background", "fused"])
def test_resume_gives_the_same_bits(tmp_path, undo_log):
    data = Seekable(some_ids(12))
    expected = digest_after(tmp_path / "whole", data, undo_log=undo_log)
    stopped = digest_after(tmp_path / "cut", data, stops=(1, 4, 6, 11), undo_log=undo_log)
    assert stopped == expected
    strict = digest_after(tmp_path / "strict", data, lookup="strict")
    assert strict != expected  # else the comparison would show nothing


def test_rewind_and_forward_again(tmp_path):
    data = Seekable(some_ids(30))
    expected = digest_after(tmp_path / "whole", data)
    job = Bags(tmp_path / "p", undo_log="background", dense_every=3)
    for ids in job.run.batches(data):
        job.step(ids)
        if job.run.committed_batch == 20:
            assert job.run.rewind(5) < 16
    for ids in job.run.batches(data):
        job.step(ids)
    assert job.pool.digest() == expected


def test_the_point_whose_own_log_is_gone_is_not_offered(tmp_path):
    job = Bags(tmp_path / "p", dense_every=1, undo_log="background", log_bytes=8 << 20)
    for ids in job.run.batches(some_ids(40)):
        job.step(ids)
    offered = [point.batch for point in job.pool.rewind_points()]
    reached = [batch for batch, _ in job.pool.core.rewind_points()]
    assert 0 < min(reached) == min(offered) - 1
    with pytest.raises(RecoveryError, match="no exact point"):
        job.run.rewind(40 - min(reached))


def test_a_change_of_mode_is_said_and_is_an_error_when_strict(tmp_path):
    with tcxl.Pool(tmp_path / "p") as pool:
        job = Job(pool)
        for ids in job.run.batches(batches(3)):
            job.run.step(job.loss(ids))
    with tcxl.Pool(tmp_path / "p", lookup="relaxed") as pool:
        job = Job(pool)
        assert any("lookup is relaxed" in notice for notice in job.run.notices)
    with (
        tcxl.Pool(tmp_path / "p", lookup="relaxed") as pool,
        pytest.raises(RecoveryError, match="lookup is relaxed"),
    ):
        Job(pool, strict=True)


def test_a_snapshot_says_that_its_next_lookup_is_strict(tmp_path):
    with tcxl.Pool(tmp_path / "p", lookup="relaxed") as pool:
        job = Job(pool)
        for ids in job.run.batches(batches(3)):
            job.run.step(job.loss(ids))
        pool.snapshot(tmp_path / "copy")
    with tcxl.Pool(tmp_path / "copy", lookup="relaxed") as pool:
        assert any("the next lookup is a strict one" in notice for notice in pool.notices)
        job = Job(pool)
        job.run.step(job.loss(batches(1)[0]))


def test_refused_at_level_power_on_a_file(tmp_path):
    with pytest.raises(DurabilityUnavailable, match="relaxed"):
        tcxl.Pool(tmp_path / "p", durability="power", lookup="relaxed", _medium="block")
    assert not (tmp_path / "p").exists()
    with pytest.raises(ValueError, match="expected 'strict' or 'relaxed'"):
        tcxl.Pool(tmp_path / "p", lookup="loose")
