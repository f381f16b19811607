"""Moves pooled rows to the model's device and their gradients back.

One small interface, so that the whole path runs in CPU tests with a fake device.
"""

from typing import Protocol

import torch
from torch import Tensor

__all__ = ["HostTransfer", "PinnedTransfer", "Transfer", "transfer_for"]


class Transfer(Protocol):
    """How pooled rows reach the dense part of the model."""

    def output(self, num_bags: int, num_columns: int) -> Tensor:
        """Host buffer for pooled rows, float32 (B, columns), to be filled by the engine."""
        ...

    def to_device(self, pooled: Tensor) -> Tensor:
        """The filled buffer as a tensor of the model's device."""
        ...

    def to_host(self, grad: Tensor) -> Tensor:
        """Gradient of the pooled rows as a contiguous float32 host tensor; ready when this
        returns.
        """
        ...


class HostTransfer:
    """The model runs on the CPU: nothing moves."""

    def output(self, num_bags: int, num_columns: int) -> Tensor:
        """Fresh memory: it becomes the result itself."""
        return torch.empty(num_bags, num_columns)

    def to_device(self, pooled: Tensor) -> Tensor:
        """`pooled` itself."""
        return pooled

    def to_host(self, grad: Tensor) -> Tensor:
        """`grad`, copied only where its type or layout asks for it."""
        return grad.to(torch.float32).contiguous()


class PinnedTransfer:
    """The model runs on a CUDA device: pinned buffers both ways, reused when the copies out of
    them are done.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: list[Tensor] = []
        self._copied: list[torch.cuda.Event | None] = []
        self._next = 0
        self._grad: Tensor | None = None

    def output(self, num_bags: int, num_columns: int) -> Tensor:
        """One of two pinned buffers, once the copy out of it is done."""
        size = num_bags * num_columns
        while len(self._buffers) < 2:
            self._buffers.append(torch.empty(0))
            self._copied.append(None)
        self._next = 1 - self._next
        event = self._copied[self._next]
        if event is not None:
            event.synchronize()
        if self._buffers[self._next].numel() < size:
            self._buffers[self._next] = torch.empty(size, pin_memory=True)
        return self._buffers[self._next][:size].view(num_bags, num_columns)

    def to_device(self, pooled: Tensor) -> Tensor:
        """A copy on the device, ordered on its current stream."""
        moved = pooled.to(self._device, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        self._copied[self._next] = event
        return moved

    def to_host(self, grad: Tensor) -> Tensor:
        """A pinned copy; waits for it."""
        # The gradient lives until its commit, so each gets a buffer of its own from the pinned
        # allocator's cache.
        host = torch.empty(grad.shape, dtype=torch.float32, pin_memory=True)
        host.copy_(grad, non_blocking=True)
        torch.cuda.current_stream(self._device).synchronize()
        return host


def transfer_for(device: torch.device) -> Transfer:
    """The transfer between host memory and `device`."""
    if device.type == "cpu":
        return HostTransfer()
    if device.type == "cuda":
        return PinnedTransfer(device)
    raise ValueError(f"device '{device}' is not supported; expected cpu or cuda")
