"""Gradients of bf16 in float32, added up and reduced in few calls: one buffer a param group.

DeepSpeed's BF16_Optimizer adds parameter by parameter from Python, keeps the bf16 gradients for the
next pass, and copies all of the float32 ones to reduce them and back, on a single rank too.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def widen(engine: Any) -> None:
    """Replace how an engine with a BF16_Optimizer adds up and reduces gradients; the sums are the
    same."""
    wrapper = engine.optimizer
    pairs = [
        (low, gradient, group, index)
        for group, parameters in enumerate(wrapper.bf16_groups)
        for index, (low, gradient) in enumerate(
            zip(parameters, wrapper.fp32_groups_gradients[group], strict=True)
        )
    ]
    for low, gradient, _, _ in pairs:
        low._hp_grad = gradient  # a pipeline reduces those of tied weights by this name
    wrapper.update_hp_grads = partial(_add, wrapper, pairs)
    engine.buffered_allreduce_fallback = partial(_reduce, engine, wrapper)


@torch.no_grad()
def _add(wrapper: Any, pairs: list[tuple[Any, Tensor, int, int]], **_: Any) -> None:
    """Add the bf16 gradients of one micro-batch to the sums, and let go of them."""
    sums, shares = [], []
    for low, gradient, group, index in pairs:
        if low.grad is not None:
            sums.append(gradient)
            shares.append(low.grad.view(-1))
            wrapper.fp32_groups_has_gradients[group][index] = True
            low.grad = None
    if sums:
        torch._foreach_add_(sums, shares)


def _reduce(engine: Any, wrapper: Any, grads: object = None, **_: Any) -> None:
    """The mean over the data ranks, in place. As DeepSpeed's, it divides by the pre-division factor
    before the sum."""
    ranks = dist.get_world_size(group=wrapper.dp_process_group)
    if ranks == 1:
        return
    factor = engine.gradient_predivide_factor()
    for flat in wrapper.non_expert_gradients:
        if factor != 1.0:
            flat.mul_(1.0 / factor)
        dist.all_reduce(flat, group=wrapper.dp_process_group)
        flat.mul_(factor / ranks)
