"""Which bytes are whose in torch state dicts: weights by name, moments by name or number.

torch numbers the states of parameters; their names are known where the param groups hold them, or
where the trainer keyed the states by name, as FSDP does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.files.pickles.tree import Object, Tensor, get, strides
from ckptsurgeon.formats.checkpoint import Checkpoint
from ckptsurgeon.formats.fields.understood import mapping, not_understood
from ckptsurgeon.formats.fields.values import (
    COUNTING,
    MOMENTS,
    NUMBER,
    Located,
    Part,
    Place,
    Weight,
)
from ckptsurgeon.formats.places import optimizer_state
from ckptsurgeon.plans.edits import Key


def named(state_dict: Mapping[Any, Any]) -> dict[Key, str]:
    """The key of a state → its parameter, where what torch saved says so."""
    out: dict[Key, str] = {}
    groups, states = mapping(state_dict).get("param_groups"), mapping(state_dict).get("state")
    for group in groups if isinstance(groups, (list, tuple)) else ():
        numbers, names = mapping(group).get("params"), mapping(group).get("param_names")
        if not isinstance(numbers, (list, tuple)) or not isinstance(names, (list, tuple)):
            continue
        if len(names) == len(numbers):
            out |= {number: str(name) for number, name in zip(numbers, names, strict=True)}
    return out | {key: key for key in mapping(states) if isinstance(key, str)}


def weights(places: Iterable[tuple[str, Place]], cut: str) -> Iterator[Part]:
    """A whole tensor each, but for counters and masks. Raises SurgeryError for what may hold
    elements and is no tensor, such as a ShardedTensor."""
    for name, place in places:
        if isinstance(place.value, Object):
            raise SurgeryError(
                f"{name} in {place.file.name} is a {place.value.cls.name}, whose elements are not "
                "known here",
                next="graft, clip_moments and reset work on the moments",
            )
        if isinstance(place.value, Tensor) and place.value.dtype not in COUNTING:
            yield Part.whole(name, cut, "weights", place)


def in_tree(checkpoint: Checkpoint, item: Located) -> Iterator[tuple[str, Place]]:
    """The tensors of a dict in a torch file."""
    file, path = item
    for name, value in get(checkpoint.trees[file], path).items():
        yield str(name), Place(file, (*path, name), value)


def consolidated(checkpoint: Checkpoint, places: Iterable[tuple[str, Place]]) -> Iterator[Weight]:
    """Every tensor, whole in one file. Raises SurgeryError where its rows don't lie in order."""
    for name, place in places:
        tensor = place.value
        if not isinstance(tensor, Tensor):
            continue
        if tensor.stride != strides(tensor.size):
            raise SurgeryError(
                f"{name} is not saved row after row, so it can't be joined",
                next="join them with the converter of the trainer",
            )
        span = checkpoint.span(place, 0, tensor.numel)
        yield Weight(name, tensor.dtype, tensor.size, (span,))


def moments(
    checkpoint: Checkpoint,
    item: Located,
    cut: str,
    names: Mapping[Key, str],
    known: Mapping[str, int],
    numbered: str,
) -> Iterator[Part]:
    """Of one optimizer. `known` are the weights and their sizes: a moment goes by the name of one
    as large, another by its number, put into `numbered`."""
    file, base = item
    before, states = optimizer_state.states(checkpoint, file, base)
    for key, state in states.items():
        name = names.get(key, "")
        for kind in MOMENTS:
            value = state.get(kind)
            if kind in state and not isinstance(value, (Tensor, Object)):
                raise not_understood(file, (*before, key, kind), value, "a tensor", kind)
            if isinstance(value, Tensor):
                number = numbered.format(f"{NUMBER}{key}")
                owner = name if known.get(name) == value.numel else number
                yield Part.whole(owner, cut, kind, Place(file, (*before, key, kind), value))


def cuts(located: Iterable[Located], copies: Mapping[Path, Path]) -> dict[Located, str]:
    """Tells apart what lies in several files, or several times in one; copies are left out. The
    cut is the same in every step of a run: the number of the file, and of the dict in it."""
    files: dict[Path, list[Located]] = {}
    for item in located:
        if item[0] not in copies:
            files.setdefault(item[0], []).append(item)
    return {
        item: ".".join(map(str, (i, j) if len(items) > 1 else (i,)))
        for i, items in enumerate(files.values())
        for j, item in enumerate(items)
    }
