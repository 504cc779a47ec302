"""Whose step of Adam is whose, where a trainer keeps one for each parameter."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ckptsurgeon.formats import Checkpoint, Place
from ckptsurgeon.formats.fields.columns import Places
from ckptsurgeon.formats.tensors.blocks import Kinds
from ckptsurgeon.plans.edits import Key

MOMENT, STEP = "exp_avg", "step"


def of_each(checkpoint: Checkpoint, found: Mapping[str, Kinds]) -> dict[str, Place]:
    """The place of the step of each parameter that has one for itself, beside its first moment.
    Empty where several files keep steps: those must agree."""
    places = checkpoint.locate("adam_step")
    files = {column.file for column in Places.of(places).columns}
    if len(files) != 1:
        return {}
    known = {place.path: place for place in places}
    whose: dict[tuple[Key, ...], set[str]] = {}
    for name, kinds in found.items():
        for part in kinds.get(MOMENT, ()):
            if (path := _beside(part.place, files)) in known:
                whose.setdefault(path, set()).add(name)
    return {name: known[path] for path, names in whose.items() if len(names) == 1 for name in names}


def _beside(place: Place, files: set[Path]) -> tuple[Key, ...]:
    """Where the step of the same state would be."""
    if place.file not in files:
        return ()
    return tuple(
        key.removesuffix(MOMENT) + STEP
        if isinstance(key, str) and (key == MOMENT or key.endswith(f".{MOMENT}"))
        else key
        for key in place.path
    )
