"""Where numbers are read from: a range of a file, rows that lie in several files, or codes of 8
bits; and codes that are made of numbers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

from ckptsurgeon.plans.frozen import frozen

Range = tuple[str, int, int]
"""A file, and the first byte and the end of what is read of it."""


@frozen
class Source:
    """Numbers of `dtype` that lie side by side: bytes [start, end) of an existing file,
    little-endian."""

    file: str
    start: int
    end: int
    dtype: str

    def ranges(self) -> Iterator[Range]:
        """What is read."""
        yield self.file, self.start, self.end


@frozen
class Columns:
    """Some columns of a matrix: of each row of it `cells` times `width` bytes, each `step` bytes
    after the one before, in an existing file. The first cell of the first row is at `start`, that
    of each further row `stride` bytes later."""

    file: str
    start: int
    width: int
    stride: int
    cells: int = 1
    step: int = 0

    @property
    def row(self) -> int:
        """Bytes of one row."""
        return self.width * self.cells

    def end(self, row: int) -> int:
        """Where row `row` ends in the file, whose cells ascend."""
        return self.start + row * self.stride + (self.cells - 1) * self.step + self.width


@frozen
class Woven:
    """Numbers of `dtype` in rows, each of which is one row of each of `columns` in turn: bytes
    [start, end) of those, little-endian. Raises ValueError for columns that no matrix has."""

    columns: tuple[Columns, ...]
    start: int
    end: int
    dtype: str

    def __post_init__(self) -> None:
        if not self.columns or any(
            not 0 < each.width <= each.stride or each.cells < 1 or each.step < 0
            for each in self.columns
        ):
            raise ValueError("columns that are no part of their rows")

    @property
    def row(self) -> int:
        """Bytes of one row."""
        return sum(each.row for each in self.columns)

    def ranges(self) -> Iterator[Range]:
        """All that may be read: one range of each of `columns`."""
        first, last = self.start // self.row, -(-self.end // self.row) - 1
        for each in self.columns:
            yield each.file, each.start + first * each.stride, each.end(last)


@frozen
class Decoded:
    """Numbers that are kept as codes: each byte of `codes` is an index into the numbers of `book`,
    times the one of `scales` for its block of so many. Of these numbers, as float32, the bytes
    [start, end)."""

    codes: Source
    scales: Source
    book: Source
    block: int
    start: int
    end: int
    dtype: str = "float32"

    def ranges(self) -> Iterator[Range]:
        """All that may be read: each of the three as a whole."""
        for each in (self.codes, self.scales, self.book):
            yield from each.ranges()


Plain: TypeAlias = Source | Woven | Decoded


@frozen
class Encoded:
    """Codes of the numbers of `parts`, one after another: of each the index of the nearest of
    `book`, once it is divided by the largest of its block of so many. Of these codes, a byte each,
    those from `start` to `end`."""

    parts: tuple[Plain, ...]
    book: Source
    block: int
    start: int
    end: int
    dtype: str = "uint8"

    def ranges(self) -> Iterator[Range]:
        """What is read."""
        for each in (*self.parts, self.book):
            yield from each.ranges()


@frozen
class Scales:
    """What the codes of `Encoded` are multiplied by: of each block of so many numbers of `parts`
    the largest absolute value. Of these, as float32, the bytes [start, end)."""

    parts: tuple[Plain, ...]
    block: int
    start: int
    end: int
    dtype: str = "float32"

    def ranges(self) -> Iterator[Range]:
        """What is read."""
        for each in self.parts:
            yield from each.ranges()


Numbers: TypeAlias = Plain | Encoded | Scales
