"""Curves made as thin as a picture shows them: the lowest and the highest point of each pixel."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Floats: TypeAlias = "NDArray[np.float64]"


def thinned(x: Floats, y: Floats, low: float, high: float, pixels: int) -> tuple[Floats, Floats]:
    """Of each of `pixels` columns of [low, high] the lowest and the highest point, in the order in
    which they were logged: no spike is lost, as it would be by taking each n-th point.

    `x` must ascend. A column in which any point is no number has one NaN, which leaves a gap."""
    import numpy as np

    if len(x) <= 2 * pixels or high <= low:
        return x, y
    column = ((x - low) * (pixels / (high - low))).astype(np.int64)
    starts = np.flatnonzero(np.diff(column, prepend=column[0] - 1))
    ends = np.append(starts[1:], len(x))
    finite = np.isfinite(y)
    lows = np.minimum.reduceat(np.where(finite, y, np.inf), starts)
    highs = np.maximum.reduceat(np.where(finite, y, -np.inf), starts)
    empty = ~np.isfinite(lows)
    lows[empty] = highs[empty] = np.nan
    first, last = y[starts], y[ends - 1]
    rising = np.abs(first - lows) + np.abs(last - highs) <= np.abs(first - highs) + np.abs(
        last - lows
    )
    out_x = np.column_stack([x[starts], x[ends - 1]]).ravel()
    out_y = np.column_stack([np.where(rising, lows, highs), np.where(rising, highs, lows)]).ravel()
    return out_x, out_y


def smoothed(x: Floats, y: Floats, points: int, most: int) -> tuple[Floats, Floats]:
    """Running medians of `points` values, at `most` points or fewer: a curve without its noise.

    A median keeps an edge where it is; a mean would let the curve rise before the spike. NaN counts
    as higher than any number, so that a stretch of it leaves a gap."""
    import numpy as np

    each = -(-len(y) // most)
    if each > 1:  # first the median of each few points, or long windows would take long
        whole = len(y) // each * each
        x = x[:whole].reshape(-1, each)[:, each // 2]
        y = _median(y[:whole].reshape(-1, each))
        points = max(1, points // each)
    half = points // 2
    if half < 1 or len(y) <= 2 * half:
        return x, y
    padded = np.concatenate([np.repeat(y[:1], half), y, np.repeat(y[-1:], half)])
    medians = _median(np.lib.stride_tricks.sliding_window_view(padded, 2 * half + 1))
    return x, _rounded(medians, half // 2)


def _rounded(y: Floats, half: int) -> Floats:
    """The steps that medians make, as slopes."""
    import numpy as np

    if half < 1:
        return y
    padded = np.concatenate([np.repeat(y[:1], half), y, np.repeat(y[-1:], half)])
    means = np.lib.stride_tricks.sliding_window_view(padded, 2 * half + 1).mean(axis=1)
    return np.where(np.isfinite(means), means, y)


def _median(windows: Floats) -> Floats:
    import numpy as np

    middle = np.median(np.where(np.isfinite(windows), windows, np.inf), axis=1)
    return np.where(np.isfinite(middle), middle, np.nan)
