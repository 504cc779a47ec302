"""LAMB: Adam's direction, with a step per parameter tensor in proportion to its norm."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer


@dataclass(frozen=True)
class Fragment:
    """The elements [start, start + numel) of a flat tensor: part of parameter number `index`.

    `counted` is False where another rank of the process groups counts the same elements."""

    index: int
    start: int
    numel: int
    counted: bool = True


class LAMB(Optimizer):
    """p ← p - lr (|p| / |u|) u, with u = m̂ / (√v̂ + eps) + weight_decay p.

    You et al. 2020, algorithm 2, with φ(z) = z and bias correction. The ratio is 1 where a norm is
    0, and in groups with `layer_adaptation` False (biases and LayerNorms, as its authors had it).
    The norms are those of whole parameters: a tensor that holds more or less than one needs
    `set_partition`. State per parameter has AdamW's names and types: `step`, `exp_avg`,
    `exp_avg_sq`.
    """

    def __init__(
        self,
        params: Any,
        *,
        lr: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
    ) -> None:
        defaults = {
            "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay,
            "layer_adaptation": True,
        }  # fmt: skip
        super().__init__(params, defaults)
        self._partitions: dict[Tensor, tuple[Sequence[Fragment], int, Sequence[Any]]] = {}

    def set_partition(
        self, flat: Tensor, fragments: Sequence[Fragment], count: int, groups: Sequence[Any]
    ) -> None:
        """`flat` is this rank's part of `count` parameters, whose squares are summed over each of
        the process groups. Elements outside of every fragment are padding and not updated."""
        self._partitions[flat] = (fragments, count, groups)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient. `closure` must be None."""
        assert closure is None
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._update(p, self._direction(p, group), group)

    def _direction(self, p: Tensor, group: dict[str, Any]) -> Tensor:
        state, (beta1, beta2) = self.state[p], group["betas"]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
        assert p.grad is not None
        state["step"].add_(1)
        step = float(state["step"])
        mean = state["exp_avg"].lerp_(p.grad, 1.0 - beta1)
        square = state["exp_avg_sq"].mul_(beta2).addcmul_(p.grad, p.grad, value=1.0 - beta2)
        root = (square / (1.0 - beta2**step)).sqrt_().add_(group["eps"])
        direction: Tensor = (mean / (1.0 - beta1**step)).div_(root)
        return direction.add_(p, alpha=group["weight_decay"])

    def _update(self, p: Tensor, update: Tensor, group: dict[str, Any]) -> None:
        whole: tuple[Sequence[Fragment], int, Sequence[Any]] = ([Fragment(0, 0, p.numel())], 1, ())
        fragments, count, groups = self._partitions.get(p, whole)
        flat, update = p.view(-1), update.view(-1)
        parts = [
            (f, flat.narrow(0, f.start, f.numel), update.narrow(0, f.start, f.numel))
            for f in fragments
        ]
        ratios = torch.ones(count)
        if group["layer_adaptation"]:
            squares = torch.zeros(2, count, dtype=torch.float64, device=p.device)
            for f, values, change in parts:
                if f.counted:
                    squares[0, f.index] = torch.linalg.vector_norm(values, dtype=torch.float64) ** 2
                    squares[1, f.index] = torch.linalg.vector_norm(change, dtype=torch.float64) ** 2
            for ranks in groups:
                dist.all_reduce(squares, group=ranks)
            norms = squares.sqrt()
            ratios = torch.where((norms > 0).all(0), norms[0] / norms[1], 1.0)
        steps = (group["lr"] * ratios).tolist()
        for f, values, change in parts:
            values.add_(change, alpha=-steps[f.index])
