"""Row optimizers: what a commit does to the rows of a batch.

They are `torch.optim.Optimizer`s without parameters of their own, so that every torch learning-rate
scheduler drives them. The arithmetic is native (csrc/kernels.h): one gradient sum per distinct row,
then one update.
"""

from collections.abc import Callable
from typing import Any, ClassVar, Literal

import torch

__all__ = ["SGD", "Adagrad", "RowOptimizer", "RowWiseAdagrad"]


class RowOptimizer(torch.optim.Optimizer):
    """Base of the row optimizers. `param_groups[0]["lr"]` is the learning rate of the next
    commit.
    """

    kind: ClassVar[Literal["sgd", "adagrad", "rowwise-adagrad"]]

    def __init__(self, lr: float, eps: float) -> None:
        if not lr >= 0.0:
            raise ValueError(f"lr is {lr}, expected 0 or more")
        if not eps >= 0.0:
            raise ValueError(f"eps is {eps}, expected 0 or more")
        # torch wants a parameter; this one never gets a gradient.
        super().__init__([torch.zeros(())], {"lr": lr, "eps": eps})

    def row_settings(self) -> tuple[float, float]:
        """Learning rate and eps of the next row update."""
        group = self.param_groups[0]
        return float(group["lr"]), float(group["eps"])

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Counts a commit, which schedulers want to see. The rows themselves change in the
        commit.
        """


class SGD(RowOptimizer):
    """w -= lr * g, with g the sum of the row's gradients in the batch. No state."""

    kind = "sgd"

    def __init__(self, lr: float) -> None:
        super().__init__(lr, 0.0)


class Adagrad(RowOptimizer):
    """s += g * g; w -= lr * g / (sqrt(s) + eps), as torch.optim.Adagrad. State: float32 (D,) a
    row.
    """

    kind = "adagrad"

    def __init__(self, lr: float, eps: float = 1e-10) -> None:
        super().__init__(lr, eps)


class RowWiseAdagrad(RowOptimizer):
    """s += mean(g * g); w -= lr / (sqrt(s) + eps) * g, as FBGEMM's. State: one float32 a row."""

    kind = "rowwise-adagrad"

    def __init__(self, lr: float, eps: float = 1e-8) -> None:
        super().__init__(lr, eps)
