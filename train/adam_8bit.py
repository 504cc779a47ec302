"""bitsandbytes' AdamW with moments of 8 bits, where that library is installed."""

from __future__ import annotations

import importlib
from typing import Any

import torch

from .errors import TrainError


def adamw_8bit(
    groups: list[dict[str, Any]], betas: tuple[float, float], eps: float
) -> torch.optim.Optimizer:
    """Dettmers et al. 2022 (arXiv:2110.02861): each block of 256 elements of a moment has a scale
    and codes of 8 bits; tensors under 4,096 elements keep 32. At lr 0. Raises TrainError."""
    try:
        library = importlib.import_module("bitsandbytes")
    except ImportError as e:
        raise TrainError(
            f"optimizer=adamw8bit is bitsandbytes', which can't be imported: {e}",
            next=("pip install bitsandbytes", "or optimizer=adamw"),
        ) from e
    made: torch.optim.Optimizer = library.optim.AdamW8bit(groups, lr=0.0, betas=betas, eps=eps)
    return made
