"""Kernel times of the dense part on the GPU: a roofline with wave quantisation and launch cost."""

import math
from dataclasses import dataclass

from trainingcxl.sim.hardware import Gpu
from trainingcxl.sim.workload import FLOAT_BYTES, Model

__all__ = ["DenseTimes", "dense_times", "gemm_seconds"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseTimes:
    """Seconds of each kernel group, in launch order, of the dense part of one batch."""

    bottom_forward: tuple[float, ...]
    top: tuple[float, ...]
    bottom_backward: tuple[float, ...]

    @property
    def total(self) -> float:
        """Seconds of all kernels together."""
        return sum(self.bottom_forward) + sum(self.top) + sum(self.bottom_backward)


def gemm_seconds(gpu: Gpu, rows: int, inputs: int, outputs: int, *, backward: bool) -> float:
    """Return the time of one layer: compute, memory or launch bound, whichever is longest.

    Backward computes two products (input and weight gradients), so twice the flops and bytes.
    """
    products = 2 if backward else 1
    tiles = math.ceil(rows / gpu.tile) * math.ceil(outputs / gpu.tile)
    waves = math.ceil(tiles / gpu.processors)
    rate = gpu.peak_tflops * 1e12 * gpu.efficiency * tiles / (waves * gpu.processors)
    flops = products * 2.0 * rows * inputs * outputs
    moved = products * FLOAT_BYTES * (rows * inputs + inputs * outputs + rows * outputs)
    launch = gpu.launches * gpu.launch_us * 1e-6 * (gpu.backward_launches if backward else 1.0)
    return max(flops / rate, moved / _memory_rate(gpu), launch)


def _memory_rate(gpu: Gpu) -> float:
    return gpu.memory_gbps * 1e9 * gpu.memory_efficiency


def dense_times(gpu: Gpu, model: Model, *, batch: int | None = None) -> DenseTimes:
    """Return the kernels of one batch: bottom forward, interaction + top, bottom backward + SGD."""
    rows = model.batch if batch is None else batch
    bottom, top = model.layers
    width = model.pooled_width + model.bottom[-1] + model.interaction_width
    interaction = gpu.interaction_passes * rows * FLOAT_BYTES * width / _memory_rate(gpu)
    launch = gpu.launches * gpu.launch_us * 1e-6
    loss = launch * (1.0 + gpu.backward_launches)
    sgd = max(3.0 * model.dense_bytes / _memory_rate(gpu), launch)
    forward = [gemm_seconds(gpu, rows, i, o, backward=False) for i, o in top]
    backward = [gemm_seconds(gpu, rows, i, o, backward=True) for i, o in reversed(top)]
    share = 1.0 / 3.0
    return DenseTimes(
        bottom_forward=tuple(gemm_seconds(gpu, rows, i, o, backward=False) for i, o in bottom),
        top=(interaction * share, *forward, loss, *backward, interaction * (1.0 - share)),
        bottom_backward=(
            *(gemm_seconds(gpu, rows, i, o, backward=True) for i, o in reversed(bottom)),
            sgd,
        ),
    )
