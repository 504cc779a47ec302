"""Makes a `StateDict` of what torch's `optimizer.state_dict()` returned."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ckptsurgeon.edits import Key
from ckptsurgeon.formats.values import Place, StateDict

BESIDE = frozenset(
    # of torch; fairseq's loss scale; nanotron's names and fp32 masters
    ("state", "param_groups", "loss_scale", "names", "gradient_accumulator")
)
"""The keys of a saved optimizer that no update reads, the states and groups apart."""
NESTED = "__bnb_optimizer_quant_state__"
"""Where bitsandbytes puts a state that has codes, so that FSDP leaves it alone."""


def by_key(
    file: Path, dicts: Iterable[tuple[tuple[Key, ...], Mapping[Any, Any]]], wins: bool = True
) -> dict[str, list[Place]]:
    """The places in several dicts by key."""
    out: dict[str, list[Place]] = {}
    for path, values in dicts:
        for key, value in values.items():
            if key == NESTED and isinstance(value, Mapping):
                inner = by_key(file, [((*path, NESTED), value)], wins)
                for name, places in inner.items():
                    out.setdefault(name, []).extend(places)
                continue
            name = key if type(key) is str else str(key)
            place = Place(file, (*path, key), value, wins)
            if name in out:
                out[name].append(place)
            else:
                out[name] = [place]
    return out


def _inner(state: Mapping[Any, Any]) -> Iterable[Any]:
    if NESTED not in state:
        return ()
    inner = state[NESTED]
    return inner if isinstance(inner, Mapping) else ()


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
    parameter counts as a key of its own. Of `bare` states there are the keys alone."""
    states = tree.get("state") or {}
    parameters: dict[Any, Mapping[Any, Any]] = {}
    others: dict[Any, Any] = {}
    for key, value in states.items():
        of_parameter = type(value) is dict or isinstance(value, Mapping)
        (parameters if of_parameter else others)[key] = value
    if bare:  # of states with the same keys, one says it
        alike = {(*state, *_inner(state)): key for key, state in parameters.items()}
        parameters = {key: parameters[key] for key in alike.values()}
    of_parameters = [((*base, "state", key), state) for key, state in parameters.items()]
    state = by_key(file, of_parameters)
    for key, places in by_key(file, [((*base, "state"), others)]).items():
        state.setdefault(key, []).extend(places)
    groups = enumerate(tree.get("param_groups") or ())
    group = by_key(file, [((*base, "param_groups", i), values) for i, values in groups])
    whole: list[Place] = []
    if loose and all(isinstance(key, int) or key in others for key in states):
        whole = [Place(file, (*base, "state", key), value) for key, value in states.items()]
    beside = tuple(str(key) for key in tree if key not in BESIDE)
    return StateDict(file, state, group, tuple(whole), beside)
