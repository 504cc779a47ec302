"""Two kinds of the same elements held against each other: both moments, a master and its weight."""

from __future__ import annotations

import math
from typing import Any

from ckptsurgeon.formats import Adam
from ckptsurgeon.look.vitals.reading import Pair, Reading
from ckptsurgeon.plans.frozen import frozen

SAMPLE = 8192
"""Elements of a tensor whose ranks are compared, of those that have at least half as many."""


class Room:
    """Arrays for what lies between two steps of a calculation."""

    def __init__(self, size: int, dtype: str) -> None:
        import numpy

        self.a, self.b = numpy.empty(size, dtype), numpy.empty(size, dtype)


@frozen
class Law:
    """What the moments of one strip must keep, and what makes an update of them."""

    adam: Adam
    limit: float | None
    tolerance: float
    floor: float


def add(
    pair: Pair,
    first: Any,
    second: Any,
    at: int,
    law: Law,
    room: Room,
    observe: bool,
    shape: tuple[int, ...] | None,
) -> None:
    """One block of both moments. A v under the floor counts as the floor: of gradients that small
    m could be no larger than what such a v allows."""
    import numpy

    size = int(first.size)
    root, ratio = room.a[:size], room.b[:size]
    with numpy.errstate(all="ignore"):
        low = float(second.min())
        known = second if low >= law.floor else numpy.maximum(second, law.floor, out=root)
        numpy.sqrt(known, out=root)
        numpy.divide(first, root, out=ratio)
        if low < 0:  # a finding of its own
            ratio[second < 0] = 0
        largest = max(float(ratio.max()), -float(ratio.min()))
        pair.ratio = max(pair.ratio, largest)
        if law.limit is not None and largest > law.limit * (1 + law.tolerance):
            over = numpy.abs(ratio) > law.limit * (1 + law.tolerance)
            if pair.first < 0:
                pair.first = at + int(over.argmax())
            pair.over += int(numpy.count_nonzero(over))
        pair.elements += size
        if observe:
            _observe(pair, first, second, low, law, room, shape)


def _observe(
    pair: Pair,
    first: Any,
    second: Any,
    low: float,
    law: Law,
    room: Room,
    shape: tuple[int, ...] | None,
) -> None:
    """More of a block whose smallest v is `low`, and whose roots of v lie in the room."""
    import numpy

    size = int(first.size)
    root, ratio = room.a[:size], room.b[:size]
    up, down = _corrections(law.adam)
    eps = (law.adam.eps or 0.0) / down  # of roots that are not corrected
    pair.faint += int(numpy.count_nonzero(root < 10 * eps))
    numpy.add(root, eps, out=root)
    numpy.divide(first, root, out=ratio)
    pair.updates += float(numpy.dot(ratio, ratio)) * (up / down) ** 2
    blank = first == 0
    if blank.any():
        pair.blank += int(numpy.count_nonzero(blank & (second > 0)))
    if low == 0:
        pair.still += int(numpy.count_nonzero(second == 0))
    if shape is not None and len(shape) > 1:
        row = math.prod(shape[1:])
        if row and size % row == 0:
            pair.rows += size // row
            if low == 0:
                largest = second.reshape(-1, row).max(axis=1)
                pair.untrained += int(numpy.count_nonzero(largest == 0))
    if pair.likeness is None and size >= SAMPLE // 2:
        pair.likeness = rank_correlation(numpy.abs(first[:SAMPLE]), second[:SAMPLE])


def _corrections(adam: Adam) -> tuple[float, float]:
    """What m and sqrt(v) are multiplied by: of an unknown step, or none, 1."""
    if adam.betas is None or not adam.step or len(adam.betas) != 2:
        return 1.0, 1.0
    beta1, beta2 = adam.betas
    one, two = 1 - beta1**adam.step, 1 - beta2**adam.step
    return (1 / one if one else 1.0), (1 / math.sqrt(two) if two > 0 else 1.0)


def rank_correlation(one: Any, other: Any) -> float | None:
    """Spearman's, without regard to ties; None where one of them is constant."""
    import numpy

    if one.min() == one.max() or other.min() == other.max():
        return None
    ranks = []
    for values in (one, other):
        rank = numpy.empty(values.size, "f8")
        rank[numpy.argsort(values, kind="stable")] = numpy.arange(values.size)
        ranks.append(rank - rank.mean())
    norm = math.sqrt(float(numpy.dot(ranks[0], ranks[0]) * numpy.dot(ranks[1], ranks[1])))
    return float(numpy.dot(ranks[0], ranks[1])) / norm


def compare(out: Reading, master: Any, weight: Any, kept: Any, dtype: str, at: int) -> None:
    """One block of masters, rounded to nearest even as `dtype` is, against the weights: `weight` as
    floats, `kept` as they are in the file."""
    import numpy

    out.compared += int(master.size)
    with numpy.errstate(all="ignore"):
        if dtype == "bfloat16":
            bits = master.astype("f4", copy=False).view("u4")
            rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
            differs = rounded != kept
        elif dtype == "float16":
            differs = master.astype("f2").view("u2") != kept
        else:
            differs = master.astype(weight.dtype, copy=False) != weight
        if not differs.any():
            return
        # 0 and -0 are the same weight; what is not finite is a finding of its own.
        values = master.astype("f2" if dtype == "float16" else "f4").astype("f4")
        if dtype == "bfloat16":
            values = (rounded << 16).astype("u4").view("f4")
        elif dtype == "float64":
            values = master
        differs &= (values != weight) & numpy.isfinite(master) & numpy.isfinite(weight)
        count = int(numpy.count_nonzero(differs))
        if count and out.first_stale < 0:
            out.first_stale = at + int(differs.argmax())
        out.stale += count
