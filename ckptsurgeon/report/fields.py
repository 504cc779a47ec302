"""What `show` asks a checkpoint for, as text and as JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ckptsurgeon.formats import Checkpoint, Place

FIELDS = (
    "lr", "max_lr", "min_lr", "warmup", "decay", "decay_style", "betas", "eps", "weight_decay",
    "clip_grad", "loss_scale", "adam_step", "consumed_samples", "skip", "seed", "rewarm",
)  # fmt: skip
"""In this order."""


def places(checkpoint: Checkpoint, field: str) -> list[Place]:
    """Where `field` is kept; nothing for a field that the format does not know."""
    try:
        return checkpoint.locate(field)
    except KeyError:
        return []
