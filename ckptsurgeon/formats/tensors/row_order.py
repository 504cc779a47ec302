"""Parameters whose rows have another order in another trainer: by groups of heads, or by pairs.

Fused projections have, of each group of heads, its queries, its key and its value. Rotary
embeddings turn either the two halves of a head, row by row, or pairs of rows that lie side by side.
Both are seen here as axes of their own, (group, row, 1 or 2, …), in which a part is a block again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, product
from math import prod
from typing import NamedTuple

from ckptsurgeon.formats.fields.values import Box, Part
from ckptsurgeon.formats.tensors.blocks import Kinds, within


class Section(NamedTuple):
    """So many `rows` of each group. `half` is how many rows half a head has, of those that are to
    be seen as pairs; else 0."""

    rows: int
    half: int = 0


HERE, THERE = "here", "there"


class Order(NamedTuple):
    """How the rows of parameters that are apart in one run make one of the other run: of each of
    `groups` the `sections`, one of each parameter. `to_pairs` is whether halves are in the source.
    `filled` is the one that is filled, where the source is fused; None where it is apart. Those
    that are apart may be `stacked` in one parameter, all rows of each after those of the one
    before, which the other run has by groups: it is HERE, or in the source (THERE)."""

    groups: int
    sections: tuple[Section, ...]
    to_pairs: bool = True
    filled: int | None = None
    stacked: str = ""

    @property
    def width(self) -> int:
        """2 where any rows are to be seen as pairs."""
        return 2 if any(section.half for section in self.sections) else 1


def in_one_order(own: Kinds, theirs: Sequence[Kinds], order: Order) -> tuple[Kinds, Kinds]:
    """The parts of a parameter, and those of the source that it comes from, as blocks of one
    parameter. Each must have a box, and rows that fit the order."""
    count, apart = len(order.sections), order._replace(stacked="")
    if order.stacked == HERE:
        each = enumerate(_stacks(own, count))
        made = [in_one_order(one, theirs, apart._replace(filled=i)) for i, one in each]
        return _joined([one for one, _ in made]), made[0][1]
    if order.stacked == THERE:
        return in_one_order(own, _stacks(theirs[0], count), apart)
    if order.filled is None:
        sources = zip(theirs, order.sections, strict=True)
        parts = [_seen(kinds, order, [section], order.to_pairs) for kinds, section in sources]
        return _seen(own, order, order.sections, not order.to_pairs), _stacked(parts)
    rows = [section.rows // order.width for section in order.sections]
    mine = _seen(own, order, [order.sections[order.filled]], not order.to_pairs)
    there = _seen(theirs[0], order, order.sections, order.to_pairs)
    return _beside(mine, sum(rows[: order.filled]), sum(rows)), there


def _stacks(kinds: Kinds, count: int) -> list[Kinds]:
    """Those of each of `count` parameters of as many rows, one after another in this one."""
    rows = _box(kinds).whole[0] // count
    return [
        {
            kind: [piece for part in parts if (piece := _rows_of(part, i * rows, rows))]
            for kind, parts in kinds.items()
        }
        for i in range(count)
    ]


def _rows_of(part: Part, first: int, rows: int) -> Part | None:
    """What a part has of so many rows, as of a parameter that has them alone."""
    box = part.box
    assert box is not None
    low, high = max(first, box.offset[0]), min(first + rows, box.offset[0] + box.size[0])
    if low >= high:
        return None
    block = Box((rows, *box.whole[1:]), (low - first, *box.offset[1:]), (high - low, *box.size[1:]))
    return within(part, (low - box.offset[0]) * prod(box.size[1:]), block)


# --- transposed ----------------------------------------------------------------------------------


def turned_in_one_order(
    own: Kinds, theirs: Sequence[Kinds], order: Order, turned: str
) -> tuple[Kinds, Kinds]:
    """As `in_one_order`, of matrices that are transposed in the run `turned`, HERE or THERE: as
    blocks of one matrix and of that transposed. Its columns keep their order there, and the rows of
    the other run get it."""
    mine = list(zip([own], _numbered(order, HERE, 1), strict=True))
    others = list(zip(theirs, _numbered(order, THERE, len(theirs)), strict=True))
    columns, rows = (mine, others) if turned == HERE else (others, mine)
    places = {number: i for i, number in enumerate(n for _, found in columns for n in found)}
    beside, at = [], 0
    for kinds, found in columns:
        beside.append({k: [_columns(p, at, len(places)) for p in ps] for k, ps in kinds.items()})
        at += len(found)
    straight = []
    for kinds, found in rows:
        runs = list(_row_runs(found, places))
        straight.append(
            {
                kind: [
                    piece
                    for part in parts
                    for run in runs
                    if (piece := _row_run(part, run, len(places)))
                ]
                for kind, parts in kinds.items()
            }
        )
    both = _joined(beside), _joined(straight)
    return both if turned == HERE else both[::-1]


def _numbered(order: Order, run: str, count: int) -> list[list[int]]:
    """Of each of the `count` parameters in one of the runs, a number for each row: the same for the
    same row of the other run."""
    sections, halves = order.sections, order.to_pairs == (run == THERE)
    rows = [section.rows // order.width for section in sections]
    apart = [
        list(_numbers(order, [section], sum(rows[:i]), sum(rows), halves))
        for i, section in enumerate(sections)
    ]
    if count > 1:
        return apart
    if run == HERE and order.filled is not None:
        return [apart[order.filled]]
    if run == order.stacked:
        return [list(chain.from_iterable(apart))]
    return [list(_numbers(order, sections, 0, sum(rows), halves))]


def _numbers(
    order: Order, sections: Sequence[Section], before: int, total: int, halves: bool
) -> Iterator[int]:
    axes = (order.groups, sum(section.rows for section in sections) // order.width, order.width)
    count = prod(axes)
    turned = halves and order.width == 2
    for begin, size in _turned(0, count, axes, sections) if turned else _blocks(0, count, axes):
        ranges = (range(first, first + length) for first, length in zip(begin, size, strict=True))
        for group, row, pair in product(*ranges):
            yield (group * total + before + row) * order.width + pair


def _row_runs(numbers: Sequence[int], places: dict[int, int]) -> Iterator[tuple[int, int, int]]:
    """Rows that follow one another in both: the first one, how many, and where they are there."""
    first = length = at = 0
    for row, number in enumerate(numbers):
        place = places.get(number)
        if length and place == at + length:
            length += 1
            continue
        if length:
            yield first, length, at
        first, length, at = (row, 1, place) if place is not None else (0, 0, 0)
    if length:
        yield first, length, at


def _row_run(part: Part, run: tuple[int, int, int], total: int) -> Part | None:
    first, length, at = run
    piece = _rows_of(part, first, length)
    if piece is None or piece.box is None:
        return None
    (top, left), (_, width) = piece.box.offset, piece.box.whole
    box = piece.box._replace(whole=(total, width), offset=(top + at, left))
    return piece._replace(box=box)


def _columns(part: Part, before: int, total: int) -> Part:
    """As one of a matrix with so many columns, of which `before` come first."""
    box = part.box
    assert box is not None
    (rows, _), (top, left) = box.whole, box.offset
    return part._replace(box=box._replace(whole=(rows, total), offset=(top, left + before)))


def _joined(found: Sequence[Kinds]) -> Kinds:
    """All parts of the kinds that each has."""
    return {
        kind: [part for kinds in found for part in kinds[kind]]
        for kind in found[0]
        if all(kind in kinds for kinds in found)
    }


def _box(kinds: Kinds) -> Box:
    box = next(part for parts in kinds.values() for part in parts).box
    assert box is not None
    return box


# --- as axes of their own ------------------------------------------------------------------------


def _seen(kinds: Kinds, order: Order, sections: Sequence[Section], halves: bool) -> Kinds:
    """As blocks of (groups, rows, width, …): where heads lie in halves, row i of both is pair i."""
    return {
        kind: [piece for part in parts for piece in _pieces(part, order, sections, halves)]
        for kind, parts in kinds.items()
    }


def _stacked(found: Sequence[Kinds]) -> Kinds:
    """As one, whose groups have the rows of each, one after another; of the kinds that all have."""
    out: Kinds = {}
    rows = [_rows(kinds) for kinds in found]
    for i, kinds in enumerate(found):
        for kind, parts in _beside(kinds, sum(rows[:i]), sum(rows)).items():
            if all(kind in each for each in found):
                out.setdefault(kind, []).extend(parts)
    return out


def _rows(kinds: Kinds) -> int:
    return _box(kinds).whole[1]


def _beside(kinds: Kinds, before: int, rows: int) -> Kinds:
    """As those of a parameter with so many `rows` in each group, of which `before` come first."""
    return {kind: [_moved(part, before, rows) for part in parts] for kind, parts in kinds.items()}


def _moved(part: Part, before: int, rows: int) -> Part:
    box = part.box
    assert box is not None
    (groups, _, *more), (group, row, *rest) = box.whole, box.offset
    new = box._replace(whole=(groups, rows, *more), offset=(group, row + before, *rest))
    return part._replace(box=new)


def _pieces(part: Part, order: Order, sections: Sequence[Section], halves: bool) -> Iterator[Part]:
    """What a part has of each block, whose rows are those of its own, one after another."""
    box = part.box
    assert box is not None
    axes = (order.groups, sum(section.rows for section in sections) // order.width, order.width)
    first, end = box.offset[0], box.offset[0] + box.size[0]
    turned = halves and order.width == 2
    blocks = _turned(first, end, axes, sections) if turned else _blocks(first, end, axes)
    whole, offset, size = box.whole[1:], box.offset[1:], box.size[1:]
    at = 0
    for begin, rows in blocks:
        block = Box((*axes, *whole), (*begin, *offset), (*rows, *size))
        if piece := within(part, at, block):
            yield piece
        at += block.numel


Block = tuple[tuple[int, ...], tuple[int, ...]]
"""Where it begins along each axis, and its sizes."""


def _turned(
    first: int, end: int, axes: Sequence[int], sections: Sequence[Section]
) -> Iterator[Block]:
    """The rows [first, end), of heads in halves: a block for each half."""
    row = 0
    for group in range(axes[0]):
        before = 0
        for rows, half in sections:
            for number in range(rows // half if half else 1):
                length = half or rows
                low, high = max(first, row), min(end, row + length)
                if low < high and half:
                    pair = before // 2 + number // 2 * half + low - row
                    yield (group, pair, number % 2), (1, high - low, 1)
                elif low < high:
                    yield from _blocks(low, high, axes)
                row += length
            before += rows


def _blocks(first: int, end: int, axes: Sequence[int]) -> Iterator[Block]:
    """The rows [first, end), counted over all axes, as blocks of them, in order."""
    if len(axes) == 1:
        yield (first,), (end - first,)
        return
    inner = prod(axes[1:])
    while first < end:
        outer, inside = divmod(first, inner)
        if inside or end - first < inner:
            stop = min(end, (outer + 1) * inner)
            for offset, size in _blocks(inside, inside + stop - first, axes[1:]):
                yield (outer, *offset), (1, *size)
        else:
            count = (end - first) // inner
            stop = first + count * inner
            yield (outer, *(0 for _ in axes[1:])), (count, *axes[1:])
        first = stop
