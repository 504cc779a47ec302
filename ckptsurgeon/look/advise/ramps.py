"""A slow rise of the loss as a ramp from a level: where it leaves the level."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptsurgeon.look.advise.rules import Floats, noise

if TYPE_CHECKING:
    import numpy as np

SMOOTH = 11
"""Points of the running median that tells the ramp from spikes."""
SHORTEST = 12
"""Points of a ramp; what is shorter is a bend of two lines, or a jump."""
POWERS = (1.0, 1.5)
"""Shapes of a ramp: of a straight one, and of one that grows slowly at first."""
LEFT = 0.025
"""The share of its height at which a ramp has left the level."""
OUTLIER = 3.0
"""Noises from the running median at which a point is clipped."""
STAIR = 2.0
"""Noises by which a level before the ramp lies higher, where it is another level."""


def foot(values: Floats, begin: int, level: float, high: float) -> int | None:
    """The point at which the ramp that passes the point `begin` on its way from `level` to `high`
    begins, by least squares over beginnings, ends and shapes. None where the rise is no ramp: it
    does not reach three quarters of its height, or does so at once."""
    import numpy as np

    smooth = _smooth(values)
    quarter, most = level + 0.25 * (high - level), level + 0.75 * (high - level)
    above = np.flatnonzero(smooth[begin:] >= most)
    if not len(above):
        return None
    last = begin + int(above[0])
    below = np.flatnonzero(smooth[:last] <= quarter)
    if not len(below):
        return None
    first = int(below[-1])
    length = 2 * (last - first)
    if length < SHORTEST:
        return None
    low = max(0, first - length * 5 // 4 - 15)
    stop = min(len(values), last + length * 3 // 5 + 5)
    least = noise(values[low:stop])
    low += _above_a_stair(values[low : first + 1], smooth[low : first + 1], STAIR * least)
    centre = smooth[low:stop]
    points = np.clip(values[low:stop], centre - OUTLIER * least, centre + OUTLIER * least)
    begins = np.arange(
        max(3, int(first - low - 0.9 * length)),
        first - low + length // 10 + 1,
        max(1, length // 60),
    )
    ends = last - low + np.linspace(0.05, 0.6, 8) * length
    at = _best(points, begins, ends)
    return None if at is None else low + at


def _smooth(values: Floats) -> Floats:
    """The running median, as long as the values."""
    import numpy as np

    if len(values) < SMOOTH:
        return values
    padded = np.pad(values, SMOOTH // 2, mode="edge")
    windows = np.lib.stride_tricks.sliding_window_view(padded, SMOOTH)
    smooth: Floats = np.median(windows, axis=1)
    return smooth


def _above_a_stair(values: Floats, smooth: Floats, least: float) -> int:
    """The point from which on the loss lies on the level that the ramp leaves, where it fell to
    that level by more than `least` before; else 0."""
    import numpy as np

    lowest = int(np.argmin(smooth))
    if lowest < 3:
        return 0
    before = float(np.median(smooth[: max(1, lowest - 2)]))
    if before - smooth[lowest] <= least:
        return 0
    higher = np.flatnonzero(values[: lowest + 1] > (before + smooth[lowest]) / 2)
    return int(higher[-1]) + 1 if len(higher) else 0


def _best(points: Floats, begins: np.ndarray, ends: Floats) -> int | None:
    """Where the ramp that leaves the least squares has risen by LEFT of its height; None where
    nothing rises."""
    import numpy as np

    places = np.arange(len(points), dtype=float)
    centred = points - points.mean()
    most, found = 0.0, None
    for at in begins.tolist():
        for end in ends.tolist():
            straight = np.clip((places - at) / (end - at), 0.0, 1.0)
            for power in POWERS:
                shape = straight**power
                shape -= shape.mean()
                product = float(shape @ centred)
                explained = product * product / float(shape @ shape) if product > 0.0 else 0.0
                if explained > most:
                    most, found = explained, at + int(LEFT ** (1 / power) * (end - at))
    return found
