"""Which parameter of a step is filled from which of another one, before anything is changed."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from pathlib import Path

from ckptsurgeon.errors import SurgeryError, count
from ckptsurgeon.formats import Part
from ckptsurgeon.formats.tensors.blocks import Kinds, boxed, every, shape
from ckptsurgeon.operations.parameter_names import Origin
from ckptsurgeon.operations.transplanted_tensors import Tensors
from ckptsurgeon.plans.edits import Key
from ckptsurgeon.plans.frozen import held

FILLED, FRESH, REFUSED = "filled", "fresh", "refused"


@held
class Named:
    """A parameter; `shape` is None where no format says it."""

    name: str
    shape: tuple[int, ...] | None


@held
class Mapped(Named):
    """What becomes of the `kinds` of a parameter here: `state` is FILLED, FRESH or REFUSED. `how`
    has what is done to the rows of the `sources`, and `refused` why it can't be filled."""

    state: str
    kinds: tuple[str, ...]
    sources: tuple[Named, ...] = ()
    how: tuple[str, ...] = ()
    refused: tuple[SurgeryError, ...] = ()


@held
class ParameterMap:
    """Every parameter of step `step`, each in one row or, where weights and moments come from
    different ones, in several; what of the source is `left` behind; how many elements of the
    tensors here are `padding`, of no parameter; and why the whole step is `refused`."""

    step: int
    source: Path
    source_step: int
    rows: tuple[Mapped, ...]
    left: tuple[Named, ...]
    padding: int
    refused: tuple[SurgeryError, ...]

    def names(self, state: str) -> list[str]:
        """Of the parameters with a row in this state, in order."""
        return list(dict.fromkeys(row.name for row in self.rows if row.state == state))


def parameter_map(step: int, source: Path, source_step: int, tensors: Tensors) -> ParameterMap:
    """The map of tensors whose refusals are kept, after their changes were asked for."""
    rows = [row for name in tensors.own for row in _rows(tensors, name)]
    left = [Named(name, _shape(tensors.theirs[name])) for name in tensors.left]
    refused = tensors.refusals.by_name
    whole = tuple(
        why for name, found in refused.items() if name not in tensors.own for why in found
    )
    padding = _padding(chain.from_iterable(map(every, tensors.own.values())))
    return ParameterMap(step, source, source_step, tuple(rows), tuple(left), padding, whole)


def _rows(tensors: Tensors, name: str) -> list[Mapped]:
    kinds, origins = tensors.own[name], tensors.origins.get(name, [])
    size, refused = _shape(kinds), tuple(tensors.refusals.by_name.get(name, ()))
    if refused:
        used = dict.fromkeys(source for way in origins for source in way.sources)
        sources = tuple(_source(tensors, source) for source in used)
        return [Mapped(name, size, REFUSED, tuple(kinds), sources, (), refused)]
    if not origins:
        return [Mapped(name, size, FRESH, tuple(kinds))]
    ways = tensors.ways(name, kinds)
    rows = [
        Mapped(
            name,
            size,
            FILLED,
            tuple(some),
            tuple(_source(tensors, source) for source in way.sources),
            tuple(_how(tensors, name, way)),
        )
        for way, some in ways
    ]
    rest = tuple(kind for kind in kinds if not any(kind in some for _, some in ways))
    return [*rows, Mapped(name, size, FRESH, rest)] if rest else rows


def _source(tensors: Tensors, name: str) -> Named:
    return Named(name, _shape(tensors.theirs[name]))


def _how(tensors: Tensors, name: str, way: Origin) -> Iterable[str]:
    """What is done to the rows, in the words of the page of names."""
    if way.turned:
        yield "transposed"
    if way.stacks:
        yield f"stacked: {way.stacks}"
    if way.siblings:
        yield f"part {way.index + 1} of {len(way.siblings)}"
    if way.groups != 1:
        yield f"groups: {way.groups}"
    if any(way.heads):
        yield "halves_to_pairs" if way.to_pairs else "pairs_to_halves"
    if name in tensors.grown:
        rows, whole = tensors.grown[name]
        yield f"{rows} of {count(whole, 'row')}, the others stay fresh"
    if name in tensors.cut:
        rows, whole = tensors.cut[name]
        yield f"{rows} of its {count(whole, 'row')}, the others are left behind"


def _shape(kinds: Kinds) -> tuple[int, ...] | None:
    found = boxed(kinds)
    return shape(found) if found else None


def _padding(parts: Iterable[Part]) -> int:
    """How many elements of the tensors that have these parts are in none of them."""
    tensors: dict[tuple[Path, tuple[Key, ...]], list[Part]] = {}
    for part in parts:
        tensors.setdefault((part.place.file, part.place.path), []).append(part)
    count = 0
    for found in tensors.values():
        at = 0
        for part in sorted(found, key=lambda part: part.start):
            count += max(0, part.start - at)
            at = max(at, part.end)
        count += found[0].place.value.numel - at
    return count
