"""Makes a `StateDict` of what torch's `optimizer.state_dict()` returned."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ckptsurgeon.formats.fields.columns import Column, Places
from ckptsurgeon.formats.fields.constants import NESTED
from ckptsurgeon.formats.fields.understood import not_understood
from ckptsurgeon.formats.fields.values import Place, StateDict
from ckptsurgeon.plans.edits import Key

BESIDE = frozenset(
    # of torch; fairseq's loss scale; nanotron's names and fp32 masters; what fairscale numbers
    # where it gathers the pieces of all ranks
    (
        "state",
        "param_groups",
        "loss_scale",
        "names",
        "gradient_accumulator",
        "param_id_map",
        "uncollected_local_ids",
    )
)
"""The keys of a saved optimizer that no update reads, the states and groups apart."""


def by_key(
    file: Path,
    before: tuple[Key, ...],
    states: Mapping[Key, Mapping[Any, Any]],
    after: tuple[Key, ...] = (),
) -> dict[str, list[Column]]:
    """The places in several states by key: those of each lie between `before`, its own key in
    `states`, and `after`. What a state nests counts as its own."""
    alike: dict[tuple[Any, ...], list[Key]] = {}
    for number, state in states.items():
        alike.setdefault(tuple(state), []).append(number)
    out: dict[str, list[Column]] = {}
    for keys, numbers in alike.items():
        for key in keys:
            values = {number: states[number][key] for number in numbers}
            if all(_nests(key, value) for value in values.values()):
                inner = by_key(file, before, values, (*after, key))
            else:
                inner = {str(key): [Column.under(file, before, values, (*after, key))]}
            for name, columns in inner.items():
                out.setdefault(name, []).extend(columns)
    return out


def _nests(key: Any, value: Any) -> bool:
    """Whether a state keeps more of itself under `key`: bitsandbytes its codes, heavyball what it
    keeps of each view of the parameter, by the number of the view."""
    return _may_nest(key) and isinstance(value, Mapping)


def _may_nest(key: Any) -> bool:
    return key == NESTED or type(key) is int


def _inner(state: Mapping[Any, Any]) -> Iterator[Any]:
    """The keys of a state, with those of what it nests."""
    for key, value in state.items():
        yield key
        if _nests(key, value):
            yield from _inner(value)


def _one_of_each(states: Mapping[Any, Mapping[Any, Any]]) -> dict[Any, Mapping[Any, Any]]:
    """The last of those states that have the same keys, and nest the same ones."""
    alike = dict(zip(map(tuple, states.values()), states, strict=True))
    if any(_may_nest(key) for keys in alike for key in keys):  # hardly ever
        alike = {(*_inner(state),): key for key, state in states.items()}
    return {key: states[key] for key in alike.values()}


def state_dict(
    file: Path,
    base: tuple[Key, ...],
    tree: Mapping[Any, Any],
    *,
    loose: bool = False,
    bare: bool = False,
) -> StateDict:
    """What torch's `optimizer.state_dict()` returned, with `tree` under `base`. `loose` is whether
    its loader does without the state of a parameter. An entry of the states that is of no
    parameter counts as a key of its own. Of `bare` states there are the keys alone. Raises
    NotUnderstood where the states are no dict, or the groups no list of dicts."""
    if not isinstance(tree, Mapping):
        raise not_understood(file, base, tree, "the state dict of an optimizer")
    states, groups = tree.get("state", {}), tree.get("param_groups", ())
    if not isinstance(states, Mapping):
        raise not_understood(file, (*base, "state"), states, "a dict of states")
    if not isinstance(groups, (list, tuple)):
        raise not_understood(file, (*base, "param_groups"), groups, "a list of param groups")
    parameters: Mapping[Any, Mapping[Any, Any]] = states
    others: dict[Any, Any] = {}
    if not {*map(type, states.values())} <= {dict}:  # hardly ever
        others = {key: value for key, value in states.items() if not isinstance(value, Mapping)}
        parameters = {key: value for key, value in states.items() if key not in others}
    if bare:
        parameters = _one_of_each(parameters)
    state = by_key(file, (*base, "state"), parameters)
    for key, value in others.items():
        place = Place(file, (*base, "state", key), value)
        state.setdefault(str(key), []).append(Column.of(place))
    group = in_groups(file, (*base, "param_groups"), groups)
    whole: list[Place] = []
    if loose and all(isinstance(key, int) or key in others for key in states):
        whole = [Place(file, (*base, "state", key), value) for key, value in states.items()]
    beside = {str(k): Place(file, (*base, k), v) for k, v in tree.items() if k not in BESIDE}
    places = {key: Places(columns) for key, columns in state.items()}
    return StateDict(file, places, group, tuple(whole), beside)


def in_groups(file: Path, before: tuple[Key, ...], groups: Sequence[Any]) -> dict[str, list[Place]]:
    """The places in param groups by key, with `groups` under `before`. Raises NotUnderstood for one
    that is no dict."""
    out: dict[str, list[Place]] = {}
    for i, values in enumerate(groups):
        if not isinstance(values, Mapping):
            raise not_understood(file, (*before, i), values, "a param group")
        for key, value in values.items():
            out.setdefault(str(key), []).append(Place(file, (*before, i, key), value))
    return out
