"""The norm of the last layer's activations, noted while the model runs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class ActivationNorm:
    """The mean over tokens of the 2-norm of what the last layer hands to the final norm, as
    metaseq's `actv_norm`; of forward passes in training, not in validation.

    `norm` is the final norm, None on a rank that has none: another stage of a pipeline."""

    def __init__(self, norm: nn.Module | None, device: Any) -> None:
        self._sum = torch.zeros((), device=device)
        if norm is not None:
            norm.register_forward_pre_hook(self._add)

    @torch.no_grad()
    def _add(self, norm: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if norm.training:
            norms = torch.linalg.vector_norm(inputs[0], dim=-1, dtype=torch.float32)
            self._sum += norms.mean()

    def take(self) -> Tensor:
        """The sum over the micro-batches since the last call: a scalar in float32."""
        total = self._sum.clone()
        self._sum.zero_()
        return total
