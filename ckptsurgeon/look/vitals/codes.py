"""Moments of 8 bits: a code's number, and how far the mean that it stands for may be from it.

Each update rounds to a code again. What is less than half the way to the next code may be lost
every time: of v up to that half times 1 / (1-b2), of m times 1 / (1-b1).
"""

from __future__ import annotations

from typing import Any

from ckptsurgeon.look.vitals.jobs import Coded
from ckptsurgeon.look.vitals.reader import Reader


class Decoder:
    """The numbers of one moment, block by block. `beta` is that of its mean."""

    def __init__(self, reader: Reader, coded: Coded, beta: float) -> None:
        import numpy

        self.coded, self.reader = coded, reader
        scales = _floats(reader, coded.scales, coded.blocks)
        book = _floats(reader, coded.book, coded.entries)
        self.block = coded.block
        self.scales, self.book = scales, book.astype("f4")
        order = numpy.argsort(book)
        gaps = numpy.diff(book[order], prepend=book[order][:1], append=book[order][-1:])
        half = numpy.empty_like(book)
        half[order] = numpy.maximum(gaps[:-1], gaps[1:]) / 2
        self.slack = (half / (1 - beta)).astype("f4")

    def read(self, at: int, size: int) -> tuple[Any, Any]:
        """The numbers of `size` elements from the `at`-th on, and how far each may be off."""
        import numpy

        item = self.coded.codes
        codes = self.reader.whole(item.archive, item.record, item.start + at, size)
        scale = self.scales[numpy.arange(at, at + size) // self.block]
        return self.book[codes] * scale, self.slack[codes] * scale

    @property
    def fits(self) -> bool:
        """Whether every code has a number, and every element a scale."""
        return bool(self.book.size >= 256 and self.block > 0)


def _floats(reader: Reader, item: Any, count: int) -> Any:
    raw = reader.whole(item.archive, item.record, item.start, count * 4)
    return raw.view(f"{item.archive.byte_order()}f4").astype("f4")
