"""Mixed precision: steps under torch's GradScaler."""

import pytest
import torch
from small_job import Job, batches

from trainingcxl.errors import ConfigError

SCALE = 1024.0


def scaler_of(**options):
    return torch.amp.GradScaler("cpu", init_scale=SCALE, growth_interval=3, **options)


def trained(bench, name, step, scaler=None):
    state = {} if scaler is None else {"scaler": scaler}
    job = Job(bench.open(bench.folder / name), state=state, sparse_of=lambda ids: ids)
    for ids in batches(8):
        step(job, job.loss(ids))
    head = [p.detach().clone() for p in job.head.parameters()]
    return job.weight.copy(), head, job.pool


def test_scaled_steps_equal_plain_ones(bench):
    """The scale is a power of two: it changes no bit of what it is taken off again."""
    plain, plain_head, _ = trained(bench, "plain", lambda job, loss: job.run.step(loss))
    scaler = scaler_of()
    weight, head, _ = trained(
        bench, "scaled", lambda job, loss: job.run.step(loss, scaler=scaler), scaler
    )
    assert scaler.get_scale() == 4 * SCALE  # it grew after 3 and after 6 steps
    assert (weight == plain).all()
    assert all(torch.equal(a, b) for a, b in zip(head, plain_head, strict=True))


def test_by_hand_with_clipping(bench):
    """unscale_, clip, step, commit; the norm is that of the gradients without the scale."""

    def clipped(job, loss):
        loss.backward()
        norms.append(job.run.clip_grad_norm_(0.5))
        job.run.commit()
        job.dense.zero_grad()

    def scaled(job, loss):
        scaler.scale(loss).backward()
        scaler.unscale_(job.dense)
        job.run.unscale_(scaler)
        norms.append(job.run.clip_grad_norm_(0.5))
        scaler.step(job.dense)
        scaler.update()
        job.run.commit(step_dense=False)
        job.dense.zero_grad()

    norms, scaler = [], scaler_of()
    plain, _, _ = trained(bench, "plain", clipped)
    expected, norms = norms, []
    weight, _, _ = trained(bench, "scaled", scaled)
    assert norms == pytest.approx(expected, rel=1e-6)
    assert weight == pytest.approx(plain, rel=1e-6)


@pytest.mark.parametrize("where", ["rows", "dense"])
def test_overflow_skips_the_batch_and_lowers_the_scale(bench, where):
    scaler = scaler_of()
    job = Job(bench.open(), state={"scaler": scaler}, sparse_of=lambda ids: ids)
    first, second = batches(2)
    job.run.step(job.loss(first), scaler=scaler)
    before, head = job.weight.copy(), job.head.weight.detach().clone()
    loss = job.loss(second)
    job.head.weight.register_hook(
        lambda grad: torch.full_like(grad, torch.inf) if where == "dense" else grad
    )
    if where == "rows":
        pooled = job.bags(second)
        loss = job.head(pooled).sum() + (pooled * 1e38).sum()  # times the scale: infinite
    job.run.step(loss, scaler=scaler)
    assert job.run.committed_batch == 2
    assert scaler.get_scale() == SCALE / 2
    assert (job.weight == before).all()
    assert torch.equal(job.head.weight, head)


def test_scale_goes_on_after_a_resume(bench):
    scaler = scaler_of()
    _, _, pool = trained(bench, "pool", lambda job, loss: job.run.step(loss, scaler=scaler), scaler)
    pool.close()
    again = scaler_of()
    Job(bench.open(bench.folder / "pool"), state={"scaler": again}, sparse_of=lambda ids: ids)
    assert again.state_dict() == scaler.state_dict()


def test_scaler_that_is_disabled_changes_nothing(bench):
    scaler = scaler_of(enabled=False)
    plain, _, _ = trained(bench, "plain", lambda job, loss: job.run.step(loss))
    weight, _, _ = trained(bench, "off", lambda job, loss: job.run.step(loss, scaler=scaler))
    assert (weight == plain).all()


def test_scaler_without_a_dense_optimizer(bench):
    job = Job(bench.open(), dense=False, sparse_of=lambda ids: ids)
    with pytest.raises(ConfigError, match="dense optimizer"):
        job.run.step(job.loss(batches(1)[0]), scaler=scaler_of())


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_dense_gradient_that_is_not_finite(bench, bad):
    """Else the dense part would be durable with nan in it, and nothing to go back to."""
    job = Job(bench.open(), sparse_of=lambda ids: ids)
    first, second = batches(2)
    job.run.step(job.loss(first))
    before, head = job.weight.copy(), job.head.weight.detach().clone()
    job.loss(second).backward()
    job.head.weight.grad[0, 0] = bad
    with pytest.raises(ValueError, match=r"'1.weight'[\s\S]*state:[\s\S]*do:"):
        job.run.commit()
    assert (job.weight == before).all()
    assert torch.equal(job.head.weight, head)
    job.run.skip()
    assert job.run.committed_batch == 2
    job.run.step(job.loss(first))
    assert torch.isfinite(job.head.weight).all()
