"""Where a file keeps what torch's `optimizer.state_dict()` returns: groups, moments, step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from ckptsurgeon.files.dtypes import NUMBERS
from ckptsurgeon.files.pickles.tree import Object, Tensor, get
from ckptsurgeon.formats.checkpoint import Checkpoint
from ckptsurgeon.formats.fields.columns import Column, Places
from ckptsurgeon.formats.fields.understood import is_number, not_understood, understood
from ckptsurgeon.formats.fields.values import Place
from ckptsurgeon.formats.places import moments
from ckptsurgeon.plans.edits import Key


class States(NamedTuple):
    """The content of each state by its key, under `before`: of a parameter, or of a flat group."""

    before: tuple[Key, ...]
    each: Mapping[Key, Mapping[Key, Any]]


def groups(
    checkpoint: Checkpoint, file: Path, base: tuple[Key, ...], name: str, wins: bool = True
) -> Iterator[Place]:
    """`name` in each param group of the state dict that `base` leads to; none where a wrapper of an
    optimizer saves in a way of its own. Raises NotUnderstood where it is no list of dicts."""
    found = _inside(checkpoint, file, base, "param_groups", (list, tuple))
    return in_groups(checkpoint, file, (*base, "param_groups"), found, name, wins)


def param_groups(
    checkpoint: Checkpoint, file: Path, base: tuple[Key, ...]
) -> Sequence[Mapping[str, Any]]:
    """Those of the state dict at `base`. Raises NotUnderstood for one that is no dict."""
    found: Sequence[Any] = _inside(checkpoint, file, base, "param_groups", (list, tuple))
    for i, group in enumerate(found):
        if not isinstance(group, Mapping):
            raise not_understood(file, (*base, "param_groups", i), group, "a param group")
    return found


def in_groups(
    checkpoint: Checkpoint,
    file: Path,
    before: tuple[Key, ...],
    found: Sequence[Any],
    name: str,
    wins: bool = True,
) -> Iterator[Place]:
    """`name` in each of the param groups `found`, which are under `before`. Raises NotUnderstood
    for one that is no dict."""
    for i, group in enumerate(found):
        path = (*before, i, name)
        if type(group) is dict:  # nearly always, and five times as fast
            if name in group:
                yield Place(file, path, checkpoint.plain(file, group[name]), wins)
        elif isinstance(group, (Mapping, Object)):
            yield from checkpoint.at(file, path, wins)
        else:
            raise not_understood(file, path[:-1], group, "a param group")


def states(checkpoint: Checkpoint, file: Path, base: tuple[Key, ...]) -> States:
    """The state of each parameter in the state dict that `base` leads to. Raises NotUnderstood
    where one is no dict."""
    each = _inside(checkpoint, file, base, "state", Mapping)
    if not {*map(type, each.values())} <= {dict}:  # hardly ever
        for key, state in each.items():
            if isinstance(key, int) and not isinstance(state, Mapping):
                raise not_understood(file, (*base, "state", key), state, "the state of a parameter")
        # What has no number is of the whole optimizer.
        each = {key: state for key, state in each.items() if isinstance(state, Mapping)}
    return States((*base, "state"), each)


def _inside(checkpoint: Checkpoint, file: Path, base: tuple[Key, ...], key: str, kind: Any) -> Any:
    """What the state dict that `base` leads to has under `key`, or nothing."""
    with understood(file):
        saved = get(checkpoint.trees[file], base)
    if not isinstance(saved, Mapping):
        raise not_understood(file, base, saved, "the state dict of an optimizer")
    entries = saved.get(key, ())
    if not isinstance(entries, kind) and entries != ():
        raise not_understood(file, (*base, key), entries, "what an optimizer keeps there")
    return entries or {}


def moment(
    checkpoint: Checkpoint, file: Path, states: States, name: str, wins: bool = True
) -> Sequence[Column]:
    """Every tensor that makes up the moment `name`."""
    before, each = states
    tensors = {key: state[name] for key, state in each.items() if name in state}
    out = [Column.under(file, before, tensors, (name,), wins)] if tensors else []
    if len(tensors) == len(each) or name not in moments.NUMBERS:  # nearly always
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
        if type(value) is Tensor
        and (value.size == () or value.numel == 1)
        and value.dtype in NUMBERS
    }
    if tensors:
        found = checkpoint.archives[file].values([*tensors.values()])
        numbers |= zip(tensors, found, strict=True)
    counted = (*numbers.values(), *(place.value for place in beside))
    different = {value for value in counted if type(value) in (int, float)}
    top = max(filter(is_number, different), default=None)
    winning, others = numbers, {}
    if not loaded or [*numbers.values()].count(top) < len(numbers):
        winning = {key: value for key, value in numbers.items() if loaded and value == top}
        others = {key: value for key, value in numbers.items() if key not in winning}
    in_states = [
        Column.under(file, before, some, ("step",), wins)
        for wins, some in ((True, winning), (False, others))
        if some
    ]
    return [
        *in_states,
        *(Column.of(place._replace(wins=loaded and place.value == top)) for place in beside),
    ]
