"""Re-warm: a window in which the moments fill while the weights stay, or the rate ramps up."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from .errors import TrainError
from .optimizer import live_optimizer

KINDS = ("hold", "ramp")


@dataclass(frozen=True)
class Rewarm:
    """The rate of the schedule is multiplied by `factor` from position `start` to `end`.

    Positions are the schedule's own (`num_steps`, samples trained), which neither a skipped nor an
    overflowed iteration advances: every iteration of the window fills the moments. The schedule
    itself goes on, so that the rate is on it again at `end`.
    """

    kind: str
    start: int
    end: int

    def factor(self, samples: int) -> float:
        """0 while held; on a ramp the share of the window that is behind; 1 from `end` on."""
        if samples >= self.end:
            return 1.0
        if self.kind == "hold":
            return 0.0
        return max(samples - self.start, 0) / (self.end - self.start)

    def as_saved(self) -> list[Any]:
        """What a checkpoint and the first line hold."""
        return [self.kind, self.start, self.end]


def open_window(saved: Sequence[Any], samples: int) -> Rewarm | None:
    """The window that a checkpoint holds, or None when there is none or `samples` is past it."""
    if not saved:
        return None
    if len(saved) != 3 or saved[0] not in KINDS:
        raise TrainError(
            f"the checkpoint holds a re-warm window that is none: {saved!r}",
            next="ckptsurgeon undo    if a surgery has just set it",
            untouched="the checkpoint is as it was",
        )
    window = Rewarm(str(saved[0]), int(saved[1]), int(saved[2]))
    return window if samples < window.end else None


def factor(engine: Any, window: Rewarm | None) -> float:
    """What the schedule's rate is multiplied by at the next step."""
    return 1.0 if window is None else window.factor(engine.lr_scheduler.num_steps)


@contextmanager
def rewarmed(engine: Any, window: Rewarm | None) -> Iterator[None]:
    """Scale the rate of every param group for the one step inside, weight decay with it.

    At the end of a step the scheduler writes the next rate, unscaled. DeepSpeed leaves that out
    when the step overflowed; then the rate from before is put back, so that what is saved is the
    schedule's at all times.
    """
    if window is None:
        yield
        return
    groups, schedule = live_optimizer(engine).param_groups, engine.lr_scheduler
    before, rates = schedule.num_steps, [group["lr"] for group in groups]
    for group in groups:
        group["lr"] *= factor(engine, window)
    try:
        yield
    finally:
        if schedule.num_steps == before:
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate
