"""The places of one key in the states of thousands of parameters, without a `Place` of each until
one is asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar, overload

from ckptsurgeon.formats.fields.values import Place
from ckptsurgeon.plans.edits import ZEROS, Each, Fill, Key, each_path

K = TypeVar("K")


@dataclass(frozen=True, slots=True)
class Column:
    """Places of one file whose paths differ in one step, which is an `Each`, and their values in
    its order; or one place, where no step is. All else is the same of all, see `Place`."""

    file: Path
    path: tuple[Key | Each, ...]
    values: Sequence[Any]
    wins: bool = True
    zero: str | Fill = ZEROS
    chunks: int = 1

    @classmethod
    def of(cls, place: Place) -> Column:
        """The one place."""
        file, path, value, wins, zero, chunks = place
        return cls(file, path, (value,), wins, zero, chunks)

    @classmethod
    def under(
        cls,
        file: Path,
        before: tuple[Key, ...],
        values: Mapping[Key, Any],
        after: tuple[Key, ...],
        wins: bool = True,
    ) -> Column:
        """Those of `values`, by the step that lies between `before` and `after`."""
        step = Each(tuple(values)) if len(values) > 1 else next(iter(values))
        return cls(file, (*before, step, *after), [*values.values()], wins)

    def __len__(self) -> int:
        return len(self.values)

    def __iter__(self) -> Iterator[Place]:
        for path, value in zip(each_path(self.path), self.values, strict=True):
            yield Place(self.file, path, value, self.wins, self.zero, self.chunks)

    def only(self, kept: Sequence[int]) -> Column:
        """The places with these indices: ascending, and at least one."""
        if len(kept) == len(self.values):
            return self
        path: list[Key | Each] = []
        for step in self.path:
            if isinstance(step, Each):
                keys = tuple(step.keys[index] for index in kept)
                step = Each(keys) if len(keys) > 1 else keys[0]
            path.append(step)
        return replace(self, path=tuple(path), values=[self.values[index] for index in kept])

    def split(self, key: Callable[[Any], K]) -> Iterator[tuple[K, Column]]:
        """Each `key` that values have, and the places of those that have it."""
        each = [*map(key, self.values)]
        if each.count(each[0]) == len(each):  # nearly always
            yield each[0], self
            return
        alike: dict[K, list[int]] = {}
        for index, known in enumerate(each):
            alike.setdefault(known, []).append(index)
        for known, kept in alike.items():
            yield known, self.only(kept)


class Places(Sequence[Place]):
    """Places in columns, one after the other."""

    def __init__(self, columns: Iterable[Column]) -> None:
        self.columns = tuple(columns)

    @classmethod
    def of(cls, places: Sequence[Place]) -> Places:
        """The same places: those of one file that differ in one key, the last but one (the number
        of a parameter), and in the value are one column. Their order may be another."""
        if isinstance(places, Places):
            return places
        alike: dict[tuple[Any, ...], list[Place]] = {}
        for place in places:
            file, path, _, wins, zero, chunks = place
            # A file by its identity: a path takes long to hash.
            key = id(file), path[:-2], path[-1:], wins, zero, chunks
            alike.setdefault(key if len(path) > 1 else (len(alike),), []).append(place)
        return cls(_column(group) for group in alike.values())

    def __len__(self) -> int:
        return sum(map(len, self.columns))

    def __iter__(self) -> Iterator[Place]:
        return chain.from_iterable(self.columns)

    @overload
    def __getitem__(self, index: int) -> Place: ...
    @overload
    def __getitem__(self, index: slice) -> list[Place]: ...
    def __getitem__(self, index: int | slice) -> Place | list[Place]:
        return [*self][index]


def _column(places: Sequence[Place]) -> Column:
    first = Column.of(places[0])
    if len(places) == 1:
        return first
    *before, _, last = first.path
    each = Each(tuple(place.path[-2] for place in places))
    return replace(first, path=(*before, each, last), values=[place.value for place in places])
