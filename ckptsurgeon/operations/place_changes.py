"""The changes of one section by the place that they edit."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ckptsurgeon.edits import AnyChange, Change, Each, Key
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.formats import Place, Setting
from ckptsurgeon.run.run import Run


def of_settings(run: Run, settings: Iterable[Setting]) -> list[AnyChange]:
    """What a checkpoint says to write, as changes."""
    return [
        Change(run.relative(place.file), field, place.value, new, place.path)
        for field, place, new in settings
    ]


def grouped(run: Run, settings: Iterable[tuple[str, Place, Any, Any]]) -> list[Change]:
    """Changes of (field, place, old, new): places of one file that differ in one key, the last but
    one (the number of a parameter), are one change where both values are the same."""
    groups: dict[tuple[Any, ...], tuple[str, Any, Any, list[Place]]] = {}
    for field, place, old, new in settings:
        file, path, _, _, _, chunks = place
        value = repr(new) if type(new) is list else new
        # A file by its identity: a path takes long to hash.
        alike = field, id(file), chunks, path[:-2], path[-1:], type(old), old, type(new), value
        if alike in groups:
            groups[alike][3].append(place)
        else:
            groups[alike] = (field, old, new, [place])
    out = []
    for field, old, new, places in groups.values():
        first = places[0]
        steps: tuple[Key | Each, ...] = first.path
        if len(places) > 1 and len(steps) > 1:
            each = Each(tuple(place.path[-2] for place in places))
            steps = (*first.path[:-2], each, first.path[-1])
        out.append(Change(run.relative(first.file), field, old, new, steps, chunks=first.chunks))
    return out


class PlaceChanges:
    """The changes so far; a later one to the same place replaces the earlier (beta1, beta2)."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.changes: dict[tuple[Any, ...], AnyChange] = {}

    def put(self, field: str, place: Place, new: Any) -> None:
        """Keeps the place's type: an int field stays an int where the value is whole."""
        if isinstance(place.value, int) and isinstance(new, float) and new.is_integer():
            new = int(new)
        file = self.run.relative(place.file)
        change = Change(file, field, place.value, new, place.path)
        earlier = self.changes.get((file, place.path))
        if isinstance(earlier, Change):
            change = Change(file, earlier.field, earlier.old, new, place.path)
        self.changes[(file, place.path)] = change

    def put_nth(self, field: str, place: Place, index: int, value: float) -> None:
        """One of several numbers in one place; those that are to change already do."""
        known = self.changes.get((self.run.relative(place.file), place.path))
        numbers: Any = known.new if isinstance(known, Change) else place.value
        if index >= len(numbers):
            raise SurgeryError(
                f"the optimizer has {len(numbers)} {field}",
                next="ckptsurgeon show    what they are",
            )
        new = list(numbers)
        new[index] = value
        self.put(field, place, type(place.value)(new))
