"""Which keys of an unknown optimizer's param groups are settings: another saved step tells."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.formats import Checkpoint
from ckptsurgeon.formats.fields.values import StateDict
from ckptsurgeon.formats.optimizers.table import unexplained
from ckptsurgeon.run.run import Run

C = TypeVar("C", bound=Checkpoint)


def knowing(run: Run, checkpoint: C) -> C:
    """The checkpoint, with the settings of its optimizers that no table has. A switch, a text or
    None is one; a number is one where another saved step has the same, and a state where it
    moves."""
    dicts = checkpoint.state_dicts()
    open_keys = {key for each in dicts for key in unexplained(each, checkpoint.known)}
    if not open_keys:
        return checkpoint
    mine = _values(dicts)
    settings = {key for key in open_keys if not any(map(_counts, mine[key]))}
    other = _other(run, checkpoint.step) if settings < open_keys else None
    if other is not None:
        its = _values(other.state_dicts())
        settings |= {key for key in open_keys if its.get(key) == mine[key]}
    known = replace(checkpoint.known, settings=frozenset(settings))
    return replace(checkpoint, known=known)


def _counts(value: Any) -> bool:
    """Whether it is a number, which may move."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _values(dicts: list[StateDict]) -> Mapping[str, list[Any]]:
    out: dict[str, list[Any]] = {}
    for each in dicts:
        for key, places in each.group.items():
            out.setdefault(key, []).extend(place.value for place in places)
    return out


def _other(run: Run, step: int) -> Checkpoint | None:
    """The nearest other step that can be opened."""
    for other in sorted(run.steps(), key=lambda other: (abs(other - step), other)):
        if other != step:
            try:
                return run.checkpoint(other)
            except (SurgeryError, OSError):
                continue
    return None
