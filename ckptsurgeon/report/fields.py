"""What `show` asks a checkpoint for, as text and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ckptsurgeon.errors import NotUnderstood

if TYPE_CHECKING:
    from ckptsurgeon.formats import Checkpoint, Place

SHOWN = (
    "lr", "max_lr", "min_lr", "warmup", "decay", "decay_style", "betas", "eps", "weight_decay",
    "clip_grad", "loss_scale", "adam_step", "consumed_samples", "data_epoch", "data_batches",
    "data_tokens", "skip", "seed", "rewarm",
)  # fmt: skip
"""In this order."""


def places(checkpoint: Checkpoint, field: str) -> Sequence[Place]:
    """Those of `field`; none where it is not understood, which the state says with the reason."""
    try:
        return checkpoint.locate(field)
    except NotUnderstood:
        return []
