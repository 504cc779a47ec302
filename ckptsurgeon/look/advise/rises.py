"""Rises of the loss that matter: how high they must be, where they are seen, where they began."""

from __future__ import annotations

from ckptsurgeon.look.advise.ramps import foot
from ckptsurgeon.look.advise.rules import STEADY, Floats, noise
from ckptsurgeon.plans.frozen import frozen

SHARE, LEARNT, NOISES = 0.125, 0.05, 4.0
"""A rise matters that is more than an eighth of the level, a twentieth of what the run has learnt
since it began, and four times the noise from point to point. Data of another kind moved real runs
by up to 6 % of the level, waves of the data by 3 %, and the least real divergence by 35 %."""
SHORT, LONG = 11, 50
"""Points whose mean is a level, before 4 * LONG points are known and after that."""
MOST = 0.5
AT_ONCE = 0.7
"""The share of a rise that a jump makes."""
TWICE = 2.0
LIMIT = 5.0
"""Sum of what lies above half of such a rise, in rises, at which it is one."""


@frozen
class Rise:
    """A rise that matters: the point from which on it grew, and the one at which it was `seen`.
    `level` is the best level before it, `size` the least rise over it that matters."""

    begin: int
    seen: int
    level: float
    size: float


def scale(values: Floats, begun: float | None = None) -> tuple[Floats, Floats]:
    """For each point the best level before it, and the least rise over that level that matters; Inf
    where it has too few points before it. `begun` is the level at which the run began, if that is
    not where `values` do."""
    import numpy as np

    n = len(values)
    best, size = np.full(n, np.inf), np.full(n, np.inf)
    if n <= 2 * SHORT:
        return best, size
    sums = np.concatenate([[0.0], np.cumsum(values)])
    for points, since in ((SHORT, 2 * SHORT), (LONG, 4 * LONG)):
        lowest = np.minimum.accumulate((sums[points:] - sums[:-points]) / points)
        best[since:] = lowest[since - points : n - points]
    first = float(np.median(values[:5])) if begun is None else begun
    size = np.maximum(NOISES * _noises(values), SHARE * np.abs(best))
    return best, np.maximum(size, LEARNT * np.maximum(first - best, 0.0))


