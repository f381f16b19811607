"""The autograd node between the pool and the dense part of a model."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from trainingcxl.nn.transfer import Transfer
from trainingcxl.pool import Pool
from trainingcxl.transaction import GroupInput

__all__ = ["pooled_lookup"]


def pooled_lookup(
    pool: Pool,
    transfer: Transfer,
    anchor: Tensor,
    inputs: GroupInput,
    weights: Tensor | None,
    *,
    columns: int,
    is_frozen: bool,
) -> Tensor:
    """Pools the rows of one group: float32 (B, columns) on the model's device, differentiable.

    The gradient does not touch the pool: it waits in the pool's transaction for the commit.
    """
    needs_grad = torch.is_grad_enabled() and (
        not is_frozen or (weights is not None and weights.requires_grad)
    )
    if not needs_grad:
        pooled, _ = _run(pool, transfer, inputs, columns, is_training=False)
        return pooled
    pool.transaction.has_forward = True
    result: Tensor = _PooledLookup.apply(
        anchor, weights, pool, transfer, inputs, columns, is_frozen
    )  # type: ignore[no-untyped-call]
    return result


def _run(
    pool: Pool, transfer: Transfer, inputs: GroupInput, columns: int, *, is_training: bool
) -> tuple[Tensor, Any]:
    group, bags, values, offsets, weights = inputs
    host = transfer.output(bags, columns)
    lookup = pool.core.lookup(group, bags, values, offsets, weights, host.numpy(), is_training)
    return transfer.to_device(host), lookup


class _PooledLookup(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        anchor: Tensor,
        weights: Tensor | None,
        pool: Pool,
        transfer: Transfer,
        inputs: GroupInput,
        columns: int,
        is_frozen: bool,
    ) -> Tensor:
        del anchor  # only there so that autograd calls backward
        pooled, lookup = _run(pool, transfer, inputs, columns, is_training=True)
        ctx.pool, ctx.transfer, ctx.lookup, ctx.is_frozen = pool, transfer, lookup, is_frozen
        ctx.weights_shape = None if weights is None else weights.shape
        ctx.weights_device = None if weights is None else weights.device
        return pooled

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        host = ctx.transfer.to_host(grad)
        weight_grad = None
        if ctx.needs_input_grad[1]:
            weight_grad = torch.zeros(ctx.weights_shape)
            ctx.pool.core.per_sample_weight_grad(
                ctx.lookup, host.numpy(), weight_grad.view(-1).numpy()
            )
            weight_grad = weight_grad.to(ctx.weights_device)
        if not ctx.is_frozen:
            ctx.pool.transaction.add_gradient(ctx.lookup, host.numpy())
        return None, weight_grad, None, None, None, None, None
