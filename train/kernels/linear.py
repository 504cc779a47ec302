"""Matrix products by the faster of the two libraries that torch has on a CPU."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .library import load


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., k] times the transpose of `weight` [n, k], plus `bias` [n], as F.linear.

    In float32 torch asks MKL, which has AVX-512 code for Intel's CPUs alone; on any other CPU with
    AVX-512 this asks torch's oneDNN instead, forward and backward.
    """
    if not uses_onednn(x):
        return F.linear(x, weight, bias)
    result: Tensor = _OneDnnLinear.apply(x, weight, bias)  # type: ignore[no-untyped-call]
    return result


def uses_onednn(x: Tensor) -> bool:
    """Whether products of tensors like this one go to oneDNN."""
    return (
        not torch.compiler.is_compiling()  # inductor can't call it on weights that change
        and x.dtype == torch.float32
        and x.device.type == "cpu"
        and x.numel() > 0  # oneDNN refuses an empty one
        and load() is None
        and _onednn_is_faster()
    )


def multiply(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """oneDNN's a [m, k] times the transpose of b [n, k], plus `bias` [n]; both may be transposed
    views: such an `a` is copied first, such a `b` is used as it lies, which is the fastest."""
    result: Tensor = torch.ops.mkldnn._linear_pointwise(a, b, bias, "none", [], "")
    return result


def multiply_columns(a: Tensor, b: Tensor) -> Tensor:
    """oneDNN's transpose of a [k, m] times b [k, n], contiguous: the smaller one is copied."""
    if a.shape[1] <= b.shape[1]:
        return multiply(a.t(), b.t())
    return multiply(b.t(), a.t()).t().contiguous()


@cache
def _onednn_is_faster() -> bool:
    if not (torch.backends.mkldnn.is_available() and torch.backends.mkl.is_available()):  # type: ignore[no-untyped-call]
        return False
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    if torch.backends.cpu.get_cpu_capability() != "AVX512":
        return False
    try:
        return "GenuineIntel" not in Path("/proc/cpuinfo").read_text(encoding="ascii")
    except OSError:
        return False


class _OneDnnLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        ctx.save_for_backward(rows, weight)
        ctx.shape = x.shape
        return multiply(rows, weight, bias).view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight = ctx.saved_tensors
        grad = grad.reshape(-1, grad.shape[-1])
        for_x, for_weight, for_bias = ctx.needs_input_grad
        return (
            multiply(grad, weight.t()).view(ctx.shape) if for_x else None,
            multiply_columns(grad, rows) if for_weight else None,
            grad.sum(0) if for_bias else None,
        )
