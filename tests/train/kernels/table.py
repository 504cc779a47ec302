"""The parity table: every op of the kernels; test_parity.py runs each row on every backend."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.train.kernels.case import Case, Shape
from tests.train.kernels.layer_cases import LAYER_CASES

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
# Nothing, one element, less and more than a vector and than a block of 4096, with odd tails.
SIZES = ((0,), (1,), (7,), (63,), (4096,), (4097,), (12297, 5, 0, 4099), (3,) * 33)
"""Of each tensor in a call; a GPU takes 32 in a launch."""


def normal(shape: Shape, dtype: torch.dtype, seed: int, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * scale).to(dtype)


def several(sizes: Shape, dtype: torch.dtype, seed: int, scale: float = 1.0) -> list[Tensor]:
    return list(normal((sum(sizes),), dtype, seed, scale).split(sizes))


def _grads(sizes: Shape, dtype: torch.dtype, seed: int) -> list[Any]:
    return [several(sizes, dtype, seed, 3.0)]


def _grad_norm_check(grads: list[Tensor]) -> list[Tensor]:
    return [
        torch.stack([torch.stack([g.square().sum(), torch.zeros_like(g).sum()]) for g in grads])
    ]


HYPER: tuple[Any, ...] = (1e-2, 0.9, 0.95, 1e-8, 0.1, 7)  # lr, betas, eps, weight decay, step


def _adamw(sizes: Shape, dtype: torch.dtype, seed: int) -> list[Any]:
    p, m = several(sizes, torch.float32, seed), several(sizes, torch.float32, seed + 1, 0.1)
    v = list(normal((sum(sizes),), torch.float32, seed + 2, 0.1).square().split(sizes))
    return [p, m, v, several(sizes, dtype, seed + 3, 30.0), [], torch.tensor(0.01), *HYPER]


def _adamw_flat(p: list[Tensor], m: list[Tensor], v: list[Tensor], g: list[Tensor],
                out: list[Tensor], mul: Tensor, *hyper: Any) -> list[Tensor]:  # fmt: skip
    return [torch.stack([_one_adamw(*each, mul, *hyper) for each in zip(p, m, v, g, strict=True)])]


def _one_adamw(p: Tensor, m: Tensor, v: Tensor, g: Tensor, mul: Tensor, *hyper: Any) -> Tensor:
    """torch's own AdamW, in the state of `hyper`'s step, and its update by the formula."""
    lr, beta1, beta2, eps, weight_decay, step = hyper
    before, parameter = p.clone(), torch.nn.Parameter(p)
    optimizer = torch.optim.AdamW([parameter], lr, (beta1, beta2), eps, weight_decay)
    optimizer.state[parameter] = {
        "step": torch.tensor(float(step - 1)), "exp_avg": m, "exp_avg_sq": v,
    }  # fmt: skip
    parameter.grad = g * mul
    optimizer.step()
    largest = v.max() if v.numel() else torch.zeros(())
    update = m / (1 - beta1**step) / ((v / (1 - beta2**step)).sqrt() + eps)
    change, zeros = p - before, (g == 0).sum()
    squares = [x.square().sum() for x in (p, change, update)]
    return torch.stack([v.sum(), largest, *squares, zeros])


CASES = (
    Case(
        "grad_norm_check",
        SIZES,
        FLOATS,
        _grads,
        _grad_norm_check,
        tolerance=dict.fromkeys(FLOATS, 1e-12),
    ),
    Case(
        "adamw_flat_",
        SIZES,
        FLOATS,
        _adamw,
        _adamw_flat,
        mutated=(0, 1, 2),
        tolerance=dict.fromkeys(FLOATS, 1e-6),
    ),
    Case(
        "adamw_flat_",
        ((7, 4097),),
        FLOATS,
        lambda *words: [*_adamw(*words)[:5], torch.tensor(-1.0), *HYPER],
        lambda p, *_: [torch.zeros(len(p), 6, dtype=torch.float64)],  # and all stays as it is
        mutated=(0, 1, 2),
        tolerance=dict.fromkeys(FLOATS, 0.0),
    ),
    *LAYER_CASES,
)
