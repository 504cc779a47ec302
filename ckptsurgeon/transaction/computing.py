"""Bytes that are computed while they are staged, on all cores, with their CRC-32.

All that is computed of the same numbers is computed together, so they are read once. Up to `jobs`
threads have a slice of their sources in memory, and a block of what becomes of it.
"""

from __future__ import annotations

import contextlib
import math
import os
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from ckptsurgeon import disk
from ckptsurgeon.arithmetic import ITEM, computed, spoilt
from ckptsurgeon.crc32 import joined
from ckptsurgeon.edits import Checksum, Computed, Source
from ckptsurgeon.errors import DEFECT, SurgeryError
from ckptsurgeon.transaction.redo import each

STRETCH = 1 << 23
"""Elements that one thread computes one after the other."""
BLOCK = 1 << 16
"""Elements that are computed at once. Their float64 stay in a core's cache, and arrays this small
get the same memory again: fresh memory costs ten times what the arithmetic does."""
LEAP = 16
"""Blocks that the kernel is asked for before they are read, and told when they are done with."""
CHUNK = 1 << 20


class Place(NamedTuple):
    """Where in a staged file the bytes of a piece go."""

    path: Path
    at: int
    piece: Computed


class Sum(NamedTuple):
    """The CRC-32 of `size` bytes that were written at `offset`."""

    offset: int
    size: int
    crc: int


Group = tuple[Source, ...]
"""One source of each term, with equally many numbers."""


def write(root: Path, places: Sequence[Place], jobs: int) -> Mapping[Path, Sequence[Sum]]:
    """Compute every piece and write it in its place. The sums of each file, ascending.

    The first error is raised once nothing is under way."""
    groups: dict[Group, list[Place]] = {}
    for place in places:
        for group, part in _stretches(place):
            groups.setdefault(group, []).append(part)
    uses = Counter(source for group in groups for source in set(group))
    sums: dict[Path, list[Sum]] = {place.path: [] for place in places}

    def compute(group: Group) -> None:
        for place, crc in _compute(root, group, groups[group], uses):
            sums[place.path].append(Sum(place.at, _count(group[0]) * _width(place.piece), crc))

    each(compute, list(groups), jobs)
    return {path: sorted(found) for path, found in sums.items()}


def _stretches(place: Place) -> Iterator[tuple[Group, Place]]:
    """The parts of a place of which each term lies in one source."""
    path, at, piece = place
    rest = [list(term[::-1]) for term in piece.terms]
    left = piece.size // _width(piece)
    while any(rest):
        heads = [term.pop() for term in rest if term]
        count = min(STRETCH, *map(_count, heads))
        left -= count
        if left < 0 or len(heads) < len(rest):
            break
        if count:
            yield tuple(_cut(head, 0, count) for head in heads), Place(path, at, piece)
        for term, head in zip(rest, heads, strict=True):
            if count < _count(head):
                term.append(_cut(head, count, _count(head)))
        at += count * _width(piece)
    if left or any(rest):
        raise SurgeryError(
            f"{path}: {piece.told}: its sources have another number of elements", next=DEFECT
        )


def _refuse_spoilt(
    piece: Computed,
    data: bytes | memoryview,
    group: Group,
    numbers: Sequence[memoryview],
    first: int,
) -> None:
    """Raise SurgeryError for NaN and infinities that are new, or that come from another step.
    `numbers` are those of `group` from the element `first` on. A recipe's own number is finite:
    what it is is checked before."""
    if not all(map(math.isfinite, piece.numbers)):
        return
    found = spoilt(data, piece.dtype, numbers, [source.dtype for source in group])
    if found is None:
        return
    element, wrong = found
    source = group[max(wrong, 0)]
    told = f" ({piece.told})" if piece.told else ""
    where = f"{source.file}: byte {source.start + (first + element) * ITEM.get(source.dtype, 1)}"
    if wrong < 0:
        raise SurgeryError(
            f"{where}: this number would be too large for {piece.dtype}{told}",
            next="ckptsurgeon verify --level 4    how large the numbers are",
        )
    raise SurgeryError(
        f"{where}: NaN or infinite, so nothing is made of it{told}",
        next="ckptsurgeon verify STEP --level 4    of the step that this file is of",
    )


def _width(piece: Computed) -> int:
    """Bytes of an element; 1 of what is copied without being understood."""
    return ITEM.get(piece.dtype, 1)


def _count(source: Source) -> int:
    return (source.end - source.start) // ITEM.get(source.dtype, 1)


def _cut(source: Source, first: int, end: int) -> Source:
    """The elements [first, end) of a source."""
    item = ITEM.get(source.dtype, 1)
    start = source.start
    return Source(source.file, start + first * item, start + end * item, source.dtype)


def _compute(
    root: Path, group: Group, places: Sequence[Place], uses: Mapping[Source, int]
) -> list[tuple[Place, int]]:
    """Each place with the CRC of what was written there."""
    dtypes = [source.dtype for source in group]
    whole = _count(group[0])
    crcs = [0] * len(places)
    with contextlib.ExitStack() as stack:
        terms = [_Term(root, source, stack) for source in group]
        outs = [stack.enter_context(disk.opened(place.path)) for place in places]
        for first in range(0, whole, BLOCK):
            count = min(BLOCK, whole - first)
            numbers = [term.read(first, count) for term in terms]
            for i, (path, at, piece) in enumerate(places):
                data = computed(piece, numbers, dtypes)
                _refuse_spoilt(piece, data, group, numbers, first)
                disk.write_at(outs[i], path, at + first * _width(piece), data)
                crcs[i] = zlib.crc32(data, crcs[i])
            if first // BLOCK % LEAP == LEAP - 1 or first + count == whole:
                for term in terms:
                    term.leap(first + count, once=uses[term.source] == 1)
                for out, place in zip(outs, places, strict=True):
                    forget(out, place.at, place.at + (first + count) * _width(place.piece))
    return list(zip(places, crcs, strict=True))


class _Term:
    """An open source."""

    def __init__(self, root: Path, source: Source, stack: contextlib.ExitStack) -> None:
        self.path, self.source = root / source.file, source
        self.descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        stack.callback(os.close, self.descriptor)
        self.item = ITEM.get(source.dtype, 1)
        self.room = bytearray(BLOCK * self.item)

    def read(self, first: int, count: int) -> memoryview:
        """So many elements, until the next read. Raises SurgeryError if they are not there."""
        whole = rest = memoryview(self.room)[: count * self.item]
        at = self.source.start + first * self.item
        while rest:
            done = os.preadv(self.descriptor, [rest], at)
            if not done:
                raise SurgeryError(
                    f"{self.path} became shorter while it was read", next="try again"
                )
            rest = rest[done:]
            at += done
        return whole

    def leap(self, end: int, once: bool) -> None:
        """Ask for what comes after the element `end`; what came before leaves the cache, unless it
        is read again."""
        at, size = self.source.start + end * self.item, LEAP * len(self.room)
        if once:
            forget(self.descriptor, self.source.start, at)
        if at < self.source.end:
            size = min(size, self.source.end - at)
            os.posix_fadvise(self.descriptor, at, size, os.POSIX_FADV_WILLNEED)


def forget(descriptor: int, start: int, end: int) -> None:
    """Start to write bytes [start, end) to the device, and drop those from the page cache that are
    there: so a surgery leaves its memory to others, and its fsync has little left to do. A hint."""
    os.posix_fadvise(descriptor, start, end - start, os.POSIX_FADV_DONTNEED)


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
