"""Apex's FusedAdam for a CPU, under apex's module name: the step is in the group, not in the state.

Megatron-LM runs with it or with Transformer Engine's, which keeps the step in the same place, and
has a state of each parameter, also without a gradient: Megatron-FSDP saves one from every rank. Of
apex it needs no more.
"""

from __future__ import annotations

import sys
import types
from typing import Any

import torch


class FusedAdam(torch.optim.Optimizer):
    """AdamW with bias correction, by apex's constructor and state layout."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adam_w_mode: bool = True,
        bias_correction: bool = True,
        capturable: bool = False,
    ) -> None:
        assert adam_w_mode and not capturable
        defaults = {
            "lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps,
            "weight_decay": weight_decay,
        }  # fmt: skip
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["exp_avg"] = torch.zeros_like(p)
                    state["exp_avg_sq"] = torch.zeros_like(p)
                if p.grad is None:
                    continue
                m, v = state["exp_avg"], state["exp_avg_sq"]
                m.mul_(beta1).add_(p.grad, alpha=1 - beta1)
                v.mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
                rate = m / (1 - beta1 ** group["step"])
                size = (v / (1 - beta2 ** group["step"])).sqrt_().add_(group["eps"])
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.addcdiv_(rate, size, value=-group["lr"])


def install() -> None:
    """Make `from apex.optimizers import FusedAdam` find it."""
    apex, optimizers = types.ModuleType("apex"), types.ModuleType("apex.optimizers")
    optimizers.FusedAdam = FusedAdam  # type: ignore[attr-defined]
    optimizers.FusedSGD = torch.optim.SGD  # type: ignore[attr-defined]
    apex.optimizers = optimizers  # type: ignore[attr-defined]
    sys.modules.update({"apex": apex, "apex.optimizers": optimizers})
