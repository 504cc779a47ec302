"""The norm of gradients, in one read that also finds what is not finite."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .grid import Grid
from .kernels import grad_norm_check


def norm_check(gradients: Sequence[Tensor], device: torch.device) -> Tensor:
    """[sum of squares, number of inf and nan] of all of them, float64, on their device."""
    if not gradients:
        return torch.zeros(2, dtype=torch.float64, device=device)
    return grad_norm_check([g.detach().contiguous() for g in gradients]).sum(0)


def raw_grad_norm(model: nn.Module, grid: Grid) -> Tensor:
    """The 2-norm of the gradients that lie in the model now, over all ranks that share it: float64,
    on their device, so that nobody has to wait for it."""
    parameters = list(model.parameters())
    gradients = [p.grad for p in parameters if grid.counts(p)]
    total = norm_check([g for g in gradients if g is not None], parameters[0].device)[0]
    if grid.model_size > 1:
        dist.all_reduce(total, group=grid.model_group)
    return total.sqrt()
