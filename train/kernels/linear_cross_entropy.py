"""K5: output matrix and cross-entropy together, in chunks of rows: the logits never exist whole."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .library import define, runs_natively
from .linear import linear, multiply, uses_onednn

CHUNK_BYTES = 64 * 2**20
GPU_ROWS = 4096  # fewer leave a GPU idle, and add up the large gradient more often
MOST_SUMMED = 4096  # x of up to 16 in every row is then no more than 65504


def linear_cross_entropy(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy, a float32 scalar, of x [..., h] times weightᵀ [h, v] against `targets`.

    Natively the gradients are made in the forward, where the chunk of logits is at hand: no more
    than CHUNK_BYTES of logits exist on a CPU, or one row; on a GPU those of GPU_ROWS rows. In
    float16 they are made of the sum, not of the mean, so that they do not vanish before the loss
    scale reaches them; of MOST_SUMMED rows at the most, so that they do not overflow. Every target
    must be in [0, v).
    """
    rows, wanted = x.reshape(-1, x.shape[-1]), targets.reshape(-1)
    if not runs_natively("softmax_cross_entropy_", x):
        return F.cross_entropy(F.linear(rows, weight).float(), wanted)
    if not torch.is_grad_enabled():
        return _losses(rows, weight, wanted).mean()
    loss: Tensor = _LinearCrossEntropy.apply(rows, weight, wanted)  # type: ignore[no-untyped-call]
    return loss


def softmax_cross_entropy_(logits: Tensor, targets: Tensor, scale: float) -> Tensor:
    """The losses [n], float32, of `logits` [n, v], which become (softmax - onehot) * `scale`."""
    result: Tensor = _op(logits, targets, scale)
    return result


def _fallback(logits: Tensor, targets: Tensor, scale: float) -> Tensor:
    wide = logits if logits.dtype == torch.float64 else logits.float()
    logarithms = wide.log_softmax(-1)
    picked = targets[:, None]
    losses = -logarithms.gather(1, picked).squeeze(1)
    gradient = logarithms.exp_()
    gradient.scatter_add_(1, picked, gradient.new_full(picked.shape, -1.0))
    logits.copy_(gradient.mul_(scale))
    return losses


_op = define(
    "softmax_cross_entropy_(Tensor(a!) logits, Tensor targets, float scale) -> Tensor",
    fallback=_fallback,
    fake=lambda logits, targets, scale: logits.new_empty(
        logits.shape[0], dtype=torch.float64 if logits.dtype == torch.float64 else torch.float32
    ),
)


def _losses(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    losses = x.new_empty(x.shape[0], dtype=torch.float32)
    for part in _parts(x, weight):
        logits = linear(x[part], weight)
        losses[part] = softmax_cross_entropy_(logits, targets[part], 0.0)
    return losses


def _parts(x: Tensor, weight: Tensor) -> list[slice]:
    """The rows of x in chunks whose logits are made at once."""
    fit = max(1, CHUNK_BYTES // (weight.shape[0] * x.element_size()))
    chunk = fit if x.device.type == "cpu" else GPU_ROWS
    return [slice(first, first + chunk) for first in range(0, x.shape[0], chunk)]


def _chunks(
    x: Tensor, weight: Tensor, targets: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The losses, and the gradients of their sum times `scale`, a chunk of rows at a time."""
    onednn = uses_onednn(x)
    dx, losses = torch.empty_like(x), x.new_empty(x.shape[0], dtype=torch.float32)
    total: Tensor | None = None
    parts = _parts(x, weight)
    for part in parts:
        logits = multiply(x[part], weight) if onednn else torch.mm(x[part], weight.t())
        losses[part] = softmax_cross_entropy_(logits, targets[part], scale)
        if onednn:
            dx[part] = multiply(logits, weight.t())
            share = multiply(x[part].t(), logits.t())  # [h, v]: only this order is fast
        else:
            torch.mm(logits, weight, out=dx[part])
            share = torch.mm(logits.t(), x[part])
        if total is None:
            total = share if len(parts) == 1 else share.float()
        else:
            total += share
    if total is None:
        return losses, dx, torch.zeros_like(weight)
    return losses, dx, (total.t() if onednn else total).to(weight.dtype).contiguous()


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        count = max(x.shape[0], 1)
        ctx.scale = min(count, MOST_SUMMED) if x.dtype == torch.float16 else 1
        losses, dx, dweight = _chunks(x, weight, targets, ctx.scale / count)
        ctx.save_for_backward(dx, dweight)
        return losses.mean()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        dx, dweight = ctx.saved_tensors
        if ctx.scale == 1 and grad.device.type == "cpu" and grad.item() == 1:
            return dx, dweight, None
        factor = grad / ctx.scale
        return (dx * factor).to(dx.dtype), (dweight * factor).to(dweight.dtype), None
