"""Gradients of the dense part and of rows, which no torch optimizer knows: clipping by their common
norm, steps under a GradScaler.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from trainingcxl.errors import ConfigError

__all__ = ["check_dense_grads", "clip_dense_grads", "scaled_dense_step"]


def clip_dense_grads(model: nn.Module, squares: float, max_norm: float) -> tuple[float, float]:
    """Scales the dense gradients as a norm of at most `max_norm` for all gradients asks.

    Args:
        model: Whose parameters have gradients.
        squares: Sum of the squares of the rows' gradients, summed per distinct row.
        max_norm: Bound.

    Returns:
        The norm before, and the factor that is left for the rows.
    """
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    squares += sum(float(grad.detach().double().square().sum()) for grad in grads)
    norm = math.sqrt(squares)
    scale = min(1.0, max_norm / (norm + 1e-6))
    if scale < 1.0:
        for grad in grads:
            grad.mul_(scale)
    return norm, scale


def scaled_dense_step(
    loss: Tensor,
    scaler: torch.amp.GradScaler,
    optimizer: torch.optim.Optimizer | None,
    check_rows: Callable[[], None],
) -> float | None:
    """Backward of the scaled loss, the dense optimizer's step, the scaler's update.

    Args:
        loss: A scalar.
        scaler: As made by the loop.
        optimizer: Of the dense part.
        check_rows: Raises ValueError if a row's gradient is not finite.

    Returns:
        The scale that the rows' gradients still have; None if the batch must be skipped, as a
        gradient was not finite: nothing has stepped and the scale went down.

    Raises:
        ConfigError: There is no dense optimizer.
    """
    if optimizer is None:
        raise ConfigError("a GradScaler needs the dense optimizer: it watches its gradients")
    scale = scaler.get_scale()
    scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
    try:
        check_rows()
    except ValueError:
        if not scaler.is_enabled():
            raise
        _make_infinite(optimizer)  # the scaler looks at nothing else
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    return None if scaler.get_scale() < scale else scale


def check_dense_grads(model: nn.Module) -> None:
    """Refuses gradients that would make parameters infinite or nan.

    Raises:
        ValueError: One is not finite; names the parameter.
    """
    named = [(name, _values(p.grad)) for name, p in model.named_parameters() if p.grad is not None]
    extremes = [torch.stack(torch.aminmax(grad)).float() for _, grad in named if grad.numel() > 0]
    if not extremes or bool(torch.isfinite(torch.cat(extremes)).all()):
        return
    name = next(name for name, grad in named if not bool(torch.isfinite(grad).all()))
    raise ValueError(
        f"the gradient of '{name}' is not finite\n  state: the pool and the dense part are "
        "unchanged\n  do:    run.skip() leaves the batch out"
    )


def _values(grad: Tensor) -> Tensor:
    return grad.detach()._values() if grad.is_sparse else grad.detach()


def _make_infinite(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                parameter.grad.fill_(torch.inf)
                return
