"""The points of one run of a tracker, in columns."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

PART = 1 << 14
AT_ONCE = 100_000
"""Rows that one statement changes: SQLite has their numbers in memory."""


def _in_parts(rows: Iterable[tuple[int, Any, float, str]]) -> Iterator[list[Any]]:
    """The rows, `PART` at a time."""
    iterator = iter(rows)
    while some := list(islice(iterator, PART)):
        yield some


@dataclass
class Points:
    """Of each row, in the order in which they were logged: its number in the table, its step, its
    time, and which of `names` it is of."""

    rows: NDArray[np.int64]
    steps: NDArray[np.int64]
    walls: NDArray[np.float64]
    of: NDArray[np.int32]
    names: list[str]

    @classmethod
    def read(cls, rows: Iterable[tuple[int, Any, float, str]]) -> Points:
        """From number, step, time and name of each."""
        import numpy as np

        numbers, steps, walls, of = array("q"), array("q"), array("d"), array("i")
        names: dict[str, int] = {}
        for some in _in_parts(rows):  # by columns: a row at a time takes twice as long
            columns = tuple(zip(*some, strict=True))
            numbers.extend(columns[0])
            steps.extend(columns[1])
            walls.extend(columns[2])
            of.extend([names.setdefault(name, len(names)) for name in columns[3]])
        return cls(
            np.frombuffer(numbers, np.int64),
            np.frombuffer(steps, np.int64),
            np.frombuffer(walls, np.float64),
            np.frombuffer(of, np.int32),
            list(names),
        )

    def stretches(self, flags: NDArray[np.bool_]) -> Iterator[tuple[int, int]]:
        """The positions [first, after) of neighbours that have the flag."""
        import numpy as np

        edges = np.diff(np.concatenate(([0], flags, [0])).astype(np.int8)).nonzero()[0]
        yield from map(tuple, edges.reshape(-1, 2).tolist())

    def ranges(self, flags: NDArray[np.bool_]) -> Iterator[tuple[int, int]]:
        """The numbers [first, last] of the rows with the flag, where those between that have none
        are of other runs; at most `AT_ONCE` in one."""
        for first, after in self.stretches(flags):
            for start in range(first, after, AT_ONCE):
                yield int(self.rows[start]), int(self.rows[min(start + AT_ONCE, after) - 1])
