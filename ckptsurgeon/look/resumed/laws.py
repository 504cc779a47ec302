"""What k updates can make of an element of Adam's, whatever the gradients are: theorems.

With m and v before, v' >= b2^k v, since v is a mean of squares. What the k gradients g add is
m' - b1^k m = (1-b1) sum b1^(k-i) g_i and v' - b2^k v = (1-b2) sum b2^(k-i) g_i^2, so Cauchy and
Schwarz give |m' - b1^k m| <= c sqrt(v' - b2^k v), with c of `bound.ratio` for k updates.

A weight moves by at most lr times |m^| / sqrt(v^) at each update, and by lr times its decay. With
r = b1^2 / b2, the same inequality gives m'^2 / v' <= r m^2 / v + (1-b1)^2 / (1-b2): the ratio stays
below the bound where it is, and above it only falls.
"""

from __future__ import annotations

import math
from typing import Any

from ckptsurgeon.look.vitals.bound import FLOOR, TOLERANCE, ratio
from ckptsurgeon.plans.frozen import frozen

LOST = {"bfloat16": 2.0**-8, "float16": 2.0**-11}
"""What rounding takes of a mean that is kept in 16 bits, at most, at every update."""
EXACT = ("float32", "float64")
"""Dtypes that keep a mean so well that two steps of it can be held against each other."""
ROUNDING = 2.0**-22
"""What an update in fp32 rounds off, as a share: a product, a sum, and betas that are fp32."""
TRIED = 1000
"""Counts of updates that the largest correction is taken over: it changes slowly with the count."""


@frozen
class Moments:
    """The law of `updates` updates. `limit` is c; None where only v' >= b2^k v is said: moments of
    16 bits, an unknown count, betas with b1^2 >= b2."""

    betas: tuple[float, float]
    updates: float
    least: float
    floor: float
    limit: float | None

    @classmethod
    def of(
        cls, betas: tuple[float, float], updates: float, dtypes: set[str], exact: bool
    ) -> Moments:
        """For moments of these dtypes; `updates` is their very count if `exact`, else the most that
        it can be."""
        least = betas[1] ** updates * (1 - 1e-3 - updates * 2.0**-23)
        for dtype in dtypes:
            least *= (1 - LOST.get(dtype, 0.0)) ** updates
        limit = ratio(*betas, updates) if exact and dtypes <= {*EXACT} else None
        if limit is not None:
            limit *= 1 + TOLERANCE["float32"] + 2.0**-24 / (1 - betas[1])
        return cls(betas, updates, least, max(FLOOR[dtype] for dtype in dtypes), limit)

    @property
    def telling(self) -> bool:
        """Whether moments that began anew would break it: most of the old v is still there."""
        return bool(self.betas[1] ** self.updates >= 0.5)

    def fallen(self, before: Any, now: Any) -> int:
        """How many elements of v are below what is left of them, where that is above the floor."""
        import numpy

        with numpy.errstate(all="ignore"):
            low = before * self.least
            return int(numpy.count_nonzero((now < low) & (low > self.floor)))

    def apart(self, before: tuple[Any, Any], now: tuple[Any, Any]) -> int:
        """How many pairs (m, v) no k gradients lead to; those are not counted whose v has fallen.
        Arrays of fp64."""
        import numpy

        if self.limit is None:
            return 0
        (b1, b2), k = self.betas, self.updates
        (m, v), (m_now, v_now) = before, now
        slack = ROUNDING * (1 + k)
        # What is rounded off m is a share of the largest |m| on the way, which v_now bounds.
        room = (ratio(b1, b2, None) or 0.0) / (1 - b1 / math.sqrt(b2)) * ROUNDING
        with numpy.errstate(all="ignore"):
            added = v_now * (1 + slack) - v * b2**k
            far = numpy.abs(m_now - m * b1**k)
            most = self.limit * numpy.sqrt(numpy.maximum(added, 0) + self.floor)
            most += room * numpy.sqrt(v_now) + slack * numpy.abs(m) * b1**k
            return int(numpy.count_nonzero((far > most) & (added >= 0)))


@frozen
class Movement:
    """How far `updates` updates can move a weight, whose rates are `rate` at most. An update is
    `rate` times |m| / sqrt(v), which the correction of the biases makes `corrected` times as large,
    at most; of moments that training made |m| / sqrt(v) is never above `bound`."""

    updates: float
    rate: float
    bound: float
    corrected: float
    decay: float

    @classmethod
    def of(
        cls, betas: tuple[float, float], step: float | None, updates: float, rate: float,
        decay: float,
    ) -> Movement | None:  # fmt: skip
        """Of an Adam that has counted `step` updates now; None where its bound is unknown."""
        bound = ratio(*betas, None)
        if bound is None:
            return None
        return cls(updates, rate, bound, correction(betas, step, updates), decay)

    def share(self, before: Any, now: Any, moments: tuple[Any, Any]) -> tuple[int, float]:
        """How many elements moved further, and the largest move as a share of what can be. `before`
        and `now` are the weights, `moments` those before: a pair that is beyond the bound, as a
        surgery may leave it, comes nearer to it at each update. Arrays of fp64."""
        import numpy

        total = self.updates * self.rate * 1.001
        with numpy.errstate(all="ignore"):
            m, v = moments
            begun = numpy.where(m == 0, 0.0, numpy.abs(m) / numpy.sqrt(v))
            largest = numpy.maximum(begun, self.bound) * self.corrected
            size = numpy.abs(before)
            most = total * (largest + self.decay * (size + total * largest))
            most += self.updates * ROUNDING * (size + most) + 1e-30
            shares = numpy.abs(now - before) / most
            return int(numpy.count_nonzero(shares > 1)), float(numpy.nanmax(shares, initial=0.0))


def correction(betas: tuple[float, float], step: float | None, updates: float) -> float:
    """The largest sqrt(1 - b2^t) / (1 - b1^t) at any of the last `updates` of `step` updates; 1
    where that is less, as it is where biases are not corrected."""
    last = math.inf if step is None else max(step, 1)
    first = 1 if step is None else max(step - updates + 1, 1)
    span = min(last, first + 50 / (1 - betas[1])) - first  # beyond, it is 1
    counts = [first + span * i / TRIED for i in range(TRIED + 1)]
    found = (math.sqrt(1 - betas[1] ** t) / (1 - betas[0] ** t) for t in counts)
    return float(max(1.0, 1.01 * max(found)))
