"""AnnealingLR: Megatron-DeepSpeed's learning-rate schedule, counted in samples."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

SHAPES: Mapping[str, Callable[[float], float]] = {
    "linear": lambda done: 1.0 - done,
    "cosine": lambda done: 0.5 * (math.cos(math.pi * done) + 1.0),
    "1-sqrt": lambda done: 1.0 - math.sqrt(done),
    "minus_sqrt": lambda done: 1.0 - math.sqrt(done),
    "exponential": lambda done: 2.0 * 0.5**done - 1.0,
}
"""Shape → what is left of the way from max_lr to min_lr when this share of the decay is done."""


class AnnealingLR:
    """Linear warm-up to max_lr, then a decay to min_lr at decay_steps: linear, cosine, 1-sqrt, or
    WSD, which is constant but for its last `wsd_decay_steps`; or constant.

    `num_steps` is the number of samples trained; the rate is that of `num_steps`, so the first
    iteration after a warm-up start runs at 0. All *_steps count samples. WSD and its shapes are
    those of Megatron-LM's OptimizerParamScheduler.
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
        wsd_decay_steps: int | None = None,
        lr_wsd_decay_style: str = "exponential",
    ) -> None:
        self.optimizer = optimizer
        self.max_lr = float(max_lr)
        self.min_lr = float(min_lr)
        self.warmup_steps = int(warmup_steps)
        self.decay_steps = int(decay_steps)
        self.decay_style = decay_style
        self.wsd_decay_steps = wsd_decay_steps
        self.lr_wsd_decay_style = lr_wsd_decay_style
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
        start, shape = self.warmup_steps, self.decay_style
        if shape == "WSD":
            start, shape = self.decay_steps - (self.wsd_decay_steps or 0), self.lr_wsd_decay_style
            if self.num_steps <= start:
                return self.max_lr
        # A schedule cut to end at its own warm-up has no length left to divide by.
        ratio = (self.num_steps - start) / max(self.decay_steps - start, 1)
        return self.min_lr + SHAPES[shape](ratio) * (self.max_lr - self.min_lr)

    def step(self, increment: int, token_num: int | None = None) -> None:
        """Advance by `increment` samples and write the new rate into every param group."""
        self.num_steps += increment
        if token_num is not None:
            self.num_tokens = token_num
        rate = self.get_lr()
        for group in self.optimizer.param_groups:
            group["lr"] = rate

    def state_dict(self) -> dict[str, Any]:
        state = {
            "max_lr": self.max_lr,
            "warmup_steps": self.warmup_steps,
            "num_steps": self.num_steps,
            "warmup_tokens": self.warmup_tokens,
            "num_tokens": self.num_tokens,
            "decay_style": self.decay_style,
            "decay_steps": self.decay_steps,
            "min_lr": self.min_lr,
        }
        if self.decay_style == "WSD":
            state["wsd_decay_steps"] = self.wsd_decay_steps
            state["lr_wsd_decay_style"] = self.lr_wsd_decay_style
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take every field from the checkpoint, and write the rate of num_steps into the groups."""
        self.max_lr = float(state["max_lr"])
        self.min_lr = float(state["min_lr"])
        self.warmup_steps = int(state["warmup_steps"])
        self.decay_steps = int(state["decay_steps"])
        self.decay_style = str(state["decay_style"])
        if self.decay_style == "WSD":
            self.wsd_decay_steps = int(state["wsd_decay_steps"])
            self.lr_wsd_decay_style = str(state["lr_wsd_decay_style"])
        self.warmup_tokens = int(state["warmup_tokens"])
        self.num_tokens = int(state["num_tokens"])
        self.num_steps = int(state["num_steps"])
        self.step(0)
