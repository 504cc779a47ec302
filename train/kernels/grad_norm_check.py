"""K1: the squared 2-norms of gradients and the counts of their inf and nan, in one read."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .library import define


def _fallback(grads: list[Tensor]) -> Tensor:
    return torch.stack([_one(grad.detach().double()) for grad in grads])


def _one(wide: Tensor) -> Tensor:
    return torch.stack([(wide * wide).sum(), (~torch.isfinite(wide)).sum().double()])


def _fake(grads: list[Tensor]) -> Tensor:
    return grads[0].new_empty((len(grads), 2), dtype=torch.float64)


_op = define("grad_norm_check(Tensor[] grads) -> Tensor", fallback=_fallback, fake=_fake)


def grad_norm_check(grads: Sequence[Tensor]) -> Tensor:
    """[tensors, 2]: of each [sum of squares, number of inf and nan], float64, on their device.

    `grads`: at least one; contiguous, any shape, all float32, bfloat16 or float16. Squares are
    summed in float64: no finite gradient overflows. With a nonfinite element the sum is inf or nan.
    On a CPU the result is the same for any number of threads.
    """
    result: Tensor = _op(grads)
    return result
