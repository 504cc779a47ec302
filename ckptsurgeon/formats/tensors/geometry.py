"""Where the elements of a part of one step are in another one, which cut the same parameter
otherwise.

A parameter is seen as a matrix, whose columns begin at the last axis that anything is cut along. A
cut of it then has some columns of some rows, and a part has a run of those, row after row.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, pairwise, product
from math import prod
from operator import itemgetter
from typing import NamedTuple

from ckptsurgeon.formats.fields.values import Box, Part, Place


class Rows(NamedTuple):
    """Of each row `cells` times `width` elements, each `step` elements after the one before: the
    first of the first row is element `start` of the tensor at `place`, that of each further row is
    `stride` elements later."""

    place: Place
    start: int
    width: int
    stride: int
    cells: int = 1
    step: int = 0


class Band(NamedTuple):
    """So many `rows`, of which each is one row of each of `columns` in turn."""

    rows: int
    columns: tuple[Rows, ...]


class Unknown(Exception):
    """Why elements can't be found, in words that go on after the name of the parameter."""


class _Rect(NamedTuple):
    """The rows [top, bottom) of a matrix, of the columns [left, right)."""

    top: int
    bottom: int
    left: int
    right: int

    @property
    def width(self) -> int:
        return self.right - self.left


class _Run(NamedTuple):
    """A part, and the rectangle of its cut: it has the elements [first, end) of that."""

    rect: _Rect
    first: int
    end: int
    part: Part

    def row(self, number: int) -> tuple[int, int]:
        """The columns [left, right) of a row of the matrix that it has."""
        before = (number - self.rect.top) * self.rect.width
        begin, end = max(self.first - before, 0), min(self.end - before, self.rect.width)
        return self.rect.left + begin, self.rect.left + max(begin, end)

    def at(self, number: int, column: int) -> int:
        """Where that element is in the tensor."""
        inside = (number - self.rect.top) * self.rect.width + column - self.rect.left
        return self.part.start + inside - self.first

    def breaks(self) -> Iterator[int]:
        """The rows before which it begins or ends, and those around a row that it has a part of."""
        for element in (self.first, self.end):
            row, inside = divmod(element, self.rect.width)
            yield self.rect.top + row
            if inside:
                yield self.rect.top + row + 1


class Found:
    """The elements of a parameter and kind in one step, out of which parts of another step are
    gathered. Every part has a box; of copies, one is taken."""

    def __init__(self, found: Sequence[Part], wanted: Iterable[Part]) -> None:
        boxes = [_box(part) for part in found]
        self._sizes = {box.whole for box in boxes}
        self._axis = max(_last_cut(box) for box in (*boxes, *map(_box, wanted)))
        runs = [run for part in found for run in _runs(part, self._axis)]
        runs.sort(key=self._extent)
        extents = [self._extent(run) for run in runs]
        self._runs, self._begins = runs, [begin for begin, _ in extents]
        self._ends = list(accumulate((end for _, end in extents), max))

    def gathered(self, wanted: Part) -> list[Band]:
        """The elements of `wanted`, one of the parts that were said, one after another. Raises
        Unknown for elements that are in none of the parts."""
        own = _box(wanted)
        if other := next((size for size in self._sizes if size != own.whole), None):
            raise Unknown(f"has the sizes {list(own.whole)} and {list(other)}")
        out: list[Band] = []
        for run in _runs(wanted, self._axis):
            for rect in _pieces(run.rect, run.first, run.end):
                out += _bands(rect, self._near(rect))
        return out

    def _extent(self, run: _Run) -> tuple[int, int]:
        """The rows that it has anything of; the columns where the matrix has one row, which is
        where only axis 0 is cut."""
        if not self._axis:
            return run.rect.left + run.first, run.rect.left + run.end
        width = run.rect.width
        return run.rect.top + run.first // width, run.rect.top - (-run.end // width)

    def _near(self, rect: _Rect) -> list[_Run]:
        """The runs that have any element of it, in time that their number hardly decides."""
        begin, end = (rect.top, rect.bottom) if self._axis else (rect.left, rect.right)
        first, last = bisect_right(self._ends, begin), bisect_left(self._begins, end)
        return [run for run in self._runs[first:last] if _meet(rect, run.rect)]


