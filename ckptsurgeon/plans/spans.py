"""The stretches [start, end) of a file that new bytes go to: which of them lie close together, and
what is written at once of those that do."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import pairwise
from operator import itemgetter

Spans = Sequence[tuple[int, int]]
SHORT_GAP = 64 << 10
"""Zeros up to this long between two writes of an Append are written with them: for a file system
they are less work than a hole, and far less when the file is cut back."""


def total(spans: Spans) -> int:
    """The bytes of all of them: a reset of 10,000 tensors has 7,000 spans."""
    starts: Iterator[int] = map(itemgetter(0), spans)
    ends: Iterator[int] = map(itemgetter(1), spans)
    return sum(ends) - sum(starts)


def rows(spans: Spans, gap: int) -> Iterator[Spans]:
    """Neighbours with no more than `gap` bytes between two of them."""
    first = 0
    for last, ((_, end), (start, _)) in enumerate(pairwise(spans), 1):
        if start - end > gap:
            yield spans[first:last]
            first = last
    if spans:
        yield spans[first:]


def windows(room: memoryview, data: memoryview, spans: Spans) -> Iterator[tuple[int, memoryview]]:
    """Where to write what: the bytes of the spans and the zeros between them, in windows that end
    at multiples of the room's size, each until the next. The room holds zeros, now and then."""
    start, last = spans[0][0], spans[-1][1]
    number = at = 0
    while start < last:
        stop = min(last, start - start % len(room) + len(room))
        after = bisect_left(spans, (stop,), number)
        mine = spans[number:after]
        if mine and (mine[0][0] < start or mine[-1][1] > stop):
            mine = [(max(begin, start), min(end, stop)) for begin, end in mine]
        for begin, end in mine:
            room[begin - start : end - start] = data[at : at + end - begin]
            at += end - begin
        yield start, room[: stop - start]
        for begin, end in mine:
            room[begin - start : end - start] = bytes(end - begin)
        number = after - (spans[after - 1][1] > stop)
        start = stop
