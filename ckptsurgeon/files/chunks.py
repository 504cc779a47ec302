"""Which bytes hold which chunk, in columns: what torch.distributed.checkpoint says in `.metadata`.

A run of a thousand ranks has millions of chunks, so there is no object for each until one is asked
for. `dcp_metadata` reads them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import NamedTuple, overload

Place = tuple[int, int]
"""Where new bytes lie in their file: the first one, and how many."""


class Item(NamedTuple):
    """Where one value lies: `length` bytes from `start` on in `file`. `offset` is that of a chunk
    in its tensor, None for a value that is not a tensor; `number` is its row among all;
    `transforms` name what its bytes went through (compression)."""

    number: int
    file: str
    start: int
    length: int
    offset: tuple[int, ...] | None
    transforms: tuple[str, ...]


@dataclass
class Table(ABC):
    """The rows of all chunks, those of one name side by side in the order of their offsets.

    `firsts` has the first row of each of `names`, and the end. The columns have for each row the
    number of its file in `files`, where it lies there, and 1 above the number of its offset and of
    its shape (0: it has none, or it is not known) among tuples. `wholes` are the dtype and the size
    of the tensors that `.metadata` describes; `ends` how far the values reach in each file."""

    path: Path
    names: list[str]
    firsts: Sequence[int]
    files: list[str]
    wholes: list[tuple[str, tuple[int, ...]] | None]
    ends: Sequence[int]
    globals: frozenset[str]
    file: Sequence[int]
    start: Sequence[int]
    length: Sequence[int]
    offset: Sequence[int]
    shape: Sequence[int]

    @abstractmethod
    def axes(self, number: int) -> tuple[int, ...]:
        """An offset or a shape by its number."""

    def transforms(self, row: int) -> tuple[str, ...]:
        """Of the bytes of this row."""
        return ()

    @abstractmethod
    def moved(
        self, chosen: Sequence[int], places: Sequence[Place], file: str
    ) -> tuple[int, list[bytes]]:
        """The pickle with each row that has a number in `chosen` at that of `places`, counted from
        1, in `file`: how many of its first bytes stay, and all bytes after them. Raises
        SurgeryError if the pickle is not the one that was read."""

    @cached_property
    def items(self) -> Mapping[str, Chunks]:
        """What each name has."""
        return {name: Chunks(self, k) for k, name in enumerate(self.names)}


class Chunks(Sequence[Item]):
    """The chunks of one tensor in the order of their offsets, or the one item of another value."""

    __slots__ = ("_table", "name", "rows", "whole")

    def __init__(self, table: Table, number: int) -> None:
        self._table = table
        self.name = table.names[number]
        self.rows = range(table.firsts[number], table.firsts[number + 1])
        self.whole = table.wholes[number]

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, index: int) -> Item: ...
    @overload
    def __getitem__(self, index: slice) -> list[Item]: ...
    def __getitem__(self, index: int | slice) -> Item | list[Item]:
        if isinstance(index, slice):
            return [self[k] for k in range(*index.indices(len(self)))]
        row, table = self.rows[index], self._table
        offset = table.offset[row]
        return Item(
            row,
            table.files[table.file[row]],
            table.start[row],
            table.length[row],
            table.axes(offset - 1) if offset else None,
            table.transforms(row),
        )

    @property
    def is_tensor(self) -> bool:
        """Whether its chunks have offsets."""
        return self._table.offset[self.rows[0]] != 0

    @property
    def is_number(self) -> bool:
        """Whether it is known to be a tensor of one element."""
        return self.whole is not None and len(self) == 1 and prod(self.whole[1]) == 1

    @property
    def is_described(self) -> bool:
        """Whether `.metadata` says the dtype, and the shape of every chunk."""
        return self.whole is not None and all(self._table.shape[self.rows.start : self.rows.stop])

    def shape(self, index: int) -> tuple[int, ...] | None:
        """Of one chunk, as `.metadata` says; None where it does not."""
        number = self._table.shape[self.rows[index]]
        return self._table.axes(number - 1) if number and self.whole is not None else None

    def shapes(self) -> dict[int, tuple[int, ...]]:
        """Every different shape by its number in the column; without those that are not known."""
        numbers = set(self._table.shape[self.rows.start : self.rows.stop])
        return {k: self._table.axes(k - 1) for k in numbers if k}

    def offsets(self) -> Iterator[tuple[int, ...] | None]:
        """That of each chunk, in their order."""
        table = self._table
        numbers = table.offset[self.rows.start : self.rows.stop]
        return (table.axes(number - 1) if number else None for number in numbers)

    def choose(self, chosen: array[int], place_of: Mapping[int, int]) -> None:
        """Set `chosen` of every row to the place that `place_of` has for the number of its
        shape."""
        rows = slice(self.rows.start, self.rows.stop)
        chosen[rows] = array("I", map(place_of.__getitem__, self._table.shape[rows]))

    def places(self, most: int) -> Iterator[Item]:
        """Items in different places, one of each, up to so many."""
        rows = slice(self.rows.start, self.rows.stop)
        seen: dict[tuple[int, int], int] = {}
        for k, place in enumerate(
            zip(self._table.file[rows], self._table.start[rows], strict=True)
        ):
            seen.setdefault(place, k)
            if len(seen) == most:
                break
        return (self[k] for k in seen.values())
