"""Where a file keeps what torch's `optimizer.state_dict()` returns: groups, moments, step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from ckptsurgeon.edits import Key
from ckptsurgeon.files.pickles.tree import Tensor, get
from ckptsurgeon.formats import moments
from ckptsurgeon.formats.checkpoint import Checkpoint
from ckptsurgeon.formats.columns import Column, Places
from ckptsurgeon.formats.values import Place


class States(NamedTuple):
    """The content of each state by its key, under `before`: of a parameter, or of a flat group."""

    before: tuple[Key, ...]
    each: Mapping[Key, Mapping[Key, Any]]


def groups(
    checkpoint: Checkpoint, file: Path, base: tuple[Key, ...], name: str, wins: bool = True
) -> Iterator[Place]:
    """`name` in each param group of the state dict that `base` leads to; none where a wrapper of an
    optimizer saves in a way of its own."""
    for i, group in enumerate(get(checkpoint.trees[file], base).get("param_groups", ())):
        path = (*base, "param_groups", i, name)
        if type(group) is not dict:
            yield from checkpoint.at(file, path, wins)
        elif name in group:  # nearly always, and five times as fast
            yield Place(file, path, checkpoint.plain(file, group[name]), wins)


def states(checkpoint: Checkpoint, file: Path, base: tuple[Key, ...]) -> States:
    """The state of each parameter in the state dict that `base` leads to."""
    entries = get(checkpoint.trees[file], base).get("state", {})
    each = {
        key: state
        for key, state in entries.items()
        if type(state) is dict or isinstance(state, Mapping)
    }
    return States((*base, "state"), each)


def moment(
    checkpoint: Checkpoint, file: Path, states: States, name: str, wins: bool = True
) -> Sequence[Column]:
    """Every tensor that makes up the moment `name`."""
    before, each = states
    tensors = {key: state[name] for key, state in each.items() if name in state}
    out = [Column.under(file, before, tensors, (name,), wins)] if tensors else []
    if len(tensors) == len(each):  # nearly always
        return out
    others = [(key, state) for key, state in each.items() if name not in state]
    places = (
        moments.places(checkpoint, file, (*before, key), state, name, wins) for key, state in others
    )
    return [*out, *Places.of([*chain.from_iterable(places)]).columns]


def steps(
    checkpoint: Checkpoint,
    file: Path,
    states: States,
    beside: Sequence[Place] = (),
    loaded: bool = True,
) -> list[Column]:
    """Adam's counter in each state, and those of `beside`. The largest is the real one: FusedAdam
    leaves 0 in all but the last parameter's. None is where the file is not `loaded`."""
    before, each = states
    numbers = {key: state["step"] for key, state in each.items() if "step" in state}
    tensors = {
        key: value
        for key, value in numbers.items()
        if type(value) is Tensor and (not value.size or value.numel == 1)
    }
    if tensors:
        archive = checkpoint.archives[file]
        with archive.reading():
            numbers |= zip(tensors, archive.values([*tensors.values()]), strict=True)
    top = max((*numbers.values(), *(place.value for place in beside)), default=None)
    by_winning: dict[bool, dict[Key, Any]] = {}
    for key, value in numbers.items():
        by_winning.setdefault(loaded and value == top, {})[key] = value
    return [
        *(Column.under(file, before, some, ("step",), wins) for wins, some in by_winning.items()),
        *(Column.of(place._replace(wins=loaded and place.value == top)) for place in beside),
    ]
