"""The stretches [start, end) of a file that new bytes go to: which of them lie close together, and
what is written at once of those that do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

Spans = Sequence[tuple[int, int]]
SHORT_GAP = 64 << 10
"""Zeros up to this long between two writes of an Append are written with them: for a file system
they are less work than a hole, and far less when the file is cut back."""


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
        filled: list[slice] = []
        while number < len(spans) and spans[number][0] < stop:
            begin, end = max(spans[number][0], start), min(spans[number][1], stop)
            filled.append(slice(begin - start, end - start))
            room[filled[-1]] = data[at : at + end - begin]
            at += end - begin
            if spans[number][1] > stop:
                break
            number += 1
        yield start, room[: stop - start]
        for part in filled:
            room[part] = bytes(part.stop - part.start)
        start = stop
