"""What `show` asks a checkpoint for, as text and as JSON."""

from __future__ import annotations

SHOWN = (
    "lr", "max_lr", "min_lr", "warmup", "decay", "decay_style", "betas", "eps", "weight_decay",
    "clip_grad", "loss_scale", "adam_step", "consumed_samples", "data_epoch", "data_batches",
    "data_tokens", "skip", "seed", "rewarm",
)  # fmt: skip
"""In this order."""
