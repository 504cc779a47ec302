"""Published rules that say at which points a curve left its course. Each is a few lines.

A rule looks at what came before a point, never at what came after it. Values that are not finite
are the business of the rule `nan` alone: the others pass over them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from ckptsurgeon.logs.signals import GRAD_NORM, LOSS, LOSS_SCALE

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Ints: TypeAlias = "NDArray[np.int64]"
Floats: TypeAlias = "NDArray[np.float64]"
Flags: TypeAlias = "NDArray[np.bool_]"

STEADY = 1e-10
"""A standard deviation below which nothing is judged, as in OLMo-core."""
_BLOCK = 1 << 15
"""Windows that are measured together."""


def sigma(values: Floats, window: int, threshold: float) -> Flags:
    """Above the mean of the `window` points before it by more than `threshold` of their standard
    deviations; nothing is said of the first `window` points.

    Source: OLMo 2 (arXiv:2501.00656, section 3): 7 and 1,000. `StabilityMonitorCallback` of
    OLMo-core 3.0.0: 6 and 128."""
    import numpy as np

    flags = np.zeros(len(values), bool)
    if len(values) <= window:
        return flags
    before = np.lib.stride_tricks.sliding_window_view(values[:-1], window)
    for start in range(0, len(before), _BLOCK):
        part = before[start : start + _BLOCK]
        mean, std = part.mean(axis=1), part.std(axis=1)
        here = values[window + start : window + start + len(part)]
        flags[window + start : window + start + len(part)] = (std >= STEADY) & (
            here > mean + threshold * std
        )
    return flags


def zclip(values: Floats, threshold: float = 2.5, alpha: float = 0.97, first: int = 25) -> Flags:
    """A z-score above `threshold` against running means of the value and of its square deviation,
    which take in an outlier only as far as it would have been clipped.

    Source: ZClip (arXiv:2504.02507) with the defaults of its code: `adaptive_scaling`, and means
    that start from the first 25 values."""
    import numpy as np

    flags = np.zeros(len(values), bool)
    if len(values) <= first:
        return flags
    mean, variance = float(values[:first].mean()), float(values[:first].var())
    for i, value in enumerate(values[first:].tolist(), first):
        std = variance**0.5
        z = (value - mean) / (std + 1e-6)
        if z > threshold:
            flags[i] = True
            value = mean + threshold * std * threshold / z
        mean = alpha * mean + (1 - alpha) * value
        variance = alpha * variance + (1 - alpha) * (value - mean) ** 2
    return flags


def halvings(steps: Ints, values: Floats, count: int = 3, within: int = 50) -> Flags:
    """A loss scale that has gone down by 2^`count` or more since its highest value of the last
    `within` steps.

    Source: OPT-175B's logbook and BigScience's tr8 chronicles: a scale that falls and falls is how
    a divergence of fp16 shows first."""
    import numpy as np

    drops = np.flatnonzero(np.diff(values) < 0) + 1
    flags = np.zeros(len(values), bool)
    for i in drops.tolist():
        begin = int(np.searchsorted(steps, steps[i] - within))
        flags[i] = values[begin:i].max(initial=0.0) >= 2**count * values[i]
    return flags


def cusum(
    values: Floats, slack: float = 1.0, limit: float = 20.0, window: int = 50
) -> list[tuple[int, int]]:
    """Slow rises over the best level so far: the point from which the sum of what lies above that
    level by more than `slack` sigma grew, and the one at which it reached `limit` sigma.

    The level is the lowest mean of `window` points so far, sigma the noise from point to point.
    Source: E. S. Page, "Continuous inspection schemes", Biometrika 41 (1954); sigma by the median
    of absolute differences."""
    import numpy as np

    if len(values) <= 2 * window:
        return []
    sums = np.concatenate([[0.0], np.cumsum(values)])
    means = (sums[window:] - sums[:-window]) / window
    best = np.minimum.accumulate(means)
    sigma = noise(values)
    if sigma < STEADY:
        return []
    excess = (values[window:] - best[: len(values) - window]) / sigma - slack
    found: list[tuple[int, int]] = []
    total, begin, over = 0.0, 0, False
    for i, more in enumerate(excess.tolist()):
        if total <= 0.0:
            begin = i
        total = max(0.0, total + min(more, limit / 2))
        if total > limit and not over:
            found.append((window + begin, window + i))
        over = (over or total > limit) and total > 0.0
    return found


def noise(values: Floats) -> float:
    """The standard deviation from point to point, by the median of absolute differences: a trend
    and single spikes do not count."""
    import numpy as np

    return float(np.median(np.abs(np.diff(values)))) / (0.6745 * 2**0.5) if len(values) > 1 else 0.0


@dataclass(frozen=True)
class Rule:
    """A rule as `--rule` names it: what it says in the output, and the signals that it judges."""

    name: str
    text: str
    signals: tuple[str, ...]
    judge: Callable[[Ints, Floats], Flags] | None = None


RULES: Mapping[str, Rule] = {
    rule.name: rule
    for rule in (
        Rule("olmo2", "7 sigma over 1,000 points (OLMo 2)", (LOSS, GRAD_NORM),
             lambda _, values: sigma(values, 1000, 7.0)),
        Rule("olmo-core", "6 sigma over 128 points (OLMo-core)", (LOSS, GRAD_NORM),
             lambda _, values: sigma(values, 128, 6.0)),
        Rule("zclip", "a z-score above 2.5 (ZClip)", (GRAD_NORM,), lambda _, values: zclip(values)),
        Rule("loss-scale", "three halvings within 50 steps", (LOSS_SCALE,), halvings),
        Rule("cusum", "a slow rise over the best level (CUSUM)", (LOSS,)),
        Rule("nan", "not a finite number", (LOSS, GRAD_NORM)),
    )
}  # fmt: skip
