"""The parts of one parameter in a step, and which block of it each of them is of."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import prod

from ckptsurgeon.errors import SurgeryError, count
from ckptsurgeon.formats.fields.values import Box, Part
from ckptsurgeon.formats.heads.heads import STACKED

Kinds = dict[str, list[Part]]
"""The parts of one parameter by what they are, of all its cuts."""


def by_name(parts: Iterable[Part]) -> dict[str, Kinds]:
    """Parameter → its parts, without those that have no element."""
    out: dict[str, Kinds] = {}
    for part in parts:
        if part.end > part.start:
            out.setdefault(part.parameter, {}).setdefault(part.kind, []).append(part)
    return out


def unstacked(parts: Iterable[Part]) -> Iterator[Part]:
    """The parts, those of megatron-core's stacked layers as parts of each layer, whose number is in
    the name then: its tensors have the layers as their first axis."""
    for part in parts:
        box = part.box
        if box is None or len(box.whole) < 2 or not STACKED.search(part.parameter):
            yield part
            continue
        for i in range(box.size[0]):
            name = STACKED.sub(rf"\g<0>{box.offset[0] + i}.", part.parameter, count=1)
            layer = Box(box.whole[1:], box.offset[1:], box.size[1:], box.replica)
            if piece := within(part, i * layer.numel, layer):
                yield piece._replace(parameter=name)


def within(part: Part, at: int, box: Box) -> Part | None:
    """What a part has of the block `box`, whose elements are those of its own from `at` on; None
    without any."""
    first = max(part.first, at)
    end = min(part.first + part.end - part.start, at + box.numel)
    if first >= end:
        return None
    start = part.start + first - part.first
    return part._replace(start=start, end=start + end - first, first=first - at, box=box)


def every(kinds: Kinds) -> Iterator[Part]:
    """All parts, whatever they are."""
    for parts in kinds.values():
        yield from parts


def boxed(kinds: Kinds) -> Kinds | None:
    """The parts, each with its box. Where a format does not say it, there must be one cut, which is
    all of the parameter; None where there are more."""
    if all(part.box for part in every(kinds)):
        return kinds
    if len(by_cut(kinds)) > 1:
        return None
    sizes = [part.place.value.size for part in every(kinds) if _is_whole(part)]
    out: Kinds = {}
    for kind, total in totals(kinds).items():
        size = next((size for size in sizes if prod(size) == total), (total,))
        out[kind] = [part._replace(box=part.box or Box.all(size)) for part in kinds[kind]]
    return out


def refuse_strays(kinds: Kinds) -> None:
    """Raise SurgeryError for a part that is not all inside its tensor, or inside the block that its
    cut is said to hold."""
    for part in every(kinds):
        box, end = part.box, part.first + part.end - part.start
        if not 0 <= part.start <= part.end <= part.place.value.numel:
            raise _stray(part, f"its tensor, which has {count(part.place.value.numel, 'element')}")
        if box is None:
            continue
        blocks = zip(box.offset, box.size, box.whole, strict=True)
        if any(not 0 <= offset <= offset + size <= whole for offset, size, whole in blocks):
            raise _stray(part, f"the sizes {list(box.whole)}")
        if part.first < 0 or end > box.numel:
            raise _stray(part, f"its end, at element {box.numel}")


def _stray(part: Part, what: str) -> SurgeryError:
    return SurgeryError(
        f"{part.parameter} has {part.kind} in {part.place.file.name} beyond {what}",
        next="take a step that its trainer saved whole",
    )


def by_cut(kinds: Kinds) -> dict[str, Kinds]:
    """Each cut of a parameter as if it were one of its own."""
    out: dict[str, Kinds] = {}
    for part in every(kinds):
        out.setdefault(part.cut, {}).setdefault(part.kind, []).append(part._replace(box=None))
    return out


def totals(kinds: Kinds) -> dict[str, int]:
    """How many elements a parameter of one cut has of each kind."""
    return {k: max(p.first + p.end - p.start for p in parts) for k, parts in kinds.items()}


def shape(kinds: Kinds) -> tuple[int, ...]:
    """Of the whole parameter, by parts that have boxes."""
    box = next(every(kinds)).box
    assert box is not None
    return box.whole


def first_rows(kinds: Kinds, rows: int) -> Kinds:
    """What of the parts is in the first rows of their parameter, as if there were no others."""
    return {
        kind: [less for part in parts if (less := _first_rows(part, rows))]
        for kind, parts in kinds.items()
    }


def _first_rows(part: Part, rows: int) -> Part | None:
    box = part.box
    assert box is not None
    count = min(max(rows - box.offset[0], 0), box.size[0])
    left = count * prod(box.size[1:]) - part.first
    if left <= 0:
        return None
    new = box._replace(whole=(rows, *box.whole[1:]), size=(count, *box.size[1:]))
    return part._replace(box=new, end=min(part.end, part.start + left))


def _is_whole(part: Part) -> bool:
    return part.first == 0 and part.end - part.start == part.place.value.numel
