"""What the last points of the loss decide by themselves, without NumPy; the rest is advise's.

A verdict here is never another than advise's own: what these points leave open is not judged.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from ckptsurgeon.look.loss_tail import LossTail
from ckptsurgeon.plans.frozen import frozen

SPAN, SETTLED, PATIENCE = 50, 11, 100
WINDOW, SIGMAS, MOST = 128, 6.0, 1000
STEADY = 1e-10
"""As in advise's rules. OLMo-core's 6 sigma over 128 points judge the first MOST points of a run;
later ones are judged by 1,000 before them, more than a tail holds."""
SHARE, LEARNT, NOISES = 0.125, 0.05, 4.0
LEAST = 4 * SETTLED
"""As in advise's rises: the least rise that matters, and the points below which nothing is said."""
EVEN = 1e-9
"""A share of a bound by which two sums of the same numbers may differ: nothing is decided there."""


@frozen
class Level:
    """The lowest mean of SPAN points, the last step of them, how far the loss ends above it, and
    its noise from point to point. Where it ends `calm`, no rule of advise says that it diverged in
    these points."""

    best: float
    step: int
    above: float
    noise: float
    calm: bool


def level(seen: LossTail) -> Level | None:
    """Where the loss ends; None with a value that is no number, or with under 2 SPAN points."""
    values = seen.values
    if not all(map(math.isfinite, values)) or len(values) < 2 * SPAN:
        return None
    means, noise = _means(values, SPAN), _noise(values)
    ends, best = _median(values[-SETTLED:]), min(means)
    return Level(
        best=best,
        step=seen.steps[means.index(best) + SPAN - 1],
        above=max(means[-1], ends) - best,
        noise=noise,
        calm=means[-1] <= best + noise / 2 and ends <= best + noise,
    )


@frozen
class Rise:
    """The loss ends at `now`, as far above its `best` level, which it had up to `step`, as a rise
    must be to matter. It may be a divergence, a spike that comes back, or other data."""

    step: int
    best: float
    now: float


def risen(seen: LossTail) -> Rise | None:
    """The rise that the loss ends on, by the least size that matters to advise; None where it ends
    lower, or with under LEAST points. What is no number is left out."""
    points = [
        (step, value)
        for step, value in zip(seen.steps, seen.values, strict=True)
        if math.isfinite(value)
    ]
    if len(points) < LEAST:
        return None
    values = [value for _, value in points]
    means = _means(values, SPAN if len(points) >= 4 * SPAN else SETTLED)
    best, now = min(means), _median(values[-SETTLED:])
    learnt = _median(values[:5]) - best
    if now - best <= max(NOISES * _noise(values), SHARE * abs(best), LEARNT * learnt):
        return None
    return Rise(points[means.index(best) + len(values) - len(means)][0], best, now)


def broken(seen: LossTail) -> int | None:
    """The step from which on the loss is no number, to the end and three times or more: it
    diverged, whatever came before. None where it does not end so."""
    bad = len(seen.values)
    while bad and not math.isfinite(seen.values[bad - 1]):
        bad -= 1
    return seen.steps[bad] if len(seen.values) - bad >= 3 else None


def diverged(seen: LossTail) -> int | None:
    """The step at which the loss left its course for good, as advise says; None where these points
    do not decide: they are not all of the log, the jump is no clear one, came back or is too near
    the end, other data might look like it, or the loss had risen before it."""
    steps, values = seen.steps, seen.values
    if not seen.whole or not len(values) <= MOST or not all(map(math.isfinite, values)):
        return None
    for k in range(WINDOW, len(values)):
        before = values[k - WINDOW : k]
        mean = math.fsum(before) / WINDOW
        if values[k] <= mean:
            continue
        std = math.sqrt(math.fsum((value - mean) ** 2 for value in before) / WINDOW)
        margin = values[k] - mean - SIGMAS * std
        if std < STEADY or margin < -EVEN * abs(values[k]):
            continue
        base = level(LossTail(steps[:k], values[:k]))
        decided = (
            margin > EVEN * abs(values[k])
            and k + SETTLED < len(steps)  # by then cusum has seen it, and advise counts from there
            and steps[-1] - steps[k + SETTLED] >= PATIENCE
            and not _back(values[k + 1 :], mean + 2 * std)
            and max(values[k:]) > math.fsum(values[:3]) / 3
            and base is not None
            and base.above <= base.noise
        )
        return steps[k] if decided else None
    return None


def _back(after: Sequence[float], bound: float) -> bool:
    """Whether the loss came back under a bound, or to it but for the last digits."""
    bound += EVEN * abs(bound)
    windows = range(len(after) - SETTLED + 1)
    return (
        any(after[i] <= bound and _median(after[i : i + SETTLED]) <= bound for i in windows)
        or len(after) < SETTLED
    )


def _means(values: Sequence[float], points: int) -> list[float]:
    """Of each `points` that follow each other; the first is that of the first ones."""
    sums = [0.0]
    for value in values:
        sums.append(sums[-1] + value)
    return [(b - a) / points for a, b in zip(sums, sums[points:], strict=False)]


def _noise(values: Sequence[float]) -> float:
    """From point to point, as a standard deviation."""
    return _median([abs(b - a) for a, b in pairwise(values)]) / (0.6745 * 2**0.5)


def _median(values: Sequence[float]) -> float:
    """Of two in the middle their mean, as statistics.median, which is slow to load."""
    ordered = sorted(values)
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2
