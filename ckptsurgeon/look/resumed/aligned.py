"""The same elements in two saved steps, side by side, also where these are cut in other ways.

Where both steps keep something at the same place of the same file, that is it. Where they do not,
an element is found by the parameter it is of and where it lies in that.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from math import prod
from typing import Any, NamedTuple

from ckptsurgeon.files.pickles.tree import Tensor
from ckptsurgeon.formats import Checkpoint, Part, Strip
from ckptsurgeon.formats.tensors import blocks
from ckptsurgeon.formats.tensors.strips import ORDER, contiguous
from ckptsurgeon.look.vitals.jobs import strips_of


class Aligned(NamedTuple):
    """Strips of the same elements."""

    now: Strip
    before: Strip


class Run(NamedTuple):
    """The elements [first, end) of a whole parameter, of which the first is element `start` of the
    tensor that `part` is in."""

    first: int
    end: int
    part: Part
    start: int


def aligned(now: Checkpoint, before: Checkpoint) -> tuple[list[Aligned], list[str]]:
    """Every strip of `now` with its elements of `before`, and the parameters that have none there:
    a file that repeats others has none where only one step has it."""
    older = {_key(before, strip): strip for strip in strips_of(before)}
    out: list[Aligned] = []
    left: dict[str, Strip] = {}
    for strip in strips_of(now):
        other = older.get(_key(now, strip))
        if other is not None and other.numel == strip.numel:
            out.append(Aligned(strip, other))
        else:
            left.setdefault(strip.parameter, strip)
    if not left:
        return out, []
    ones, others = (blocks.by_name(c.known_parts()) for c in (now, before))
    theirs = {strip.parameter: strip for strip in older.values()}
    lost: list[str] = []
    known = {pair.now.parameter for pair in out}
    for name, strip in left.items():
        mine, its = (blocks.boxed(each.get(name, {})) for each in (ones, others))
        found = (
            list(_by_position(mine, its, strip, theirs[name]))
            if mine and its and name in theirs
            else []
        )
        if found:
            out = [pair for pair in out if pair.now.parameter != name] + found
        elif name not in known:
            lost.append(name)
    return out, lost


def _key(checkpoint: Checkpoint, strip: Strip) -> tuple[Any, ...]:
    kinds = [kind for kind in ORDER if kind in strip.tensors or kind in strip.codes]
    kind = kinds[0]
    place, first = strip.tensors[kind] if kind in strip.tensors else (strip.codes[kind].place, 0)
    inside = place.file.is_relative_to(checkpoint.path)
    name = place.file.relative_to(checkpoint.path).as_posix() if inside else place.file.name
    name = re.sub(rf"(?<!\d)0*{checkpoint.step}(?!\d)", "N", name)
    return kind, name, place.path, first, strip.parameter


def _by_position(
    mine: blocks.Kinds, its: blocks.Kinds, strip: Strip, other: Strip
) -> Iterator[Aligned]:
    if blocks.shape(mine) != blocks.shape(its):
        return
    kinds = [kind for kind in ORDER if kind in mine and kind in its]
    sides = [_in_order(side[kind]) for side in (mine, its) for kind in kinds]
    for first, end, rows in shared(sides):
        tensors = [(row.part.place, row.start + first - row.first) for row in rows]
        now, before = (
            each._replace(
                numel=end - first, tensors=dict(zip(kinds, found, strict=True)), codes={},
                shape=None,
            )
            for each, found in ((strip, tensors[: len(kinds)]), (other, tensors[len(kinds) :]))
        )  # fmt: skip
        yield Aligned(now, before)


def _in_order(parts: Iterable[Part]) -> list[Run]:
    """The runs of these parts in the order of the parameter's elements; of copies, one."""
    out: list[Run] = []
    kept = (part for part in parts if isinstance(part.place.value, Tensor))
    found = (run for part in kept if contiguous(part.place.value) for run in runs(part))
    for run in sorted(found, key=lambda run: run.first):
        end = out[-1].end if out else 0
        if run.end > end:
            cut = max(0, end - run.first)
            out.append(run._replace(first=run.first + cut, start=run.start + cut))
    return out


def runs(part: Part) -> Iterator[Run]:
    """What a part has of its whole parameter, a run for each row that a cut leaves of it."""
    box = part.box
    assert box is not None, "every part has a box"
    sizes = zip(box.size, box.whole, strict=True)
    axis = max((i for i, (size, whole) in enumerate(sizes) if size < whole), default=0)
    length = prod(box.size[axis:])
    first, last = part.first, part.first + part.end - part.start
    while first < last:
        row, inside = divmod(first, length)
        end = min(last, (row + 1) * length)
        at = _offset(box.whole, box.offset, box.size, axis, row) + inside
        yield Run(at, at + end - first, part, part.start + first - part.first)
        first = end


def _offset(
    whole: Sequence[int], offset: Sequence[int], size: Sequence[int], axis: int, row: int
) -> int:
    """Where in the whole parameter a row of a block begins; its rows are counted over the axes
    before `axis`."""
    index = [*offset]
    for i in reversed(range(axis)):
        row, here = divmod(row, size[i])
        index[i] += here
    at = 0
    for length, here in zip(whole, index, strict=True):
        at = at * length + here
    return at


def shared(sides: Sequence[list[Run]]) -> Iterator[tuple[int, int, list[Run]]]:
    """The longest stretches in which no run of any side begins or ends, where all of them have
    one."""
    positions = [0] * len(sides)
    while all(at < len(side) for at, side in zip(positions, sides, strict=True)):
        rows = [side[at] for at, side in zip(positions, sides, strict=True)]
        first, end = max(row.first for row in rows), min(row.end for row in rows)
        if first < end:
            yield first, end, rows
        for i, row in enumerate(rows):
            if row.end == end:
                positions[i] += 1
