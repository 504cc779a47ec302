"""Where a file keeps what torch's `optimizer.state_dict()` returns: groups, moments, step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ckptsurgeon.edits import Key
from ckptsurgeon.files.pickles.tree import Tensor, get
from ckptsurgeon.formats import moments
from ckptsurgeon.formats.checkpoint import BaseCheckpoint
from ckptsurgeon.formats.values import Place

States = list[tuple[tuple[Key, ...], Mapping[Key, Any]]]
"""The path and the content of each state: of a parameter, or of a flat group."""


def groups(
    checkpoint: BaseCheckpoint, file: Path, base: tuple[Key, ...], name: str, wins: bool = True
) -> Iterator[Place]:
    """`name` in each param group of the state dict that `base` leads to; none where a wrapper of an
    optimizer saves in a way of its own."""
    for i, group in enumerate(get(checkpoint.trees[file], base).get("param_groups", ())):
        path = (*base, "param_groups", i, name)
        if type(group) is not dict:
            yield from checkpoint.at(file, path, wins)
        elif name in group:  # nearly always, and five times as fast
            yield Place(file, path, checkpoint.plain(file, group[name]), wins)


def states(checkpoint: BaseCheckpoint, file: Path, base: tuple[Key, ...]) -> States:
    """The state of each parameter in the state dict that `base` leads to."""
    entries = get(checkpoint.trees[file], base).get("state", {})
    return [
        ((*base, "state", key), state)
        for key, state in entries.items()
        if type(state) is dict or isinstance(state, Mapping)
    ]


def moment(
    checkpoint: BaseCheckpoint, file: Path, states: States, name: str, wins: bool = True
) -> Iterator[Place]:
    """Every tensor that makes up the moment `name`."""
    for path, state in states:
        if name in state:
            yield Place(file, (*path, name), state[name], wins)
        else:
            yield from moments.places(checkpoint, file, path, state, name, wins)


def steps(checkpoint: BaseCheckpoint, file: Path, states: States) -> list[Place]:
    """Adam's counter in each state. The largest is the real one: FusedAdam leaves 0 in all but the
    last parameter's."""
    archive = checkpoint.archives[file]
    counters = [((*path, "step"), state["step"]) for path, state in states if "step" in state]
    with archive.reading():
        archive.fetch([value for _, value in counters if isinstance(value, Tensor)])
        numbers = [
            (path, value if type(value) is int else checkpoint.plain(file, value))
            for path, value in counters
        ]
    top = max((value for _, value in numbers), default=None)
    return [Place(file, path, value, value == top) for path, value in numbers]
