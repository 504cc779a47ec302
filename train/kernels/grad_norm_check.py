"""K1: the squared 2-norm of a gradient and the count of its inf and nan, in one read."""

from __future__ import annotations

import torch
from torch import Tensor

from .library import define


def _fallback(grad: Tensor) -> Tensor:
    wide = grad.detach().double()
    return torch.stack([(wide * wide).sum(), (~torch.isfinite(wide)).sum().double()])


def _fake(grad: Tensor) -> Tensor:
    return grad.new_empty(2, dtype=torch.float64)


_op = define("grad_norm_check(Tensor grad) -> Tensor", fallback=_fallback, fake=_fake)


def grad_norm_check(grad: Tensor) -> Tensor:
    """[sum of squares, number of inf and nan] as float64 on the gradient's device.

    `grad`: contiguous, any shape, float32, bfloat16 or float16. Squares are summed in float64: no
    finite gradient overflows. With a nonfinite element the sum is inf or nan. On a CPU the result
    is the same for any number of threads.
    """
    result: Tensor = _op(grad)
    return result
