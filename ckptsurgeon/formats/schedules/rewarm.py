"""The re-warm window as the surgeon computes it, on its own, from what a checkpoint keeps.

`[kind, start, end]`, or `[]` when none is open; start and end are positions of the learning-rate
schedule (`num_steps`, in samples). The trainer has another implementation; the contract test
compares the two.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ckptsurgeon.formats.fields.values import State
from ckptsurgeon.formats.schedules.rampup import batch_size

HOLD = "hold"
Window = tuple[str, int, int]


def open_window(value: Sequence[Any], now: int) -> Window | tuple[()]:
    """The window that the next step is in: past its end there is none."""
    if not value or now >= value[2]:
        return ()
    return str(value[0]), int(value[1]), int(value[2])


def factor(window: Window | tuple[()], now: int) -> float:
    """What the rate of the schedule is multiplied by at position `now`: 0 while held, and on a
    ramp the share of the window that is behind."""
    if not window:
        return 1.0
    kind, start, end = window
    return 0.0 if kind == HOLD or now <= start else (now - start) / (end - start)


def trained_after(state: State, position: int, end: int) -> tuple[int, int] | None:
    """The first step that trains with the schedule at `end` or beyond, and where it stands then:
    skipped iterations consume samples, and the schedule waits. None where the checkpoint does not
    say how many samples an iteration has."""
    sample, full = state.promise.consumed_samples, state.batch_size
    if sample is None or not full:
        return None
    ranges = sorted(state.promise.skip or ())
    step = state.promise.step
    while position < end and 0 < (size := batch_size(state, sample)) < full:
        if not any(first <= step <= last for first, last in ranges):
            position += size
        sample += size
        step += 1
    left = max(0, -(-(end - position) // full))
    position += left * full
    for first, last in ranges:
        if last < step:
            continue
        free = max(first, step) - step
        if free > left:
            break
        left -= free
        step = last + 1
    return step + left, position
