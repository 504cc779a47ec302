"""SGDW: stochastic gradient descent with momentum and decoupled weight decay."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer


class SGDW(Optimizer):
    """p ← p - lr (b + weight_decay p), with the momentum buffer b ← momentum b + g, b₁ = g.

    Loshchilov & Hutter 2019, algorithm 1, in torch's form of momentum. The decay never enters b:
    added to the gradient it would be L2 regularization (torch's SGD), and OPT-175B's run 12.41,
    whose decay had a bug, was plain SGD. State per parameter: `step` (a 0-d float tensor) and, with
    momentum, `momentum_buffer`. Elementwise, so a ZeRO partition is updated as the whole would be.
    """

    def __init__(
        self, params: Any, *, lr: float = 0.0, momentum: float = 0.0, weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient. `closure` must be None."""
        assert closure is None
        for group in self.param_groups:
            lr, momentum = group["lr"], group["momentum"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                state.setdefault("step", torch.zeros((), dtype=torch.float32)).add_(1)
                update = p.grad
                if momentum:
                    if "momentum_buffer" not in state:
                        state["momentum_buffer"] = torch.zeros_like(p)
                    update = state["momentum_buffer"].mul_(momentum).add_(p.grad)
                p.mul_(1.0 - lr * group["weight_decay"]).add_(update, alpha=-lr)
