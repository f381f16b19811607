"""Linear layers whose matrix products on a CPU are torch's own, or those of oneDNN.

Torch multiplies float32 matrices with MKL on x86, which takes a slow path on some CPUs and settings
(several times slower than oneDNN's was seen). Both are of full float32 accuracy; their bits differ.

Letters after an underscore: B samples, I inputs, O outputs.
"""

import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

__all__ = [
    "GEMMS",
    "Linear",
    "Timing",
    "has_onednn",
    "layer_flops",
    "measure_gemms",
    "set_gemm",
]

GEMMS = ("mkl", "onednn")
_ROUNDS = 7
_SECONDS_MAX = 2.0  # for slow CPUs: then fewer rounds


class Linear(nn.Linear):
    """nn.Linear with a choice of the matrix product: `gemm` is one of GEMMS."""

    gemm = "mkl"

    def forward(self, input: Tensor) -> Tensor:
        """The layer's output, (B, O)."""
        is_plain = input.dtype == torch.float32 and input.device.type == "cpu" and input.dim() == 2
        if self.gemm == "mkl" or not is_plain or torch.is_autocast_enabled("cpu"):
            return super().forward(input)
        result: Tensor = _OneDnnLinear.apply(input, self.weight, self.bias)  # type: ignore[no-untyped-call]
        return result


class _OneDnnLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input_BI: Tensor, weight_OI: Tensor, bias_O: Tensor) -> Tensor:
        ctx.save_for_backward(input_BI, weight_OI)
        return _product(input_BI, weight_OI, bias_O)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BO: Tensor) -> tuple[Tensor | None, Tensor, Tensor]:
        input_BI, weight_OI = ctx.saved_tensors
        grad_BO = grad_BO.contiguous()
        grad_BI = _product(grad_BO, weight_OI.t(), None) if ctx.needs_input_grad[0] else None
        return grad_BI, _product(grad_BO.t(), input_BI.t(), None), grad_BO.sum(0)


def _product(left: Tensor, right: Tensor, bias: Tensor | None) -> Tensor:
    """Left @ right.T + bias."""
    found: Tensor = torch.ops.mkldnn._linear_pointwise(left, right, bias, "none", [], "")
    return found


def has_onednn() -> bool:
    """Whether this torch has oneDNN, the operator for it, and full float32 accuracy there.

    ONEDNN_DEFAULT_FPMATH_MODE and torch.set_float32_matmul_precision may allow it less, on CPUs
    with matrix units.
    """
    is_built: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if not is_built or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    values = torch.arange(64 * 512, dtype=torch.float32).sin().view(64, 512)
    exact = values.double() @ values.double().t()
    error = (_product(values, values, None) - exact).abs().max()
    return bool(error < 2e-5 * exact.abs().max())  # sums of 512 terms in any order


def set_gemm(model: nn.Module, gemm: str) -> None:
    """Choose the matrix product of all `Linear` layers of the model."""
    assert gemm in GEMMS
    for module in model.modules():
        if isinstance(module, Linear):
            module.gemm = gemm


@dataclass(frozen=True, slots=True)
class Timing:
    """Milliseconds of forward and backward of a model's layers, over some rounds."""

    least: float
    median: float

    def is_beaten_by(self, other: "Timing", factor: float) -> bool:
        """Whether the other is faster by more than the factor, disturbed or not."""
        return other.least * factor < self.least and other.median * factor < self.median


def layer_flops(model: nn.Module, batch_size: int) -> int:
    """Floating-point operations of forward and backward of the model's `Linear` layers."""
    layers = (module for module in model.modules() if isinstance(module, Linear))
    return sum(6 * batch_size * layer.in_features * layer.out_features for layer in layers)


def measure_gemms(model: nn.Module, batch_size: int) -> dict[str, Timing]:
    """Time forward and backward of the model's own `Linear` layers, a batch, by each of GEMMS.

    The candidates take turns. No generator is drawn from, and the model's gradients stay as they
    are.
    """
    layers = [module for module in model.modules() if isinstance(module, Linear)]
    inputs = [torch.ones(batch_size, layer.in_features, requires_grad=True) for layer in layers]
    before = [layer.gemm for layer in layers]
    times: dict[str, list[float]] = {gemm: [] for gemm in GEMMS}
    started = time.perf_counter()
    try:
        for number in range(1 + _ROUNDS):
            for gemm in GEMMS:
                set_gemm(model, gemm)
                spent = _time_layers(layers, inputs)
                if number > 0:  # the first warms up
                    times[gemm].append(spent)
            if number > 0 and time.perf_counter() - started > _SECONDS_MAX:
                break
    finally:
        for layer, gemm in zip(layers, before, strict=True):
            layer.gemm = gemm
    return {
        gemm: Timing(least=1e3 * min(spent), median=1e3 * statistics.median(spent))
        for gemm, spent in times.items()
    }


def _time_layers(layers: list[Linear], inputs: list[Tensor]) -> float:
    begin = time.perf_counter()
    for layer, given in zip(layers, inputs, strict=True):
        output = layer(given)
        torch.autograd.grad(output, [given, *layer.parameters()], torch.ones_like(output))
    return time.perf_counter() - begin
