"""Moments, master and weights of each parameter side by side: from the parts that a format names,
and from the states of its optimizers, which say what the moments were made with.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator, Mapping
from itertools import pairwise
from typing import Any

from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.files.archives.storage_edit import contiguous as contiguous
from ckptsurgeon.files.pickles.tree import Tensor
from ckptsurgeon.formats.capabilities import HasPadding, NamesMoments
from ckptsurgeon.formats.checkpoint import Checkpoint
from ckptsurgeon.formats.fields.constants import CODES, QUANTIZED
from ckptsurgeon.formats.fields.values import (
    MOMENTS,
    NUMBER,
    Adam,
    Codes,
    Located,
    Part,
    Place,
    StateDict,
    Strip,
)
from ckptsurgeon.formats.optimizers import adam
from ckptsurgeon.formats.tensors.stretches import Kinds, by_parameter, pieces

MASTERS = ("master_param", "fp32_param", "param")
"""What optimizers of 16-bit weights call their fp32 copy."""
ORDER = (*MOMENTS, "master", "weights")
"""Of the tensors of a strip: the first one is read with its file."""


def strips(checkpoint: Checkpoint) -> Iterator[Strip]:
    """One for each stretch of a parameter that the format names, and for each state of which it
    names no moment, with whole tensors but for their padding."""
    padded = HasPadding.optional(checkpoint)
    for strip in _padded(checkpoint):
        kept = strip if padded is None else padded.unpadded(strip)
        if kept is not None:
            yield kept


def _padded(checkpoint: Checkpoint) -> Iterator[Strip]:
    parts = checkpoint.known_parts()
    states: list[tuple[Hashable, dict[str, Place], Adam]] = []
    made: dict[Located, Adam] = {}
    for each in checkpoint.state_dicts():
        lawful = adam.is_adam(each, checkpoint.known)
        settings = Settings(checkpoint, each)
        for owner, state in owners(_in_pieces(each)).items():
            known = settings.adam(owner, state, lawful)
            states.append((owner, state, known))
            made.update({(place.file, place.path): known for place in state.values()})
    named: set[Located] = set()
    for (name, _), kinds in by_parameter(parts).items():
        named |= {(p.place.file, p.place.path) for found in kinds.values() for p in found}
        for once in _copies(kinds):
            yield from _side_by_side(name, once, made)
    others = [
        (owner, state, known)
        for owner, state, known in states
        if not any((place.file, place.path) in named for place in state.values())
    ]
    names = _names(checkpoint) if others else {}
    for owner, state, known in others:
        if strip := _strip(state, known, owner, names):
            yield strip


def _copies(kinds: Kinds) -> Iterator[Kinds]:
    """The stretches, and those that are of the same elements as others once more by themselves."""
    once: dict[str, list[Part]] = {}
    more: dict[str, list[Part]] = {}
    for kind, found in kinds.items():
        for part in found:
            known = once.setdefault(kind, [])
            again = bool(known) and part.first < _last(known[-1])
            (more.setdefault(kind, []) if again else known).append(part)
    yield once
    if more:
        yield from _copies(more)


def _side_by_side(name: str, kinds: Kinds, made: Mapping[Located, Adam]) -> Iterator[Strip]:
    """The stretches of one parameter, cut where one of them ends."""
    queues = {kind: deque(kinds[kind]) for kind in ORDER if kind in kinds}
    ends = sorted({at for q in queues.values() for part in q for at in (part.first, _last(part))})
    for first, last in pairwise(ends):
        here: dict[str, Part] = {}
        for kind, queue in queues.items():
            while queue and _last(queue[0]) <= first:
                queue.popleft()
            if queue and queue[0].first <= first:
                here[kind] = queue[0]
        tensors = _ordered_alike({kind: part.place for kind, part in here.items()})
        if not tensors:
            continue
        adams = (made.get((place.file, place.path)) for place in tensors.values())
        sizes = (p.value.size for p in tensors.values() if p.value.numel == last - first)
        yield Strip(
            parameter=name,
            numel=last - first,
            tensors={
                kind: (place, here[kind].start + first - here[kind].first)
                for kind, place in tensors.items()
            },
            adam=next((each for each in adams if each is not None), None),
            shape=next((size for size in sizes if len(size) > 1), None),
        )


def _last(part: Part) -> int:
    """The element of the parameter that the stretch ends before."""
    return part.first + part.end - part.start


def _ordered_alike(places: Mapping[str, Place]) -> dict[str, Place]:
    """Those in which elements that lie at the same distance from the start belong together."""
    tensors = {kind: place for kind, place in places.items() if isinstance(place.value, Tensor)}
    if all(contiguous(place.value) or _is_repeated(place.value) for place in tensors.values()):
        return tensors
    first = next(iter(tensors.values()))
    return {kind: place for kind, place in tensors.items() if _alike(place, first)}


def _in_pieces(state_dict: StateDict) -> StateDict:
    """With the tensors as they are saved, in chunks."""
    state = {
        key: [piece for place in places for piece in pieces(place)]
        for key, places in state_dict.state.items()
    }
    return state_dict._replace(state=state)


class Settings:
    """What the param groups of one optimizer say of each of its states."""

    def __init__(self, checkpoint: Checkpoint, state_dict: StateDict) -> None:
        self.checkpoint = checkpoint
        self.group = {
            key: {_group(place): place.value for place in state_dict.group.get(key, ())}
            for key in ("betas", "eps", "lr", "params")
        }
        steps = [place.value for place in checkpoint.locate("adam_step") if place.wins]
        self.top = max(steps, default=None)
        self.common = {key: self._agreed(key) for key in ("betas", "eps", "lr")}

    def adam(self, owner: Hashable, state: Mapping[str, Place], lawful: bool) -> Adam:
        """Of one state: its own step, unless its optimizer counts in one place for all."""
        number = state["step"].value if "step" in state else None
        if "step" in state:
            place = state["step"]
            number = self.checkpoint.value(place.file, place.path)
        step = number if isinstance(number, (int, float)) and number > 0 else self.top
        group = self._index(state)
        return self.of_group(group, step, lawful)

    def of_group(self, group: int | None, step: float | None, lawful: bool) -> Adam:
        """With the settings of one param group; without a group only what all have alike."""
        betas = self._one("betas", group)
        pair = betas if isinstance(betas, (list, tuple)) else None
        return Adam(
            step=step,
            betas=None if pair is None else tuple(float(beta) for beta in pair),
            eps=_number(self._one("eps", group)),
            lr=_number(self._one("lr", group)),
            lawful=lawful,
        )

    def _index(self, state: Mapping[str, Place]) -> int | None:
        """The group that lists the number of the state, if states are numbered."""
        first = next(iter(state.values()), None)
        number = None if first is None else numbered(first)
        for group, numbers in self.group["params"].items():
            if isinstance(numbers, (list, tuple)) and number in numbers:
                return group
        return None

    def _one(self, key: str, group: int | None) -> Any:
        return self.group[key].get(group, self.common[key])

    def _agreed(self, key: str) -> Any:
        """The value that all groups of the checkpoint have, or None."""
        found = [*self.group[key].values()]
        found += [place.value for place in self.checkpoint.locate(key) if place.wins]
        distinct = {tuple(v) if isinstance(v, list) else v for v in found}
        return distinct.pop() if len(distinct) == 1 else None


def owners(state_dict: StateDict) -> dict[Hashable, dict[str, Place]]:
    """Key → place of each state: places of one owner differ in the key alone, be it a key of a
    dict, a part of a dotted name or the name of a file."""
    out: dict[Hashable, dict[str, Place]] = {}
    for key, places in state_dict.state.items():
        for place in places:
            out.setdefault(_owner(place, key), {})[key] = place
    return out


def _owner(place: Place, key: str) -> Hashable:
    file = place.file.parent if place.file.stem == key else place.file
    parts: list[Hashable] = []
    for part in place.path:
        if part == key:
            continue
        if isinstance(part, str) and key in part.split("."):
            parts.append(tuple(word for word in part.split(".") if word != key))
        else:
            parts.append(part)
    return file, tuple(parts)


def _strip(
    state: Mapping[str, Place], made: Adam, owner: Hashable, names: Mapping[Any, str]
) -> Strip | None:
    tensors = {kind: state[kind] for kind in MOMENTS if kind in state}
    for key in MASTERS:
        if key in state:
            tensors["master"] = state[key]
    tensors = {kind: place for kind, place in tensors.items() if isinstance(place.value, Tensor)}
    codes = {kind: found for kind in MOMENTS if (found := codes_of(state, kind))}
    if any(kind not in tensors and kind not in codes for kind in MOMENTS):
        # Of 32 bits where a parameter is small, which bitsandbytes numbers all the same.
        for kind, (key, _, _) in QUANTIZED.items():
            if key in state and kind not in codes and isinstance(state[key].value, Tensor):
                tensors[kind] = state[key]
    if not tensors and not codes:
        return None
    first = next(iter(tensors.values()), None) or next(iter(codes.values())).place
    alike = {kind: place for kind, place in tensors.items() if _alike(place, first)}
    name = names.get((first.file, first.path)) or _name(first)
    return Strip(
        parameter=name,
        numel=first.value.numel,
        tensors={kind: (place, 0) for kind, place in alike.items()},
        adam=made,
        codes=codes,
        shape=first.value.size if len(first.value.size) > 1 else None,
    )


def codes_of(state: Mapping[str, Place], kind: str) -> Codes | None:
    places = [state.get(key) for key in QUANTIZED[kind]]
    if any(place is None or not isinstance(place.value, Tensor) for place in places):
        return None
    found = Codes(*(place for place in places if place is not None))
    return found if found.place.value.dtype == CODES else None


def _alike(place: Place, first: Place) -> bool:
    """Whether elements that lie at the same distance from the start belong together."""
    return bool(
        place.value.size == first.value.size
        and place.value.stride == first.value.stride
        and dense(place.value)
    )


def _is_repeated(tensor: Tensor) -> bool:
    """Whether one number stands for all elements, as after a reset: they have any order."""
    return tensor.storage_numel == 1 and not any(tensor.stride)


def dense(tensor: Tensor) -> bool:
    """Whether its elements fill their part of the storage, in whichever order of the axes."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride, tensor.size, strict=True)):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


def _names(checkpoint: Checkpoint) -> dict[Any, str]:
    """The place of a moment → the parameter that all of it is of, where the format says."""
    names: dict[Any, str] = {}
    for kind in MOMENTS:
        try:
            fragments = NamesMoments.of(checkpoint).fragments(kind)
        except SurgeryError:
            continue
        for part in fragments:
            if part.start == 0 and part.end == part.place.value.numel:
                for piece in pieces(part.place):
                    names[piece.file, piece.path] = part.parameter
    return names


def _name(place: Place) -> str:
    """A name by the path, without the key itself."""
    number = numbered(place)
    if number is not None:
        return f"{NUMBER}{number}"
    return str(place.path[-2]) if len(place.path) > 1 else place.file.stem


def numbered(place: Place) -> int | None:
    """The number of the state that a place is in, as torch numbers parameters."""
    return next((key for key in reversed(place.path[:-1]) if isinstance(key, int)), None)


def _group(place: Place) -> int | None:
    index = place.path[-2] if len(place.path) > 1 else None
    return index if isinstance(index, int) else None


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) else None
