"""Parameters whose rows have another order in another trainer: by groups of heads, or by pairs.

Fused projections have, of each group of heads, its queries, its key and its value. Rotary
embeddings turn either the two halves of a head, row by row, or pairs of rows that lie side by side.
Both are seen here as axes of their own, (group, row, 1 or 2, …), in which a part is a block again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import NamedTuple

from ckptsurgeon.formats.fields.values import Box, Part
from ckptsurgeon.formats.tensors.blocks import Kinds, within


class Section(NamedTuple):
    """So many `rows` of each group. `half` is how many rows half a head has, of those that are to
    be seen as pairs; else 0."""

    rows: int
    half: int = 0


class Order(NamedTuple):
    """How the rows of parameters that are apart in one run make one of the other run: of each of
    `groups` the `sections`, one of each parameter. `to_pairs` is whether halves are in the source.
    `filled` is the one that is filled, where the source is fused; None where it is apart."""

    groups: int
    sections: tuple[Section, ...]
    to_pairs: bool = True
    filled: int | None = None

    @property
    def width(self) -> int:
        """2 where any rows are to be seen as pairs."""
        return 2 if any(section.half for section in self.sections) else 1


def in_one_order(own: Kinds, theirs: Sequence[Kinds], order: Order) -> tuple[Kinds, Kinds]:
    """The parts of a parameter, and those of the source that it comes from, as blocks of one
    parameter. Each must have a box, and rows that fit the order."""
    if order.filled is None:
        sources = zip(theirs, order.sections, strict=True)
        parts = [_seen(kinds, order, [section], order.to_pairs) for kinds, section in sources]
        return _seen(own, order, order.sections, not order.to_pairs), _stacked(parts)
    rows = [section.rows // order.width for section in order.sections]
    mine = _seen(own, order, [order.sections[order.filled]], not order.to_pairs)
    there = _seen(theirs[0], order, order.sections, order.to_pairs)
    return _beside(mine, sum(rows[: order.filled]), sum(rows)), there


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
    box = next(part for parts in kinds.values() for part in parts).box
    assert box is not None
    return box.whole[1]


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
