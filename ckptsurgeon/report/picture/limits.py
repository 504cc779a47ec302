"""How high the axis of the loss is, and where the loss is no number."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

from ckptsurgeon.look.advise.rules import noise
from ckptsurgeon.plans.frozen import frozen
from ckptsurgeon.report.picture.thin import smoothed

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Floats: TypeAlias = "NDArray[np.float64]"

LEAST = 5
"""Points of the medians that say where the curve is: two single points do not move them."""
NOISES = 4.0
"""Times the noise from point to point that is shown on both sides of the medians."""
RECENT = 1 << 16
"""The points, the last, of which the noise is taken."""
FAR = 2.0
"""Points beyond that may make the axis higher by so many times its height; else it ends BESIDE of
the height beyond it, and what lies further is marked."""
BESIDE = 0.25
LOG = 6.0
"""Times the lowest median that the highest must be for a logarithmic axis."""
NARROWEST = 0.004
"""The share of the x axis that a single point without a number takes."""


@frozen
class Limits:
    """The lowest and the highest loss on an axis, which is logarithmic if `log`."""

    low: float
    high: float
    log: bool = False


def limits(curves: Sequence[tuple[Floats, int]], most: int) -> Limits | None:
    """What to show of these curves, each with how many of its points a median is taken of; None
    where no point is a number. The axis holds every median, so no curve leaves it; single points
    it may leave out."""
    import numpy as np

    finite = [(_finite(values), points) for values, points in curves]
    finite = [(values, points) for values, points in finite if len(values)]
    if not finite:
        return None
    middle = [_medians(values, max(LEAST, points), most) for values, points in finite]
    begin, end = float(min(map(np.min, middle))), float(max(map(np.max, middle)))
    low = float(min(values.min() for values, _ in finite))
    high = float(max(values.max() for values, _ in finite))
    log = begin > 0 and end > LOG * begin
    shown = [values[-RECENT:] for values, _ in finite]
    if log:
        shown = [np.log(values[values > 0]) for values in shown]
        begin, end, high = math.log(begin), math.log(end), math.log(high)
        low = math.log(low) if low > 0 else -math.inf
    spread = NOISES * max(map(noise, shown))
    begin, end = begin - spread, end + spread
    height = end - begin
    if height > 0 and high - end > FAR * height:
        high = end + BESIDE * height
    if height > 0 and begin - low > FAR * height:
        low = begin - BESIDE * height
    return Limits(math.exp(low), math.exp(high), True) if log else Limits(low, high)


def _finite(values: Floats) -> Floats:
    """The numbers among them; all of them without a copy."""
    import numpy as np

    finite = np.isfinite(values)
    return values if finite.all() else values[finite]


def _medians(values: Floats, points: int, most: int) -> Floats:
    """Running medians; at the ends, which single points would move, those of LEAST points."""
    import numpy as np

    if len(values) <= 2 * points:
        return values
    line = smoothed(values, values, points, most)[1]  # the x are not needed
    each = -(-len(values) // most)
    cut = min(-(-points // each), (len(line) - 1) // 2)
    ends = [np.median(values[:LEAST]), np.median(values[-LEAST:])]
    return np.append(line[cut : len(line) - cut], ends)


def lost(x: Floats, y: Floats, whole: float) -> list[tuple[float, float]]:
    """The stretches of x in which `y` is no number, each from the first such point to the next
    number, and wide enough to be seen on an axis of length `whole`; those that touch are one."""
    import numpy as np

    bad = ~np.isfinite(y)
    edges = np.flatnonzero(np.diff(np.concatenate([[0], bad.astype(np.int8), [0]])))
    least = NARROWEST * whole
    out: list[tuple[float, float]] = []
    for begin, end in edges.reshape(-1, 2).tolist():
        a, b = float(x[begin]), float(x[min(end, len(x) - 1)])
        if b - a < least:
            a, b = (a + b - least) / 2, (a + b + least) / 2
        if out and a <= out[-1][1]:
            out[-1] = out[-1][0], max(b, out[-1][1])
        else:
            out.append((a, b))
    return out
