"""Adam's moments as bitsandbytes keeps them: under numbers, most of them as codes of 8 bits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from ckptsurgeon.errors import SurgeryError, count
from ckptsurgeon.files.pickles.tree import Tensor
from ckptsurgeon.formats.checkpoint import Checkpoint
from ckptsurgeon.formats.fields.constants import CODES, QUANTIZED
from ckptsurgeon.formats.fields.values import MOMENTS, NUMBER, Codes, Located, Part, Place
from ckptsurgeon.formats.tensors.strips import codes_of, contiguous, numbered, owners
from ckptsurgeon.hints import command

ENTRIES = 256
"""Numbers of a code book: one for each byte."""
FIRST = QUANTIZED[MOMENTS[0]][0]
State = Mapping[str, Place]


class Moments(NamedTuple):
    """What one step keeps so: the parts, and what the codes of a tensor mean, by its place."""

    parts: list[Part]
    codes: dict[Located, Codes]


def moments(checkpoint: Checkpoint, parts: Sequence[Part]) -> Moments:
    """The moments that are none of `parts`. In a flat tensor they lie as its masters do; others
    are of a number. Raises SurgeryError for states that are not Adam's, or whose codes can't be
    read."""
    out = Moments([], {})
    coded = [each for each in checkpoint.state_dicts() if FIRST in each.state]
    if not coded:
        return out
    known, masters = {_located(part.place) for part in parts}, _flat(parts)
    for each in coded:
        found = [state for state in owners(each).values() if FIRST in state]
        states = [state for state in found if _located(state[FIRST]) not in known]
        flat = list(masters.get(each.file, {}).values())
        if flat and states and len(flat) != len(states):
            raise _unlike(
                each.file, f"{count(len(states), 'state')} and {count(len(flat), 'flat tensor')}"
            )
        for i, state in enumerate(states):
            for kind in MOMENTS:
                place = _moment(each.file, state, kind)
                if place.value.dtype == CODES:
                    out.codes[_located(place)] = _codes(each.file, state, kind)
                whose = list(_as(place, kind, flat[i])) if flat else _alone(place, kind)
                out.parts.extend(whose)
    return out


def _located(place: Place) -> Located:
    return place.file, place.path


def _flat(parts: Sequence[Part]) -> dict[Path, dict[Located, list[Part]]]:
    """The masters in each flat tensor of each file, in its order."""
    out: dict[Path, dict[Located, list[Part]]] = {}
    for part in parts:
        if part.kind == "master":
            found = out.setdefault(part.place.file, {})
            found.setdefault(_located(part.place), []).append(part)
    return out


def _as(place: Place, kind: str, masters: Sequence[Part]) -> Iterator[Part]:
    """The parts of a tensor that lies as that of the masters does."""
    if place.value.numel != masters[0].place.value.numel:
        sizes = f"{place.value.numel} and {masters[0].place.value.numel}"
        raise _unlike(place.file, f"a moment and masters of {sizes} elements")
    for part in masters:
        yield part._replace(kind=kind, place=place)


def _alone(place: Place, kind: str) -> list[Part]:
    return [Part.whole(f"{NUMBER}{numbered(place)}", place.file.name, kind, place)]


def _moment(file: Path, state: State, kind: str) -> Place:
    """The codes or numbers of a moment. Raises SurgeryError where there are not two of one size."""
    pair = [state.get(QUANTIZED[each][0]) for each in MOMENTS]
    tensors = [p.value for p in pair if p is not None and isinstance(p.value, Tensor)]
    if len(tensors) < len(MOMENTS) or tensors[0].numel != tensors[1].numel:
        raise SurgeryError(
            f"{file.name}: its optimizer keeps {' and '.join(state)}, which are not the two "
            "moments of Adam",
            next="transplant between optimizers of the same states",
        )
    place = pair[MOMENTS.index(kind)]
    assert place is not None
    return place


def _codes(file: Path, state: State, kind: str) -> Codes:
    found = codes_of(state, kind)
    if found is not None:
        scale, book = found.scale.value, found.book.value
        blocks = -(-found.place.value.numel // found.block)
        if (
            scale.dtype == book.dtype == "float32"
            and book.numel == ENTRIES
            and scale.numel == blocks
            and all(contiguous(place.value) for place in found)
        ):
            return found
    raise SurgeryError(
        f"{file.name}: its optimizer keeps {QUANTIZED[kind][0]} as codes, and not the scale of "
        "each block of them with a book of 256 numbers",
        next="train with blockwise states of 8 bits (bitsandbytes 0.44 or newer), and save again",
    )


def _unlike(file: Path, what: str) -> SurgeryError:
    return SurgeryError(
        f"{file.name} has {what}, which do not lie alike",
        next=command("verify", "--level", "3", why="list what contradicts itself"),
    )
