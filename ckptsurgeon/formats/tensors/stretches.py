"""The stretches of each parameter by what they are, and the numbers in some of their elements."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.files.dcp import Whole
from ckptsurgeon.formats.checkpoint import Checkpoint
from ckptsurgeon.formats.fields.values import Part, Place
from ckptsurgeon.formats.heads.heads import Rows
from ckptsurgeon.hints import command
from ckptsurgeon.remote import reads
from ckptsurgeon.transaction.arithmetic import ITEM, floats

Parameter = tuple[str, str]
"""A parameter's name, and the cut of it."""
Kinds = Mapping[str, Sequence[Part]]
"""Its stretches by what they are."""


def by_parameter(parts: Iterable[Part]) -> dict[Parameter, dict[str, list[Part]]]:
    """Parameter → kind → its stretches in the order of its elements."""
    out: dict[Parameter, dict[str, list[Part]]] = {}
    for part in parts:
        kinds = out.setdefault((part.parameter, part.cut), {})
        kinds.setdefault(part.kind, []).append(part)
    for kinds in out.values():
        for stretches in kinds.values():
            stretches.sort(key=lambda part: part.first)
    return out


def pieces(place: Place) -> list[Place]:
    """The tensors that the one at `place` was saved in: itself, or its chunks, one by one."""
    if not isinstance(place.value, Whole):
        return [place]
    return [
        place._replace(path=(place.path[0], chunk), value=tensor, chunks=1)
        for chunk, tensor in enumerate(place.value)
    ]


def within(stretches: Iterable[Part], start: int, end: int) -> Iterator[Part]:
    """What of the stretches is of the elements [start, end) of their cut."""
    for part in stretches:
        begin, stop = max(start, part.first), min(end, part.first + part.end - part.start)
        if begin < stop:
            at = part.start + begin - part.first
            yield part._replace(start=at, end=at + stop - begin, first=begin)


def numbers(checkpoint: Checkpoint, known: Mapping[Parameter, Kinds], rows: Iterable[Rows]) -> Any:
    """The elements in these rows, one after another, as float64: of the masters where there are
    any. Raises SurgeryError for a dtype that is no plain float, and for elements that no stretch
    has."""
    import numpy

    out = []
    for name, cut, start, end in rows:
        kinds = known[name, cut]
        found = list(within(kinds.get("master") or kinds.get("weights", ()), start, end))
        if sum(part.end - part.start for part in found) != end - start:
            raise SurgeryError(
                f"{name}: its elements {start} to {end} are not all in the shards",
                next=command("verify", "--level", "3", why="list what contradicts itself"),
            )
        for part in found:
            dtype = part.place.value.dtype
            if dtype not in ITEM:
                raise SurgeryError(
                    f"{name}: its {part.kind} are {dtype}, which can't be computed with",
                    next=command("export", why="what the weights are"),
                )
            file, first, last = checkpoint.span(part.place, part.start, part.end)
            descriptor = reads.opened(file)
            try:
                data = reads.bytes_at(file, descriptor, first, last - first)
            finally:
                os.close(descriptor)
            out.append(floats(data, dtype).astype("f8"))
    return numpy.concatenate(out) if out else numpy.zeros(0)
