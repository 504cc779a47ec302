"""The end of the loss in one row of text, with the saved steps below it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ckptsurgeon.hints import command, text
from ckptsurgeon.look.clear import broken, diverged, level
from ckptsurgeon.report.style import Row

if TYPE_CHECKING:
    from ckptsurgeon.look.glance import Glance

WIDTH = 40
BARS = "▁▂▃▄▅▆▇█"
SAVED = "╵"
NO_NUMBER = "×"


def sparkline(seen: Glance, saved: Sequence[int], room: int = WIDTH) -> list[Row]:
    """Rows of `status`: the loss in at most WIDTH columns, each the mean of its points (a column
    with a loss that is no number is a cross), a tick under each saved step, and what can be said of
    it. The words stand below: beside it they would move the notes of all other rows."""
    first, last = seen.steps[0], seen.steps[-1]
    width = min(WIDTH, room)

    def place(step: int) -> int:
        return (step - first) * (width - 1) // max(1, last - first)

    columns: list[list[float]] = [[] for _ in range(width)]
    for step, value in zip(seen.steps, seen.values, strict=True):
        columns[place(step)].append(value)
    means = [sum(column) / len(column) if column else None for column in columns]
    finite = [mean for mean in means if mean is not None and math.isfinite(mean)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    line = "".join(_bar(mean, low, high) for mean in means)
    ticks = [" "] * width
    for step in saved:
        if first <= step <= last:
            ticks[place(step)] = SAVED
    rows = [Row("loss", line)]
    said = f"{seen.values[-1]:.4g} at step {last}; {low:.4g} to {high:.4g}"
    if SAVED in ticks:
        rows.append(Row("loss", "".join(ticks).rstrip()))
        said += f"   {SAVED} a saved step"
    return [*rows, Row("loss", said), _verdict(seen)]


def _verdict(seen: Glance) -> Row:
    """What these points decide. What they leave open is never called diverged or healthy."""
    advise = text(command("advise", why="says more"))
    if (step := broken(seen)) is not None:
        return Row("advise", f"the loss diverged, and is no number since step {step}", advise)
    if (step := diverged(seen)) is not None:
        return Row("advise", f"the loss diverged at step {step}", advise)
    ends, points = level(seen), len(seen.values)
    if ends is not None and ends.calm:
        return Row("advise", f"the loss is at its best level of the last {points} points")
    if ends is not None:
        said = f"the loss is {ends.above:.2g} above its best level, that of step {ends.step}"
        return Row("advise", said, text(command("advise", why="says if it diverged")))
    bad = sum(not math.isfinite(value) for value in seen.values)
    if bad:
        return Row("advise", f"the loss was no number at {bad} of {points} points", advise)
    return Row("advise", f"{points} points of the loss are too few to tell", advise)


def _bar(mean: float | None, low: float, high: float) -> str:
    if mean is None:
        return " "
    if not math.isfinite(mean):
        return NO_NUMBER
    share = (mean - low) / (high - low) if high > low else 0.0
    return BARS[min(len(BARS) - 1, int(share * len(BARS)))]
