"""The shapes of a cooldown: what is left of the rate, as each trainer calls and computes it."""

from __future__ import annotations

import math

SHAPES = ("linear", "1-sqrt", "cosine")
"""1-sqrt is that of Hägele et al. 2405.18392: the best of those they tried, over 10 to 20 %."""
_FORMULAS = {
    "linear": "1 - {}",
    "1-sqrt": "1 - math.sqrt({})",
    "cosine": "(1 + math.cos(math.pi * {})) / 2",
}


def share(shape: str, done: float) -> float:
    """What is left of the way from the first rate to the last one, 1 at its start and 0 at its end,
    where `done` of the updates are made."""
    if shape == "linear":
        return 1.0 - done
    return 1.0 - math.sqrt(done) if shape == "1-sqrt" else (1.0 + math.cos(math.pi * done)) / 2.0


def as_lambda(
    shape: str, start: int, steps: int, first: float, last: float, warmup: int = 0
) -> str:
    """Python of what a LambdaLR multiplies its base rates by: from step `start` on from 0 to
    `first` in `warmup` steps, and to `last` in `steps` more, where it stays. `constant` stays at
    `first`."""
    rise = f"min(1.0, {_since(start)} / {warmup}) * " if warmup else ""
    if shape == "constant":
        return f"lambda t: {rise}{first!r}"
    done = f"min(1.0, {_since(start + warmup)} / {steps})"
    fall = f"{last!r} + {first - last!r} * ({_FORMULAS[shape].format(done)})"
    return f"lambda t: {rise}({fall})" if rise else f"lambda t: {fall}"


def _since(start: int) -> str:
    return f"max(0, t - {start})" if start else "t"
