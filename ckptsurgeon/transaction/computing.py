"""Bytes that are computed while they are staged: slice by slice, on all cores, with their CRC-32.

At most `jobs` slices are in memory at once; each takes some 30 bytes for each of its elements.
"""

from __future__ import annotations

import math
import os
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from ckptsurgeon import disk
from ckptsurgeon.arithmetic import ITEM, computed, spoilt
from ckptsurgeon.crc32 import joined
from ckptsurgeon.edits import Checksum, Computed, Source
from ckptsurgeon.errors import DEFECT, SurgeryError
from ckptsurgeon.transaction.redo import each

SLICE = 1 << 19
"""Elements of a tensor that are computed at once."""
CHUNK = 1 << 20


class Sum(NamedTuple):
    """The CRC-32 of `size` bytes that were written at `offset`."""

    offset: int
    size: int
    crc: int


class Reader:
    """Open sources: each file is opened once, and read from several threads."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._files: dict[str, int] = {}

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor in self._files.values():
            os.close(descriptor)

    def open(self, names: Sequence[str]) -> None:
        """Open what is not open yet. Raises OSError."""
        for name in names:
            if name not in self._files:
                self._files[name] = os.open(self.root / name, os.O_RDONLY | os.O_CLOEXEC)

    def read(self, name: str, start: int, end: int) -> bytes:
        """Bytes [start, end) of an open file. Raises SurgeryError if it is shorter."""
        parts = []
        while start < end:
            data = os.pread(self._files[name], end - start, start)
            if not data:
                raise SurgeryError(
                    f"{self.root / name} became shorter while it was read", next="try again"
                )
            parts.append(data)
            start += len(data)
        return parts[0] if len(parts) == 1 else b"".join(parts)


def write(
    descriptor: int, path: Path, at: int, piece: Computed, reader: Reader, jobs: int
) -> list[Sum]:
    """Compute `piece` and write it at `at`. The first error is raised once no slice is under
    way."""
    item = ITEM.get(piece.dtype) or _width(piece)
    reader.open(sorted({source.file for term in piece.terms for source in term}))
    slices = [(i, min(SLICE, piece.size // item - i)) for i in range(0, piece.size // item, SLICE)]
    sums: list[Sum] = []

    def compute(part: tuple[int, int]) -> None:
        first, count = part
        terms = [_slice(reader, term, first, count) for term in piece.terms]
        data = computed(piece, terms, [term[0].dtype for term in piece.terms])
        if len(data) != count * item:
            raise SurgeryError(
                f"{path}: {piece.told}: its sources have another number of elements", next=DEFECT
            )
        _refuse_spoilt(piece, first, data, terms)
        disk.write_at(descriptor, path, at + first * item, data)
        sums.append(Sum(at + first * item, len(data), zlib.crc32(data)))

    each(compute, slices, jobs)
    return sorted(sums)


def _refuse_spoilt(piece: Computed, first: int, data: bytes, terms: list[bytes]) -> None:
    """Raise SurgeryError for NaN and infinities that are new, or that come from another step. A
    recipe's own number is finite: what it is is checked before."""
    if not all(map(math.isfinite, piece.numbers)):
        return
    found = spoilt(data, piece.dtype, terms, [term[0].dtype for term in piece.terms])
    if found is None:
        return
    element, source = found
    told = f" ({piece.told})" if piece.told else ""
    if source < 0:
        raise SurgeryError(
            f"{piece.terms[0][0].file}: element {first + element} of a tensor would be too large "
            f"for {piece.dtype}{told}",
            next="ckptsurgeon verify --level 4    how large the numbers are",
        )
    raise SurgeryError(
        f"{piece.terms[source][0].file}: element {first + element} of a tensor is NaN or infinite, "
        f"so nothing is made of it{told}",
        next="ckptsurgeon verify STEP --level 4    of the step that this file is of",
    )


def _width(piece: Computed) -> int:
    """Bytes of an element of what is copied without being understood."""
    (term,) = piece.terms
    return 1 if piece.rule == "copy" and term[0].dtype == piece.dtype else 0


def _slice(reader: Reader, term: Sequence[Source], first: int, count: int) -> bytes:
    """`count` elements of a term, from its element `first` on."""
    out = []
    for source in term:
        item = ITEM.get(source.dtype, 1)
        size = (source.end - source.start) // item
        if first < size and count:
            here = min(count, size - first)
            start = source.start + first * item
            out.append(reader.read(source.file, start, start + here * item))
            count -= here
            first = 0
        else:
            first -= size if count else 0
    return out[0] if len(out) == 1 else b"".join(out)


def resolved(
    checksum: Checksum, at: int, sums: Sequence[Sum], read: Callable[[int, int], bytes]
) -> bytes:
    """The 4 bytes of a checksum that stands at `at`. `sums` are of the new file, ascending; the
    rest of its range is read from it by `read` (offset, size)."""
    position = at + checksum.distance
    end, crc = position + checksum.length, 0
    inside = [each for each in sums if position <= each.offset and each.offset + each.size <= end]
    for piece in (*inside, Sum(end, 0, 0)):
        while position < piece.offset:
            data = read(position, min(CHUNK, piece.offset - position))
            crc = zlib.crc32(data, crc)
            position += len(data)
        if piece.size:
            crc = joined(crc, piece.crc, piece.size)
            position += piece.size
    return crc.to_bytes(4, "little")