def _noises(values: Floats, window: int = 64) -> Floats:
    """The noise of the `window` points before each point, renewed every 32 points, or 4,096 times
    in a long log."""
    import numpy as np

    out = np.empty(len(values))
    each = max(32, len(values) // 4096)
    for start in range(0, len(values), each):
        out[start : start + each] = noise(values[max(0, start - window) : max(start, each)])
    return out


def cusum(
    values: Floats, start: int = 0, scales: tuple[Floats, Floats] | None = None
) -> Rise | None:
    """The first rise from the point `start` on, over the best level so far, by Page's test: what
    lies above that level by more than half of the `scale` adds up to LIMIT of them. One point adds
    at most one.

    Source: E. S. Page, "Continuous inspection schemes", Biometrika 41 (1954): half of the change
    that is to be found is the value to compare with."""
    import numpy as np

    bests, sizes = scale(values) if scales is None else scales
    total, begin = 0.0, start
    level = size = np.inf
    known = np.flatnonzero(np.isfinite(bests) & (sizes > STEADY))
    for i in known[np.searchsorted(known, start) :].tolist():
        if total <= 0.0:
            begin, level, size = i, float(bests[i]), float(sizes[i])
        total = max(0.0, total + min((float(values[i]) - level) / size - 0.5, 1.0))
        if total > LIMIT:
            return Rise(begin, i, level, size)
    return None


def onset(values: Floats, rise: Rise, high: float) -> int:
    """The point at which a rise to the level `high` began. If a jump made most of it, there; if it
    is a ramp, at its foot; else at the bend of two lines, or the jump from one line, that leaves
    the least squares. A loss that grows and grows makes most of its rise late, when it is already
    high: no rise began there."""
    rise = _main(values, rise, high)
    for at in (_jump(values, rise, high), foot(values, rise.begin, rise.level, high)):
        if at is not None and not _high_before(values, rise, at):
            return at
    return _bend(values, rise)


def _high_before(values: Floats, rise: Rise, at: int) -> bool:
    """Whether the loss, once the rise was seen, lay TWICE as high as matters before a point."""
    import numpy as np

    before = values[max(0, at - SHORT) : at]
    return at > rise.seen and bool(np.median(before) > rise.level + TWICE * rise.size)


def _main(values: Floats, rise: Rise, high: float) -> Rise:
    """The part of a rise that made most of it, by the same test for half of its height: what other
    data had raised a little before is no part of it."""
    size = (high - rise.level) * MOST
    if size <= rise.size:
        return rise
    total, begin = 0.0, rise.begin
    for i in range(rise.begin, len(values)):
        if total <= 0.0:
            begin = i
        total = max(0.0, total + min((float(values[i]) - rise.level) / size - 0.5, 1.0))
        if total > LIMIT:
            return Rise(begin, i, rise.level, rise.size) if _rests(values, rise, begin) else rise
    return rise


def _rests(values: Floats, rise: Rise, begin: int) -> bool:
    """Whether the loss rose no further between what was seen and the point `begin`."""
    import numpy as np

    if begin - rise.seen < LONG:
        return False
    first, last = values[rise.seen - SHORT : rise.seen + SHORT], values[begin - 2 * SHORT : begin]
    return bool(np.median(last) <= np.median(first))


def _jump(values: Floats, rise: Rise, high: float) -> int | None:
    """The first point of a jump that makes AT_ONCE of the rise, by medians of SHORT points."""
    import numpy as np

    low = max(0, rise.begin - 2 * SHORT)
    part = values[low:]
    if len(part) < 2 * SHORT:
        return None
    medians = np.median(np.lib.stride_tricks.sliding_window_view(part, SHORT), axis=1)
    top = high + (1 - AT_ONCE) / 2 * (high - rise.level)
    medians = np.minimum(medians, top)  # a spike in a slow rise is no jump to its level
    there = np.flatnonzero(medians >= rise.level + AT_ONCE * (high - rise.level))
    if len(there):
        medians = medians[: there[0] + 2 * SHORT]
    jumps = medians[SHORT:] - medians[:-SHORT]
    at = int(np.argmax(jumps))
    if jumps[at] < AT_ONCE * (high - rise.level):
        return None
    above = medians[at] + jumps[at] / 3
    for k in range(at + 5, at + 2 * SHORT):
        if part[k] > above and np.median(part[k : k + SHORT]) > above:
            sharp = np.median(part[k : k + 5]) - np.median(part[k - 5 : k]) > 0.5 * jumps[at]
            return low + k if sharp else None
    return None


def _bend(values: Floats, rise: Rise) -> int:
    """Not before the lowest level; `rise.begin` is later, by half of what matters."""
    import numpy as np

    length = rise.seen - rise.begin + SHORT
    low = max(0, rise.begin - 4 * length)
    part = values[low : rise.seen + length]
    sums = np.concatenate([[0.0], np.cumsum(part)])
    before = sums[SHORT : max(SHORT, rise.begin - low) + 1]
    lowest = int(np.argmin(before - sums[: len(before)]))
    points = np.arange(len(part), dtype=float)
    least, found = np.inf, rise.begin
    for at in range(max(3, lowest), rise.seen - low, max(1, len(part) // 400)):
        bend = np.maximum(points - at + 1, 0.0)
        for more in (bend, (points >= at).astype(float)):
            terms = np.column_stack([np.ones_like(points), points, more])
            answer, rest, *_ = np.linalg.lstsq(terms, part, rcond=None)
            up = answer[2] + (answer[1] if more is bend else 0.0)
            if up > 0 and len(rest) and float(rest[0]) < least:
                least, found = float(rest[0]), low + at
    while found < rise.begin and _flat(values, found):
        found += 1
    return min(found, rise.begin)


def _flat(values: Floats, at: int) -> bool:
    """Whether nothing has risen yet: the points after it are as those before it."""
    import numpy as np

    before, after = values[max(0, at - 2 * SHORT) : at], values[at : at + SHORT]
    more = float(np.median(after) - np.median(before)) if len(before) else 0.0
    return more < noise(values[max(0, at - 64) : at]) / 2
