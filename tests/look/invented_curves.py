"""Curves with the statistics of real training logs, healthy and diverged, for tests of `advise`.

The ranges are those measured on public logs (pre-training from one point a step to one in 200,
fine-tuning over several epochs, resumed runs): noise of 1 to 7 % of the level, to 30 % in
fine-tuning; residuals with lag-1 correlations of 0 to 0.5 and kurtoses of 3 to 37; waves of the
data of 1 to 3 sigma, 5 % of the level at most; jumps of 1 to 6 % where other data begin; stairs at
epochs; outliers of up to 25 sigma. The rules were tuned on TUNING alone. HELD_OUT was looked at
once they were fixed: whoever changes a rule by what it shows takes new seeds for it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from ckptsurgeon.logs.curves import Branch, Curve
from ckptsurgeon.look.advise.rises import Floats

TUNING = range(400)
HELD_OUT = range(70_000, 70_100)
SICK = ("burst", "slow", "early", "nan", "scale")


@dataclass(frozen=True)
class Invented:
    """`kind` is one of SICK or "healthy"; `event` is the step at which the loss leaves its course,
    None in a healthy run, and `risen` the one at which it has made a tenth of its rise. Where a
    spike ends in the rise, with no good point between, the loss leaves its course with the
    spike."""

    branch: Branch
    kind: str
    event: int | None
    risen: int | None


def invented(seed: int) -> Invented:
    """The curve of a seed: every other one is healthy."""
    dice = np.random.default_rng(seed)
    kind = "healthy" if seed % 2 else str(dice.choice(SICK))
    n = int(np.exp(dice.uniform(math.log(200), math.log(6000))))
    steps = np.arange(1, n + 1) * int(dice.choice([1, 1, 1, 5, 10, 25, 50, 100, 200]))
    level, share = _course(dice, n)
    sigma = share * level
    crests = min(dice.uniform(1, 3), 0.05 / share) * _waves(dice, n)
    loss = level + sigma * (_noise(dice, n) + crests)
    loss, spikes = _outliers(dice, loss, sigma)
    if dice.random() < 0.5:
        at = int(dice.uniform(0.2, 0.9) * n)
        loss[at:] += dice.uniform(0.01, 0.06) * level[at]
    norm = dice.uniform(0.2, 1.5) * np.exp(dice.normal(0, dice.uniform(0.05, 0.25), n))
    scale = np.full(n, 2.0**16)
    event, tenth = None, 0
    if kind != "healthy":
        event = min(_event(dice, kind, n), n - 130)
        tenth = _break(dice, kind, event, level, sigma, loss, norm, scale)
    curves = {"loss": loss}
    if dice.random() < 0.6:
        curves["grad-norm"] = norm
    if kind == "scale":
        curves["loss-scale"] = scale
    walls = np.full(n, math.nan)
    branch = {name: Curve(steps, values, walls) for name, values in curves.items()}
    if event is None:
        return Invented(branch, kind, None, None)
    left = min((first for first, end in spikes if first < event <= end), default=event)
    return Invented(branch, kind, int(steps[left]), int(steps[event + tenth]))


# --- a healthy run -------------------------------------------------------------------------------


def _course(dice: np.random.Generator, n: int) -> tuple[Floats, float]:
    """The loss without noise, and the noise as a share of it."""
    t = np.arange(n) / n
    kind = dice.choice(["pre-training", "fine-tuning", "resumed"])
    if kind == "pre-training":
        start, end = dice.uniform(9, 11.5), dice.uniform(2.3, 3.6)
        course = end + (start - end) * (1 + t * n / dice.uniform(8, 60)) ** -dice.uniform(0.6, 1.2)
        return course, float(np.exp(dice.uniform(math.log(0.009), math.log(0.07))))
    if kind == "resumed":
        level = dice.uniform(1.8, 3.5)
        course = level * (1 - dice.uniform(0.01, 0.08) * t)
        return course, float(np.exp(dice.uniform(math.log(0.009), math.log(0.07))))
    epochs = int(dice.integers(1, 6))
    stairs = dice.uniform(0.6, 0.95) ** np.floor(t * epochs)
    start, end = dice.uniform(1.5, 4), dice.uniform(0.5, 1.4)
    course = (end + (start - end) * np.exp(-t * n / dice.uniform(10, 60))) * stairs
    return course, float(np.exp(dice.uniform(math.log(0.03), math.log(0.25))))


def _noise(dice: np.random.Generator, n: int) -> Floats:
    """Of variance 1, with a lag-1 correlation and heavy tails."""
    lag, freedom = dice.uniform(0, 0.5), dice.choice([4.0, 6.0, 1000.0])
    fresh = dice.standard_t(freedom, n) / math.sqrt(freedom / (freedom - 2))
    out = np.empty(n)
    value = 0.0
    for i, more in enumerate(fresh.tolist()):
        value = lag * value + math.sqrt(1 - lag * lag) * more
        out[i] = value
    return out


def _waves(dice: np.random.Generator, n: int) -> Floats:
    """Slow waves of height 1 from foot to crest."""
    t = np.arange(n)
    periods = np.exp(dice.uniform(math.log(max(40, n / 40)), math.log(n / 2), 4))
    phases, weights = dice.uniform(0, 2 * np.pi, 4), dice.uniform(0.2, 1, 4)
    angles = 2 * np.pi * t[:, None] / periods + phases
    waves = (np.sin(angles) * weights).sum(axis=1)
    return np.asarray(waves / np.ptp(waves))


def _outliers(
    dice: np.random.Generator, loss: Floats, sigma: Floats
) -> tuple[Floats, list[tuple[int, int]]]:
    """Single points far above, a few far below, and spikes of some points that come back, which are
    given as [first, end)."""
    n = len(loss)
    for i in np.flatnonzero(dice.random(n) < dice.choice([0.0, 0.001, 0.003])).tolist():
        loss[i] += dice.uniform(5, 25) * sigma[i] * (1 if dice.random() < 0.9 else -0.3)
    spikes = []
    for _ in range(int(dice.integers(0, 4))):
        at, long = int(dice.uniform(0.05, 0.95) * n), int(dice.integers(1, 8))
        loss[at : at + long] *= 1 + dice.uniform(0.05, 1.0)
        spikes.append((at, at + long))
    return np.maximum(loss, 0.002), spikes


# --- one that breaks -----------------------------------------------------------------------------


def _event(dice: np.random.Generator, kind: str, n: int) -> int:
    return int(dice.integers(45, 125)) if kind == "early" else int(dice.uniform(0.3, 0.8) * n)


def _break(
    dice: np.random.Generator,
    kind: str,
    at: int,
    level: Floats,
    sigma: Floats,
    loss: Floats,
    norm: Floats,
    scale: Floats,
) -> int:
    """Let the loss leave its course at the point `at`, for good. With a gradient norm as before it
    does not fall again: nothing in the curves would tell that from other data. Returns after how
    many points it has made a tenth of its rise."""
    n = len(loss)
    after = np.arange(n - at, dtype=float)
    rise = level[at] * np.exp(dice.uniform(math.log(0.25), math.log(1.5)))
    rise = max(rise, 10 * sigma[at], 0.12 * (level[0] - level[at]))
    if kind == "slow":
        long = max(25.0, dice.uniform(0.03, 0.12) * n)
        shape = np.minimum(after / long, 1.0) ** dice.choice([1.0, 1.5])
    else:
        shape = np.minimum((after + 1) / dice.integers(1, 6), 1.0)
    torn = dice.random() < 0.7
    if torn and kind != "slow":
        shape = shape * (1 - dice.uniform(0, 0.4) * (1 - np.exp(-after / n * 4)))
    loss[at:] += level[at] - level[at:] + rise * shape
    if kind in ("nan", "scale"):
        loss[at + (0 if kind == "nan" else int(dice.integers(10, 40))) :] = math.nan
    if torn:
        norm[at:] *= dice.uniform(2.5, 20)
    if kind == "scale":
        drops = np.minimum(after // 2, 12)
        scale[at:] = 2.0 ** (16 - drops)
    return int(np.argmax(shape >= 0.1))


# --- two that deceive ----------------------------------------------------------------------------


def comes_back(seed: int) -> Branch:
    """A big spike early in a healthy run, from which the loss comes back by itself."""
    dice = np.random.default_rng(seed)
    n, loss, level, sigma = _calm(dice, 200)
    at = int(dice.integers(20, max(40, int(0.15 * n))))
    rise = max(level[at] * np.exp(dice.uniform(math.log(0.3), math.log(2))), 8 * sigma[at])
    loss[at:] += rise * np.exp(-np.arange(n - at) / dice.uniform(5, max(8, 0.05 * n)))
    return _logged(dice, loss)


def climbs(seed: int) -> tuple[Branch, int]:
    """A loss that turns and climbs, through half of a long log and more, to its end; and the step
    at which it turns."""
    dice = np.random.default_rng(seed)
    n, loss, level, sigma = _calm(dice, 1500)
    at = int(dice.uniform(0.2, 0.5) * n)
    rise = max(level[at] * dice.uniform(0.3, 1.2), 10 * sigma[at], 0.12 * (level[0] - level[at]))
    shape = (np.arange(n - at) / (n - at)) ** dice.choice([1.0, 1.5, 2.0])
    loss[at:] += level[at] - level[at:] + rise * shape
    branch = _logged(dice, loss)
    return branch, int(branch["loss"].steps[at])


def _calm(dice: np.random.Generator, least: int) -> tuple[int, Floats, Floats, Floats]:
    """How many points, the loss at them, its level and its noise."""
    n = int(np.exp(dice.uniform(math.log(least), math.log(6000))))
    level, share = _course(dice, n)
    sigma = share * level
    crests = min(dice.uniform(1, 3), 0.05 / share) * _waves(dice, n)
    return n, level + sigma * (_noise(dice, n) + crests), level, sigma


def _logged(dice: np.random.Generator, loss: Floats) -> Branch:
    steps = np.arange(1, len(loss) + 1) * int(dice.choice([1, 5, 10, 25, 50, 100, 200]))
    return {"loss": Curve(steps, np.maximum(loss, 0.002), np.full(len(loss), math.nan))}
