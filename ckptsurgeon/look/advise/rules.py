"""Published rules that say at which points a curve left its course. Each is a few lines.

A rule looks at what came before a point, never at what came after it. Values that are not finite
are the business of the rule `nan` alone: the others pass over them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TypeAlias

from ckptsurgeon.logs.signals import GRAD_NORM, LOSS, LOSS_SCALE
from ckptsurgeon.plans.frozen import frozen

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Ints: TypeAlias = "NDArray[np.int64]"
Floats: TypeAlias = "NDArray[np.float64]"
Flags: TypeAlias = "NDArray[np.bool_]"

STEADY = 1e-10
"""A standard deviation below which nothing is judged, as in OLMo-core."""
COLLAPSE = 10
"""So many halvings of a loss scale end a run, unless it rises again."""
_BLOCK = 1 << 16
"""Values of the windows that are measured together: they stay in a cache."""


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
    count = max(_BLOCK // window, 1)
    for start in range(0, len(before), count):
        part = before[start : start + count]
        mean = part.mean(axis=1)
        apart = part - mean[:, None]
        std = np.sqrt(np.einsum("ij,ij->i", apart, apart) / window)
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


def falls(
    steps: Ints, values: Floats, count: int = 3, within: int = 50, points: int = 5
) -> list[tuple[int, int]]:
    """The first and the last point of each fall of a loss scale: one that takes it down by
    2^`count` or more within `within` steps, or within `points` points where they lie further apart.
    Drops that follow each other so closely are one fall; one of 2^COLLAPSE lasts until the scale
    rises again.

    Source: OPT-175B's logbook and BigScience's tr8 chronicles: a scale that falls and falls is how
    a divergence of fp16 shows first."""
    import numpy as np

    chains: list[list[int]] = []
    for i in (np.flatnonzero(np.diff(values) < 0) + 1).tolist():
        near = chains and (
            i - chains[-1][-1] <= points or steps[i] - steps[chains[-1][-1]] <= within
        )
        chains[-1].append(i) if near else chains.append([i])
    return [
        (chain[0], _end(values, chain)) for chain in chains
        if _fell(steps, values, chain, 2.0**count, within, points)
    ]  # fmt: skip


def _end(values: Floats, chain: list[int]) -> int:
    """The last drop of the chain, or the last point before a scale that collapsed rises again."""
    import numpy as np

    first, last = chain[0], chain[-1]
    if values[first - 1] < 2.0**COLLAPSE * values[last]:
        return last
    risen = np.flatnonzero(values[last:] > values[last])
    return last + int(risen[0]) - 1 if len(risen) else len(values) - 1


def _fell(
    steps: Ints, values: Floats, chain: list[int], times: float, within: int, points: int
) -> bool:
    """Whether a chain of drops contains one by so many `times` within the window."""
    import numpy as np

    for i in chain:
        begin = min(max(0, i - points), int(np.searchsorted(steps, steps[i] - within)))
        if values[begin:i].max(initial=0.0) >= times * values[i]:
            return True
    return False


def early(values: Floats, until: int = 128, window: int = 32, threshold: float = 8.0) -> Flags:
    """Of the first `until` points, which the rules above do not judge: those that lie `threshold`
    sigma and a tenth of the level above the median of the `window` points before them. Sigma is the
    noise from point to point. Our own."""
    import numpy as np

    flags = np.zeros(len(values), bool)
    for i in range(window, min(until, len(values))):
        before = values[i - window : i]
        level = float(np.median(before))
        flags[i] = values[i] - level > max(threshold * max(noise(before), STEADY), 0.1 * abs(level))
    return flags


def noise(values: Floats) -> float:
    """The standard deviation from point to point, by the median of how far points lie from the
    middle of two neighbours: a trend and single spikes do not count. It is the larger one by the
    next neighbours and by those five points away, for noise whose neighbours are alike."""
    import numpy as np

    most = 0.0
    for far in (1, 5):
        if len(values) > 2 * far:
            apart = values[far:-far] - (values[2 * far :] + values[: -2 * far]) / 2
            most = max(most, float(np.median(np.abs(apart))))
    return most / (0.6745 * math.sqrt(1.5))


@frozen
class Rule:
    """A rule as `--rule` names it: what it says in the output, and the signals that it judges.
    `judge` flags points; rules without it find stretches (`signs.py`)."""

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
        Rule("early", "8 sigma within the first 128 points", (LOSS,),
             lambda _, values: early(values)),
        Rule("loss-scale", "three halvings within 50 steps", (LOSS_SCALE,)),
        Rule("cusum", "a rise that matters over the best level (CUSUM)", (LOSS,)),
        Rule("nan", "not a finite number", (LOSS, GRAD_NORM)),
    )
}  # fmt: skip
