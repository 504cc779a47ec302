"""Which bytes of a file are there: ascending ranges that do not touch."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator

Range = tuple[int, int]


class Ranges:
    """A set of bytes as ranges [start, end)."""

    def __init__(self, ranges: list[Range] | None = None) -> None:
        self._starts = [start for start, _ in ranges or []]
        self._ends = [end for _, end in ranges or []]

    def __iter__(self) -> Iterator[Range]:
        return iter(zip(self._starts, self._ends, strict=True))

    def add(self, start: int, end: int) -> None:
        """These bytes too."""
        first = bisect_left(self._ends, start)
        last = bisect_right(self._starts, end)
        if first < last:
            start = min(start, self._starts[first])
            end = max(end, self._ends[last - 1])
        self._starts[first:last] = [start]
        self._ends[first:last] = [end]

    def lacking(self, start: int, end: int) -> list[Range]:
        """The ranges of [start, end) that are not in the set."""
        out = []
        at = bisect_right(self._ends, start)
        while start < end:
            begin = self._starts[at] if at < len(self._starts) else end
            if start < begin:
                out.append((start, min(begin, end)))
            if at >= len(self._ends):
                break
            start, at = max(start, self._ends[at]), at + 1
        return out

    def before(self, start: int) -> int:
        """How many bytes in a row are in the set that end at `start`, or go past it."""
        at = bisect_right(self._starts, start) - 1
        return start - self._starts[at] if at >= 0 and self._ends[at] >= start else 0
