"""K3: GELU of x + bias in one pass, and its gradients in another."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .library import define, differentiate, runs_natively

TWO_K0 = 2 * math.sqrt(2 / math.pi)
K1 = 0.044715
FLAT = 16  # beyond it the gate is 0 or 1, whatever power of x it is multiplied with


def bias_gelu(x: Tensor, bias: Tensor) -> Tensor:
    """The tanh form of GELU of `x` [..., n] + `bias` [n], in the dtype of `x`.

    Natively x is kept for the backward, not x + bias; the sum over rows that is the gradient of
    the bias does not depend on the number of threads.
    """
    if not runs_natively("bias_gelu", x):
        return F.gelu(x + bias, approximate="tanh")
    result: Tensor = _apply(x.contiguous(), bias)
    return result


def _fallback(x: Tensor, bias: Tensor) -> Tensor:
    return F.gelu(x + bias, approximate="tanh")


def _fallback_backward(grad: Tensor, x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    t = x + bias
    gate = torch.sigmoid(TWO_K0 * t * (1 + K1 * t * t))
    bent = t.clamp(-FLAT, FLAT)
    dx = grad * (gate + bent * gate * (1 - gate) * TWO_K0 * (1 + 3 * K1 * bent * bent))
    return dx, dx.reshape(-1, bias.numel()).sum(0)


def _setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    x, bias = ctx.saved_tensors
    dx, dbias = _op_backward(grad.contiguous(), x, bias)
    return dx, dbias


_op = define(
    "bias_gelu(Tensor x, Tensor bias) -> Tensor",
    fallback=_fallback,
    fake=lambda x, bias: torch.empty_like(x),
)
_op_backward = define(
    "bias_gelu_backward(Tensor grad, Tensor x, Tensor bias) -> (Tensor, Tensor)",
    fallback=_fallback_backward,
    fake=lambda grad, x, bias: (torch.empty_like(x), torch.empty_like(bias)),
)
_apply = differentiate(_op, setup_context=_setup_context, backward=_backward)
