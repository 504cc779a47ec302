"""The parity table: every op of the kernels; test_parity.py runs each row on every backend."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.train.kernels.case import Case, Shape

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
# Nothing, one element, less and more than a vector and than a block of 4096, with odd tails.
FLAT = ((0,), (1,), (7,), (63,), (4096,), (4097,), (3, 4099))


def normal(shape: Shape, dtype: torch.dtype, seed: int, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * scale).to(dtype)


def _grad(shape: Shape, dtype: torch.dtype, seed: int) -> list[Any]:
    return [normal(shape, dtype, seed, 3.0)]


def _grad_norm_check(grad: Tensor) -> list[Tensor]:
    return [torch.stack([grad.square().sum(), torch.zeros((), dtype=torch.float64)])]


CASES = (
    Case(
        "grad_norm_check",
        FLAT,
        FLOATS,
        _grad,
        _grad_norm_check,
        tolerance=dict.fromkeys(FLOATS, 1e-12),
    ),
)
