"""What is learned of elements while they stream by: of each kind, and of moments in pairs."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ckptsurgeon.look.vitals.jobs import Job

TINY = 1.1754944e-38
"""The smallest normal number of fp32."""


@dataclass
class Numbers:
    """Of one kind of element: how many, the sum of absolute values and of squares, the extremes of
    those that are finite, and how many are NaN or Inf, 0, below 0, or denormal."""

    count: int = 0
    l1: float = 0.0
    squares: float = 0.0
    low: float = math.inf
    high: float = -math.inf
    wild: int = 0
    zeros: int = 0
    negative: int = 0
    denormal: int = 0
    first_wild: int = -1
    first_negative: int = -1

    @property
    def rms(self) -> float:
        """The root of the mean square."""
        return math.sqrt(self.squares / self.count) if self.count else 0.0

    @property
    def largest(self) -> float:
        """The largest absolute value."""
        return max(self.high, -self.low, 0.0) if self.count > self.wild else 0.0

    def add(self, values: Any, at: int, room: Any = None) -> bool:
        """Count an array of fp32 or fp64 whose first element is the `at`-th; whether all of it is
        finite. `room` for as many numbers of its dtype is given where `l1` is wanted."""
        import numpy

        size = int(values.size)
        self.count += size
        with numpy.errstate(all="ignore"):
            squares = float(numpy.dot(values, values))
            low, high = float(values.min()), float(values.max())
            finite = math.isfinite(low) and math.isfinite(high)
            if not finite:
                self._wild(values, at)
                return False
            if not math.isfinite(squares):
                squares = float(numpy.dot(values.astype("f8"), values.astype("f8")))
        if room is not None:
            sizes = values if low >= 0 else numpy.abs(values, out=room[:size])
            self.l1 += float(sizes.sum(dtype="f8"))
        self.squares += squares
        self.low, self.high = min(self.low, low), max(self.high, high)
        return True

    def _wild(self, values: Any, at: int) -> None:
        import numpy

        wild = ~numpy.isfinite(values)
        if self.first_wild < 0:
            self.first_wild = at + int(wild.argmax())
        self.wild += int(wild.sum())
        rest = values[~wild]
        if rest.size:
            self.low, self.high = (
                min(self.low, float(rest.min())),
                max(self.high, float(rest.max())),
            )
            self.squares += float(numpy.dot(rest.astype("f8"), rest.astype("f8")))

    def below_zero(self, values: Any, at: int) -> None:
        """Count the negative ones, and remember the first."""
        below = values < 0
        count = int(below.sum())
        if count and self.first_negative < 0:
            self.first_negative = at + int(below.argmax())
        self.negative += count


@dataclass
class Pair:
    """Both moments of the same elements. `limit` is the largest |m| / sqrt(v) there can be; `over`
    counts the elements beyond it, `ratio` is the largest, `first` where the first one is. `updates`
    is the sum of the squares of what Adam would move each element by, in units of lr; `faint`
    counts those whose sqrt(v) is under 10 eps, `rows` and `untrained` rows of a matrix, and those
    whose v is 0; `blank` elements whose m is 0 and whose v is not. `likeness` is the rank
    correlation of |m| with v in a sample."""

    limit: float | None = None
    over: int = 0
    ratio: float = 0.0
    first: int = -1
    updates: float = 0.0
    elements: int = 0
    faint: int = 0
    untrained: int = 0
    rows: int = 0
    still: int = 0
    blank: int = 0
    likeness: float | None = None

    @property
    def update_rms(self) -> float | None:
        """The root mean square of an update, in units of lr; None of no elements."""
        return math.sqrt(self.updates / self.elements) if self.elements else None


@dataclass
class Reading:
    """What was read of one job. Of its masters and weights `compared` were held against each other,
    and `stale` differ, from element `first_stale` on."""

    job: Job
    kinds: dict[str, Numbers] = field(default_factory=dict)
    pair: Pair | None = None
    stale: int = 0
    compared: int = 0
    first_stale: int = -1

    @property
    def parameter(self) -> str:
        """What it is called."""
        return self.job.parameter

    @property
    def file(self) -> Path:
        """Where it is counted."""
        return self.job.file
