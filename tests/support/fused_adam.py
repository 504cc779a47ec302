"""Adam optimizers that need a GPU, with their kernels as plain torch: what they save is theirs."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import torch


def fused_adam(groups: Iterable[dict[str, Any]], **settings: Any) -> Any:
    """DeepSpeed's own FusedAdam, whose CUDA kernel alone is replaced by its formula."""
    from deepspeed.ops.adam import fused_adam as module

    class Builder:
        def load(self) -> Any:
            return SimpleNamespace(multi_tensor_adam=_kernel)

    real, module.FusedAdamBuilder = module.FusedAdamBuilder, Builder
    try:
        return module.FusedAdam(list(groups), **settings)
    finally:
        module.FusedAdamBuilder = real


def _kernel(
    chunk: int,
    overflow: Any,
    lists: list[list[torch.Tensor]],
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    step: int,
    decoupled: int,
    corrected: int,
    weight_decay: float,
) -> None:
    """AdamW over lists of gradients, weights and both moments, as the real kernel computes it."""
    for grad, weight, first, second in zip(*lists, strict=True):
        first.mul_(beta1).add_(grad, alpha=1 - beta1)
        second.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        size = (second / (1 - beta2**step)).sqrt_().add_(eps)
        weight.mul_(1 - lr * weight_decay).addcdiv_(first, size, value=-lr / (1 - beta1**step))


class ApexAdam(torch.optim.Optimizer):
    """apex's FusedAdam as it keeps its state: the step is in the param group and nowhere else."""

    def __init__(self, groups: Iterable[dict[str, Any]], **settings: Any) -> None:
        super().__init__(groups, {"bias_correction": True, "weight_decay": 0.0, **settings})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state = self.state[weight]
                if not state:
                    state["exp_avg"] = torch.zeros_like(weight)
                    state["exp_avg_sq"] = torch.zeros_like(weight)
                lists = [[weight.grad], [weight], [state["exp_avg"]], [state["exp_avg_sq"]]]
                beta1, beta2 = group["betas"]
                _kernel(
                    0, None, lists, group["lr"], beta1, beta2, group["eps"], group["step"], 1, 1,
                    group["weight_decay"],
                )  # fmt: skip
