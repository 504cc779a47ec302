"""Which values of a hyperparameter can be meant: what lies outside is a slip of the keyboard."""

from __future__ import annotations

import math

from ckptsurgeon.operations.section import MAX_COUNT

FLOAT32_MAX = 3.4028234663852886e38
LARGEST = {
    "lr": 100.0, "min_lr": 100.0, "weight_decay": 100.0, "eps": 1e6,
    "clip_grad": FLOAT32_MAX, "loss_scale": FLOAT32_MAX, "seed": (1 << 32) - 1,
}  # fmt: skip
"""Far above what any published run used (SGD on language models: lr 30; fake SGD: eps 100), or what
the trainer's numbers can hold: numpy's seeds, float32."""
BELOW_1 = ("beta1", "beta2", "beta3", "momentum")
ABOVE_0 = ("eps", "loss_scale", "batch_size")
FROM_0 = (
    "lr", "min_lr", "warmup", "decay", "weight_decay", "clip_grad", "seed", "consumed_samples",
    "tokens", "iteration",
)  # fmt: skip


def broken_limit(key: str, value: float) -> str | None:
    """The limit that `value` breaks, as the user reads it; None if it can be meant."""
    if not math.isfinite(value):  # 1e309x
        return f"{key} is a finite number"
    if key in BELOW_1 and not 0 <= value < 1:
        return f"0 <= {key} < 1"
    if key in ABOVE_0 and value <= 0:
        return f"{key} is above 0"
    if key in FROM_0 and value < 0:
        return f"{key} is never below 0"
    largest = LARGEST.get(key, MAX_COUNT if isinstance(value, int) else math.inf)
    shown = f"{largest:g}" if isinstance(largest, float) else str(largest)
    return None if value <= largest else f"{key} is at most {shown}{_meant(value)}"


def _meant(value: float) -> str:
    """3e5 is what is left of 3e-5 without its minus."""
    digits, _, power = f"{value:e}".partition("e+")
    lost = float(f"{digits}e-{power or 0}")
    return f"; {lost:g}, if a minus was lost" if 1e-8 <= lost <= 1e-2 else ""
