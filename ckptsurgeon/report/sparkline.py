"""The end of the loss in one row of text, with the saved steps below it, and what it says."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence

from ckptsurgeon.errors import count
from ckptsurgeon.hints import Hint, command, text
from ckptsurgeon.look.loss_tail import LossTail
from ckptsurgeon.look.loss_verdict import SHARE, broken, diverged, level, risen
from ckptsurgeon.report.style import Row

WIDTH = 40
BARS = "▁▂▃▄▅▆▇█"
SAVED = "╵"
NO_NUMBER = "×"


def sparkline(seen: LossTail, saved: Sequence[int], room: int = WIDTH) -> list[Row]:
    """Rows of `status`: the last tenth of the loss, or the last WIDTH points where these are more,
    in at most WIDTH columns, each the mean of its points (a column with a loss that is no number is
    a cross), and a tick under each saved step. The words stand below: beside it they would move the
    notes of all other rows.

    The lowest bar is the best level that was read, and the highest at least an eighth above it: a
    loss that stays there lies low, and one that left it stands high, whatever came before."""
    width = min(WIDTH, room)
    shown = _last(seen, width)
    first, last = shown.steps[0], shown.steps[-1]

    def place(step: int) -> int:
        return (step - first) * (width - 1) // max(1, last - first)

    columns: list[list[float]] = [[] for _ in range(width)]
    for step, value in zip(shown.steps, shown.values, strict=True):
        columns[place(step)].append(value)
    means = [sum(column) / len(column) if column else None for column in columns]
    finite = [mean for mean in means if mean is not None and math.isfinite(mean)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    words = f"{low:.4g} to {high:.4g}, {_value(shown.values[-1])} at the end"
    rise = risen(seen)
    floor = low if rise is None else min(low, rise.best)
    top = max(high, floor + SHARE * abs(floor))
    ticks = [" "] * width
    for step in saved:
        if first <= step <= last:
            ticks[place(step)] = SAVED
    rows = [Row("loss", "".join(_bar(mean, floor, top) for mean in means))]
    said = f"{seen.word}s {first} to {last}: {words if finite else _lost(shown)}"
    if SAVED in ticks:
        rows.append(Row("loss", "".join(ticks).rstrip()))
        said += f"   {SAVED} a saved step"
    return [*rows, Row("loss", said)]


def _last(seen: LossTail, points: int) -> LossTail:
    """The last tenth of the steps so far, with `points` points or more where there are so many."""
    k = bisect_right(seen.steps, 0.9 * seen.steps[-1])
    k = max(0, min(k, len(seen.steps) - points))
    return LossTail(seen.steps[k:], seen.values[k:])


def headline(seen: LossTail) -> tuple[str, Hint] | None:
    """What is wrong with the loss, and what to do next: it is no number, diverged, or ends on a
    rise that advise can tell from a spike. None where none of it is so."""
    back = command("advise", why="where to go back to, and what others did")
    look = command("advise", why="says if it diverged")
    if (step := broken(seen)) is not None:
        return f"the loss diverged: {_lost(seen)} from {seen.word} {step} on", back
    if (step := diverged(seen)) is not None:
        rise = risen(seen)
        size = "" if rise is None else f": {rise.best:.3g} → {rise.now:.3g}"
        return f"the loss diverged at {seen.word} {step}{size}", back
    lost = [
        step
        for step, value in zip(seen.steps, seen.values, strict=True)
        if not math.isfinite(value)
    ]
    if lost:
        many = f"{len(lost)} of the last {count(len(seen.values), 'point')}"
        many += f", the last at {seen.word} {lost[-1]}"
        return f"the loss is {_lost(seen)} at {many}", look
    if (rise := risen(seen)) is not None:
        return (
            f"the loss rose after {seen.word} {rise.step}: {rise.best:.3g} → {rise.now:.3g}",
            look,
        )
    return None


def _lost(seen: LossTail) -> str:
    """What the values are that are no number."""
    lost = [value for value in seen.values if not math.isfinite(value)]
    infinite = sum(map(math.isinf, lost))
    return "NaN" if not infinite else "Inf" if infinite == len(lost) else "NaN or Inf"


def _value(value: float) -> str:
    return f"{value:.4g}" if math.isfinite(value) else "NaN" if math.isnan(value) else "Inf"


def unremarkable(seen: LossTail) -> Row:
    """What can be said of a loss without a headline. What its points leave open is never called
    healthy."""
    ends, points = level(seen), len(seen.values)
    if ends is None:
        return Row("advise", f"too few points of the loss for a glance: {points}")
    if ends.calm:
        return Row("advise", f"the loss is at its best level of the last {count(points, 'point')}")
    said = f"the loss is {ends.above:.2g} above its best level, that of {seen.word} {ends.step}"
    return Row("advise", said, text(command("advise", why="says if it diverged")))


def _bar(mean: float | None, low: float, high: float) -> str:
    if mean is None:
        return " "
    if not math.isfinite(mean):
        return NO_NUMBER
    share = (mean - low) / (high - low) if high > low else 0.0
    return BARS[min(len(BARS) - 1, int(share * len(BARS)))]
