"""K4: sum = residual + dropout(x + bias) and LayerNorm(sum) in one pass, gradients in another."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .library import define, differentiate, runs_natively


def bias_dropout_add_layer_norm(
    x: Tensor, bias: Tensor, residual: Tensor, weight: Tensor, shift: Tensor, eps: float, p: float
) -> tuple[Tensor, Tensor]:
    """(LayerNorm(s) * weight + shift, s) with s = residual + dropout(x + bias); x is [..., n].

    `p` is the share dropped, 0 outside training. Natively the mask is a function of a seed that is
    drawn from torch's CPU generator at each call, so it is computed again in backward, and again
    by activation checkpointing, and is never kept.
    """
    if not runs_natively("bias_dropout_add_layer_norm", x):
        s = residual + F.dropout(x + bias, p)
        return F.layer_norm(s, weight.shape, weight, shift, eps), s
    seed = torch.randint(2**32, ()) if p > 0 else None
    out, s, _ = _apply(x.contiguous(), bias, residual.contiguous(), weight, shift, eps, p, seed)
    return out, s


def philox(column: Tensor, row: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """Two 32-bit words of Philox2x32-10 (Salmon et al., SC 2011) for each counter, as int64."""
    low = 0xFFFFFFFF
    first, second = column + 0 * row, row + 0 * column
    for _ in range(10):
        product = first * 0xD256D193  # of 64 bits: int64 wraps around and keeps them all
        first, second = ((product >> 32) & low) ^ seed ^ second, product & low
        seed = (seed + 0x9E3779B9) & low
    return first, second


def _keep(like: Tensor, p: float, seed: Tensor) -> Tensor:
    """0 or 1 / (1 - p) for each element of `like` [..., n]."""
    columns = like.shape[-1]
    half = (columns + 1) // 2
    column = torch.arange(half, device=like.device)
    row = torch.arange(like.numel() // max(columns, 1), device=like.device)[:, None]
    words = torch.cat(philox(column, row, int(seed) & 0xFFFFFFFF), dim=1)[:, :columns]
    return (words >= int(p * 2**32)).to(like.dtype).view_as(like) / (1 - p)


def _fallback(
    x: Tensor,
    bias: Tensor,
    residual: Tensor,
    weight: Tensor,
    shift: Tensor,
    eps: float,
    p: float,
    seed: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    dropped = x + bias if seed is None else (x + bias) * _keep(x, p, seed)
    s = residual + dropped
    wide = s if s.dtype == torch.float64 else s.float()
    mean = wide.mean(-1, keepdim=True)
    rstd = torch.rsqrt((wide - mean).square().mean(-1, keepdim=True) + eps)
    out = ((wide - mean) * rstd * weight + shift).to(s.dtype)
    return out, s, torch.cat((mean, rstd), dim=-1).view(-1, 2)


def _fallback_backward(
    grad_out: Tensor,
    grad_sum: Tensor,
    s: Tensor,
    stats: Tensor,
    weight: Tensor,
    p: float,
    seed: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    n = weight.numel()
    mean, rstd = stats[:, :1], stats[:, 1:]
    grad = grad_out.reshape(-1, n).to(stats.dtype)
    normal = (s.reshape(-1, n) - mean) * rstd
    scaled = grad * weight
    through = scaled - scaled.mean(-1, keepdim=True)
    through = (through - normal * (scaled * normal).mean(-1, keepdim=True)) * rstd
    through = through + grad_sum.reshape(-1, n)
    dx = through if seed is None else through * _keep(s, p, seed).view_as(through)
    return (
        s.new_empty(0) if seed is None else dx.view_as(s).to(s.dtype),
        through.view_as(s).to(s.dtype),
        dx.sum(0).to(weight.dtype),
        (grad * normal).sum(0).to(weight.dtype),
        grad.sum(0).to(weight.dtype),
    )


def _fake(x: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    rows = x.numel() // x.shape[-1] if x.shape[-1] else 0
    stats = x.new_empty(rows, 2, dtype=_stats_dtype(x))
    return torch.empty_like(x), torch.empty_like(x), stats


def _fake_backward(
    grad_out: Tensor,
    grad_sum: Tensor,
    s: Tensor,
    stats: Tensor,
    weight: Tensor,
    p: float,
    seed: Tensor | None,
) -> tuple[Tensor, ...]:
    dx = s.new_empty(0) if seed is None else torch.empty_like(s)
    vectors = (torch.empty_like(weight) for _ in range(3))
    return (dx, torch.empty_like(s), *vectors)


def _stats_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    weight, ctx.p, seed = inputs[3], inputs[6], inputs[7]
    ctx.save_for_backward(output[1], output[2], weight, seed)
    ctx.mark_non_differentiable(output[2])


def _backward(ctx: Any, grad_out: Tensor, grad_sum: Tensor, _: Tensor) -> tuple[Any, ...]:
    s, stats, weight, seed = ctx.saved_tensors
    dx, dresidual, dbias, dweight, dshift = _op_backward(
        grad_out.contiguous(), grad_sum.contiguous(), s, stats, weight, ctx.p, seed
    )
    return dresidual if seed is None else dx, dbias, dresidual, dweight, dshift, None, None, None


_op = define(
    "bias_dropout_add_layer_norm(Tensor x, Tensor bias, Tensor residual, Tensor weight, "
    "Tensor shift, float eps, float p, Tensor? seed) -> (Tensor, Tensor, Tensor)",
    fallback=_fallback,
    fake=_fake,
)
_op_backward = define(
    "bias_dropout_add_layer_norm_backward(Tensor grad_out, Tensor grad_sum, Tensor sum, "
    "Tensor stats, Tensor weight, float p, Tensor? seed) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    fallback=_fallback_backward,
    fake=_fake_backward,
)
_apply = differentiate(_op, setup_context=_setup_context, backward=_backward)
