"""AnnealingLR: Megatron-DeepSpeed's learning-rate schedule, counted in samples."""

from __future__ import annotations

import math
from typing import Any


class AnnealingLR:
    """Linear warm-up to max_lr, then linear or cosine decay to min_lr, or constant.

    `num_steps` is the number of samples trained; the rate is that of `num_steps`, so the first
    iteration after a warm-up start runs at 0. All *_steps count samples.
    """

    def __init__(
        self,
        optimizer: Any,
        *,
        max_lr: float,
        min_lr: float,
        warmup_steps: int,
        decay_steps: int,
        decay_style: str,
    ) -> None:
        self.optimizer = optimizer
        self.max_lr = float(max_lr)
        self.min_lr = float(min_lr)
        self.warmup_steps = int(warmup_steps)
        self.decay_steps = int(decay_steps)
        self.decay_style = decay_style
        self.num_steps = 0
        self.warmup_tokens = 0
        self.num_tokens = 0
        self.step(0)

    def get_lr(self) -> float:
        """The rate at num_steps."""
        if self.warmup_steps > 0 and self.num_steps <= self.warmup_steps:
            return self.max_lr * float(self.num_steps) / float(self.warmup_steps)
        if self.decay_style == "constant":
            return self.max_lr
        if self.num_steps > self.decay_steps:
            return self.min_lr
        # A schedule cut to end at its own warm-up has no length left to divide by.
        length = max(self.decay_steps - self.warmup_steps, 1)
        ratio = (self.num_steps - self.warmup_steps) / length
        if self.decay_style == "linear":
            coefficient = 1.0 - ratio
        else:
            coefficient = 0.5 * (math.cos(math.pi * ratio) + 1.0)
        return self.min_lr + coefficient * (self.max_lr - self.min_lr)

    def step(self, increment: int, token_num: int | None = None) -> None:
        """Advance by `increment` samples and write the new rate into every param group."""
        self.num_steps += increment
        if token_num is not None:
            self.num_tokens = token_num
        rate = self.get_lr()
        for group in self.optimizer.param_groups:
            group["lr"] = rate

    def state_dict(self) -> dict[str, Any]:
        return {
            "max_lr": self.max_lr,
            "warmup_steps": self.warmup_steps,
            "num_steps": self.num_steps,
            "warmup_tokens": self.warmup_tokens,
            "num_tokens": self.num_tokens,
            "decay_style": self.decay_style,
            "decay_steps": self.decay_steps,
            "min_lr": self.min_lr,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take every field from the checkpoint, and write the rate of num_steps into the groups."""
        self.max_lr = float(state["max_lr"])
        self.min_lr = float(state["min_lr"])
        self.warmup_steps = int(state["warmup_steps"])
        self.decay_steps = int(state["decay_steps"])
        self.decay_style = str(state["decay_style"])
        self.warmup_tokens = int(state["warmup_tokens"])
        self.num_tokens = int(state["num_tokens"])
        self.num_steps = int(state["num_steps"])
        self.step(0)
