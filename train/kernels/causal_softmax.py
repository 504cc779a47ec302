"""K6: Megatron's scaled upper-triangular masked softmax, for attention that keeps its scores."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .library import define, differentiate, runs_natively


def causal_softmax(scores: Tensor, scale: float = 1.0) -> Tensor:
    """softmax of `scores` [..., q, k] * `scale` over the keys that a query may see, 0 elsewhere.

    The q queries are the last of the k keys (q <= k): query i sees the first i + 1 + k - q. The
    softmax is computed in float32 whatever the dtype of the scores; what lies above the diagonal,
    nan included, has no part in it.
    """
    if not runs_natively("causal_softmax", scores):
        return _fallback(scores, scale)
    result: Tensor = _apply(scores.contiguous(), scale)
    return result


def _fallback(scores: Tensor, scale: float) -> Tensor:
    queries, keys = scores.shape[-2:]
    future = torch.ones(queries, keys, dtype=torch.bool, device=scores.device)
    wide = scores if scores.dtype == torch.float64 else scores.float()
    masked = (wide * scale).masked_fill(future.triu(1 + keys - queries), -math.inf)
    return masked.softmax(-1).to(scores.dtype)


def _fallback_backward(grad: Tensor, probabilities: Tensor, scale: float) -> Tensor:
    dot = (grad * probabilities).sum(-1, keepdim=True)
    return (grad - dot) * probabilities * scale


def _setup_context(ctx: Any, inputs: tuple[Tensor, float], output: Tensor) -> None:
    ctx.scale = inputs[1]
    ctx.save_for_backward(output)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    (probabilities,) = ctx.saved_tensors
    return _op_backward(grad.contiguous(), probabilities, ctx.scale), None


_op = define(
    "causal_softmax(Tensor scores, float scale) -> Tensor",
    fallback=_fallback,
    fake=lambda scores, scale: torch.empty_like(scores),
)
_op_backward = define(
    "causal_softmax_backward(Tensor grad, Tensor probabilities, float scale) -> Tensor",
    fallback=_fallback_backward,
    fake=lambda grad, probabilities, scale: torch.empty_like(grad),
)
_apply = differentiate(_op, setup_context=_setup_context, backward=_backward)
