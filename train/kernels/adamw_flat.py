"""K2: one AdamW step over flat tensors, from scaled gradients to low-precision weights."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .library import define


def _fallback(
    p: list[Tensor],
    m: list[Tensor],
    v: list[Tensor],
    g: list[Tensor],
    out: list[Tensor],
    grad_mul: Tensor,
    *hyper: Any,
) -> Tensor:
    outs: Sequence[Tensor | None] = out or [None] * len(p)
    tensors = zip(p, m, v, g, outs, strict=True)
    return torch.stack([_one(*each, grad_mul, *hyper) for each in tensors])


def _one(
    p: Tensor,
    m: Tensor,
    v: Tensor,
    g: Tensor,
    out: Tensor | None,
    grad_mul: Tensor,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
) -> Tensor:
    if p.numel() == 0 or grad_mul < 0:
        return p.new_zeros(6, dtype=torch.float64)
    grad = g.to(p.dtype) * grad_mul
    before = p.clone()
    p.mul_(1 - lr * weight_decay)
    m.lerp_(grad, 1 - beta1)
    v.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    ratio = m / (v.sqrt() / math.sqrt(1 - beta2**step)).add_(eps)
    p.sub_(ratio, alpha=lr / (1 - beta1**step))
    if out is not None:
        out.copy_(p.view_as(out))
    change = p - before
    update = _squared(ratio) / (1 - beta1**step) ** 2
    zeros = (g == 0).sum().double()
    sums = (v.double().sum(), v.max().double(), _squared(p), _squared(change), update, zeros)
    return torch.stack(sums)


def _squared(x: Tensor) -> Tensor:
    return x.double().square().sum()


def _fake(p: list[Tensor], *rest: object) -> Tensor:
    return p[0].new_empty((len(p), 6), dtype=torch.float64)


_op = define(
    "adamw_flat_(Tensor(a!)[] p, Tensor(b!)[] m, Tensor(c!)[] v, Tensor[] g, Tensor(d!)[] out, "
    "Tensor grad_mul, float lr, float beta1, float beta2, float eps, float weight_decay, int step)"
    " -> Tensor",
    fallback=_fallback,
    fake=_fake,
)


def adamw_flat_(
    p: Sequence[Tensor],
    m: Sequence[Tensor],
    v: Sequence[Tensor],
    g: Sequence[Tensor],
    out: Sequence[Tensor],
    grad_mul: Tensor,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    step: int,
) -> Tensor:
    """Step the weights p and moments m and v in place, with the gradients g * grad_mul: all of them
    in one call, one after the other on a CPU and in a launch for each 32 on a GPU.

    The formula of torch.optim.AdamW (Loshchilov and Hutter, arXiv:1711.05101), `step` counted from
    1. At least one p, m, v and g, the nth of each contiguous and of one length: p, m and v float32,
    g float32 or 16-bit, as all g are; out, if there are any, gets the new weights, in g's format or
    from a float32 g in any. grad_mul: one float32 on p's device, which unscales and clips at once;
    where it is negative, all stays as it is, and the statistics are 0.
    Returns float64 [tensors, 6]: of each [|v|_1, max v, |p|^2, |change of p|^2, |update|^2, zeros]
    after the step, the same for any number of threads on a CPU: the update is Adam's m / (sqrt(v) +
    eps), both corrected, before rate and decay; zeros is how many elements of g are 0. No tensor
    depends on the others.
    """
    stats: Tensor = _op(
        p, m, v, g, out, grad_mul, lr, betas[0], betas[1], eps, weight_decay, step
    )  # fmt: skip
    return stats
