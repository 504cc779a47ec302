"""Reads numbers from wherever they are kept: a range, rows of several files, codes of 8 bits; and
makes codes of numbers.

Codes are bitsandbytes': what a code stands for is bit for bit that of all its kernels, and the code
of a number that of its kernel for any device, which takes the nearest one. Its kernel for a GPU
takes the other one where a number lies in the middle of two: once in a million. Its kernel for a
CPU looks a number up in steps of 1/32,767 of the largest one of the block: second moments below
that become 0 there, which divides an update by eps.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.hints import command
from ckptsurgeon.plans.sources import Decoded, Encoded, Numbers, Plain, Scales, Source, Woven
from ckptsurgeon.transaction.arithmetic import ITEM, floats
from ckptsurgeon.transaction.reading import ALIGN, Reader
from ckptsurgeon.transaction.weaving import Weaver

AT_ONCE = 1 << 17
"""Numbers that codes are made of at once."""
LEAST = 1e-38
"""What bitsandbytes divides by at least."""
AnyNumbers = TypeVar("AnyNumbers", bound=Numbers)


class Numbered(Protocol):
    """What reads a source: `next` has so many bytes more, until the next call; fewer where they
    end, or where a file does."""

    def next(self, size: int) -> memoryview: ...

    def __enter__(self) -> Any: ...

    def __exit__(self, *_: object) -> None: ...


def width(dtype: str) -> int:
    """Bytes of an element; 1 of what is copied without being understood."""
    return ITEM.get(dtype, 1)


def numel(source: Numbers) -> int:
    """How many numbers it has."""
    return (source.end - source.start) // width(source.dtype)


def cut(source: AnyNumbers, first: int, end: int) -> AnyNumbers:
    """The elements [first, end) of a source."""
    item, start = width(source.dtype), source.start
    return replace(source, start=start + first * item, end=start + end * item)


def told(source: Numbers, byte: int) -> str:
    """The file and byte of one byte of a source; of codes the file."""
    if isinstance(source, Source):
        return f"{source.file}: byte {source.start + byte}"
    if not isinstance(source, Woven):
        return next(file for file, _, _ in source.ranges())
    number, inside = divmod(source.start + byte, source.row)
    for columns in source.columns:
        if inside < columns.width:
            break
        inside -= columns.width
    return f"{columns.file}: byte {columns.start + number * columns.stride + inside}"


def reader(root: Path, source: Numbers, room: memoryview, most: int, once: bool) -> Numbered:
    """What reads a source, in `room` where that is one range; see `Reader`."""
    if isinstance(source, Source):
        return Reader(root / source.file, source.start, source.end, room, most, once)
    if isinstance(source, Woven):
        return Weaver(root, source, room)
    return Decoder(root, source) if isinstance(source, Decoded) else Coder(root, source)


class Decoder:
    """The numbers that codes stand for."""

    def __init__(self, root: Path, source: Decoded) -> None:
        self._source, self._at = source, source.start // ITEM["float32"]
        self._book = floats(_whole(root, source.book), source.book.dtype)
        self._open: list[int] = []
        with contextlib.ExitStack() as opened:
            for each in (source.codes, source.scales):
                self._open.append(os.open(root / each.file, os.O_RDONLY | os.O_CLOEXEC))
                opened.callback(os.close, self._open[-1])
            self._close = opened.pop_all()

    def __enter__(self) -> Decoder:
        return self

    def __exit__(self, *_: object) -> None:
        self._close.close()

    def next(self, size: int) -> memoryview:
        """See `Numbered`."""
        import numpy

        source, item = self._source, ITEM["float32"]
        first, end = self._at, min(self._at + size // item, source.end // item)
        block = source.block
        codes = os.pread(self._open[0], end - first, source.codes.start + first)
        low, high = first // block, -(-end // block)
        data = os.pread(self._open[1], (high - low) * item, source.scales.start + low * item)
        if len(codes) < end - first or len(data) < (high - low) * item:
            return memoryview(b"")
        scales = floats(data, source.scales.dtype)[numpy.arange(first, end) // block - low]
        self._at = end
        numbers = self._book[numpy.frombuffer(codes, "u1")] * scales
        return memoryview(numbers.astype("<f4").tobytes())


class Coder:
    """Codes of numbers, or the scales of their blocks: whole blocks are made at once."""

    def __init__(self, root: Path, source: Encoded | Scales) -> None:
        self._block, self._made, self._before = source.block, b"", 0
        self._book: Any = None
        first = source.start // width(source.dtype)
        if isinstance(source, Scales):
            first *= source.block
        else:
            self._book = floats(_whole(root, source.book), source.book.dtype)
            self._before = first % source.block
        self._numbers = _Chain(root, source.parts, first - self._before)

    def __enter__(self) -> Coder:
        return self

    def __exit__(self, *_: object) -> None:
        self._numbers.close()

    def next(self, size: int) -> memoryview:
        """See `Numbered`."""
        most = max(AT_ONCE // self._block, 1) * self._block
        while len(self._made) < self._before + size:
            numbers = self._numbers.next(most)
            if not len(numbers):
                break
            self._made += self._of(numbers)
        end = self._before + size
        found, self._made, self._before = self._made[self._before : end], self._made[end:], 0
        return memoryview(found)

    def _of(self, numbers: Any) -> bytes:
        if self._book is None:
            return bytes(scales_of(numbers, self._block).astype("<f4").tobytes())
        return bytes(codes_of(numbers, self._book, self._block).tobytes())


class _Chain:
    """The numbers of several sources, from the element `first` on, as float32."""

    def __init__(self, root: Path, parts: Sequence[Plain], first: int) -> None:
        self._root, self._rest = root, list(reversed(parts))
        while self._rest and first:
            part = self._rest.pop()
            if first < numel(part):
                self._rest.append(cut(part, first, numel(part)))
            first -= min(first, numel(part))
        self._part: Plain | None = None
        self._left = 0
        self._opened = contextlib.ExitStack()

    def close(self) -> None:
        self._opened.close()

    def next(self, most: int) -> Any:
        """So many more as an array, fewer at the end. Raises SurgeryError for NaN and infinities,
        of which no codes are made, and where a file shrank."""
        import numpy

        found = numpy.empty(most, "f4")
        done = 0
        while done < most and (self._left or self._open()):
            assert self._part is not None
            share = min(self._left, most - done, AT_ONCE)
            data = self._reader.next(share * width(self._part.dtype))
            if len(data) < share * width(self._part.dtype):
                raise SurgeryError(
                    f"{self._root / told(self._part, 0)}: it shrank while it was being read",
                    next="try again",
                )
            found[done : done + share] = floats(data, self._part.dtype)
            if not numpy.isfinite(found[done : done + share]).all():
                raise SurgeryError(
                    f"{told(self._part, 0)}: NaN or infinite, so no codes are made of it",
                    next=command("verify", "STEP", "--level", "4", why="of the step that this is"),
                )
            self._left -= share
            done += share
        return found[:done]

    def _open(self) -> bool:
        """The next source that has any; whether there is one."""
        self._opened.close()
        while self._rest and not self._left:
            self._part = self._rest.pop()
            self._left = numel(self._part)
        if self._part is None or not self._left:
            return False
        most = min(self._left, AT_ONCE) * width(self._part.dtype)
        room = memoryview(bytearray(2 * (most + 2 * ALIGN)))
        self._reader = reader(self._root, self._part, room, most, False)
        self._opened.push(self._reader)
        return True


def scales_of(numbers: Any, block: int) -> Any:
    """The largest absolute value of each block, the last of which may be shorter."""
    import numpy

    whole = len(numbers) // block * block
    found = numpy.abs(numbers[:whole].reshape(-1, block)).max(1, initial=0)
    if whole < len(numbers):
        last = numpy.maximum(numpy.abs(numbers[whole:]).max(), numpy.float32(LEAST))
        found = numpy.append(found, last)
    return found.astype("f4")


def codes_of(numbers: Any, book: Any, block: int) -> Any:
    """The index of the nearest of the ascending numbers of `book`; of two, of the lower one."""
    import numpy

    whole, one = len(numbers) // block * block, numpy.float32(1)
    largest = numpy.maximum(scales_of(numbers, block), numpy.float32(LEAST))
    shares = numpy.empty_like(numbers)
    rows = numbers[:whole].reshape(-1, block)
    shares[:whole] = (rows * (one / largest[: len(rows), None])).reshape(-1)
    shares[whole:] = numbers[whole:] / largest[-1:] if whole < len(numbers) else ()
    bounds = (book[:-1] + book[1:]) / numpy.float32(2)
    return numpy.searchsorted(bounds, numpy.clip(shares, -one, one), side="left").astype("u1")


def _whole(root: Path, source: Source) -> bytes:
    with (root / source.file).open("rb") as file:
        return os.pread(file.fileno(), source.end - source.start, source.start)