class Turned:
    """The same of a matrix that is transposed in the parts `found`: its rows are their columns."""

    def __init__(self, found: Sequence[Part]) -> None:
        self._sizes = {_box(part).whole for part in found}
        self._cuts = [
            (rect, run)
            for part in found
            if len(_box(part).whole) == 2
            for run in _runs(part, 1)
            for rect in _pieces(run.rect, run.first, run.end)
        ]
        self._cuts.sort(key=lambda cut: cut[0].top)
        self._begins = [rect.top for rect, _ in self._cuts]
        self._ends = list(accumulate((rect.bottom for rect, _ in self._cuts), max))

    def gathered(self, wanted: Part) -> list[Band]:
        """As `Found.gathered`."""
        whole = _box(wanted).whole
        if len(whole) != 2:
            raise Unknown(f"has the sizes {list(whole)}, and only a matrix is transposed")
        if other := next((size for size in self._sizes if size != whole[::-1]), None):
            raise Unknown(f"has the sizes {list(whole)}, and {list(other)} to be transposed")
        return [
            band
            for run in _runs(wanted, 1)
            for rect in _pieces(run.rect, run.first, run.end)
            for band in self._bands(rect)
        ]

    def _bands(self, rect: _Rect) -> Iterator[Band]:
        first, last = bisect_right(self._ends, rect.left), bisect_left(self._begins, rect.right)
        turned = _Rect(rect.left, rect.right, rect.top, rect.bottom)
        near = [cut for cut in self._cuts[first:last] if _meet(turned, cut[0])]
        breaks = {rect.top, rect.bottom}
        for cut, _ in near:
            breaks.update(row for row in (cut.left, cut.right) if rect.top < row < rect.bottom)
        for top, bottom in pairwise(sorted(breaks)):
            yield Band(bottom - top, tuple(_cells(rect, top, near)))


def _cells(rect: _Rect, row: int, near: Sequence[tuple[_Rect, _Run]]) -> Iterator[Rows]:
    """The columns of `rect` in one row, which is a column of each of `near`, from top to bottom."""
    at = rect.left
    for cut, run in near:
        end = min(cut.bottom, rect.right)
        if cut.left <= row < cut.right and cut.top <= at < end:
            step = run.rect.width if end - at > 1 else 0
            yield Rows(run.part.place, run.at(at, row), 1, 1, end - at, step)
            at = end
    if at < rect.right:
        raise Unknown(f"lacks {rect.right - at} of its elements in row {row}")


def gathered(wanted: Part, found: Sequence[Part]) -> list[Band]:
    """The elements of `wanted` out of `found`: see `Found`."""
    return Found(found, [wanted]).gathered(wanted)


def _box(part: Part) -> Box:
    assert part.box is not None, "every part has a box"
    return part.box


def _last_cut(box: Box) -> int:
    """The last axis along which the block is not the whole parameter."""
    sizes = zip(box.size, box.whole, strict=True)
    return max((i for i, (size, whole) in enumerate(sizes) if size < whole), default=0)


def _runs(part: Part, axis: int) -> Iterator[_Run]:
    """The part in each rectangle of its cut, in the order of its elements. The columns begin at
    `axis`; a block is several rectangles where an axis before that is cut as well, and there are
    others before it."""
    box = part.box
    assert box is not None
    if not box.whole:  # a number
        yield _Run(_Rect(0, 1, 0, 1), 0, 1, part)
        return
    inner = prod(box.whole[axis + 1 :])
    left, width = box.offset[axis] * inner, box.size[axis] * inner
    last = max((i for i in range(axis) if box.size[i] < box.whole[i]), default=0)
    rows = prod(box.size[last:axis])
    size, at = rows * width, 0
    for outer in product(*(range(n) for n in box.size[:last])):
        top = 0
        for index in range(axis):
            here = outer[index] if index < last else 0
            top = top * box.whole[index] + box.offset[index] + here
        first, end = part.first - at, part.first + part.end - part.start - at
        if first < size and end > 0:
            inside = part._replace(start=part.start + max(0, -first))
            rect = _Rect(top, top + rows, left, left + width)
            yield _Run(rect, max(first, 0), min(end, size), inside)
        at += size


def _meet(one: _Rect, other: _Rect) -> bool:
    return (
        one.left < other.right
        and other.left < one.right
        and one.top < other.bottom
        and other.top < one.bottom
    )


def _pieces(rect: _Rect, first: int, end: int) -> Iterator[_Rect]:
    """The elements [first, end) of a rectangle, row after row, as rectangles: the rest of a row,
    whole rows, and the begin of one."""
    while first < end:
        row, inside = divmod(first, rect.width)
        rows = 1 if inside else max(1, (end - first) // rect.width)
        width = min(rect.width - inside, end - first) if inside or rows == 1 else rect.width
        left, top = rect.left + inside, rect.top + row
        yield _Rect(top, top + rows, left, left + width)
        first += rows * width


def _bands(rect: _Rect, runs: Sequence[_Run]) -> Iterator[Band]:
    breaks = {rect.top, rect.bottom}
    for run in runs:
        breaks.update(row for row in run.breaks() if rect.top < row < rect.bottom)
    edges = sorted(breaks)
    for top, bottom in pairwise(edges):
        yield Band(bottom - top, tuple(_columns(rect, top, runs)))


def _columns(rect: _Rect, row: int, runs: Sequence[_Run]) -> Iterator[Rows]:
    """The columns of `rect` in one row, from left to right; of copies, the first one's. The same
    runs have them in each row of the band that begins there."""
    at = rect.left
    here = ((*run.row(row), run) for run in runs if run.rect.top <= row < run.rect.bottom)
    for left, right, run in sorted(here, key=itemgetter(0)):
        end = min(right, rect.right)
        if left <= at < end:
            yield Rows(run.part.place, run.at(row, at), end - at, run.rect.width)
            at = end
    if at < rect.right:
        raise Unknown(f"lacks {rect.right - at} of its elements in row {row}")
