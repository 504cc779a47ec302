"""The changes of one section by the place that they edit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.formats import Place, Setting
from ckptsurgeon.formats.fields.columns import Column
from ckptsurgeon.hints import command
from ckptsurgeon.plans.edits import AnyChange, Change, Value
from ckptsurgeon.run.run import Run

PLAIN = frozenset((bool, int, float, str, type(None)))
"""Types of the old values that a plan shows."""


def of_settings(run: Run, settings: Iterable[Setting]) -> list[AnyChange]:
    """What a checkpoint says to write, as changes."""
    return [
        Change(run.relative(place.file), field, place.value, new, place.path)
        for field, place, new in settings
    ]


def of_column(run: Run, field: str, column: Column, new: Any) -> Iterator[Change]:
    """`new` in every place of the column: one change for all that have the same old value. Of what
    is no number and no text a plan says that there are values."""
    file = run.relative(column.file)
    kinds = {*map(type, column.values)}
    same = kinds.isdisjoint(PLAIN)  # of thousands of tensors none is asked for itself
    parts = [(_old(column.values[0]), column)] if same else column.split(_old)
    for (_, old), alike in parts:
        yield Change(file, field, old, new, alike.path, chunks=column.chunks)


def _old(value: Any) -> tuple[type, Value]:
    """1 and 1.0 differ for a reader of the plan."""
    kind = type(value)
    return (kind, value) if kind in PLAIN else (str, "values")


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
                next=command("show", why="what they are"),
            )
        new = list(numbers)
        new[index] = value
        self.put(field, place, type(place.value)(new))
