"""Bytes that are computed while they are staged, on all cores, with their CRC-32.

All that is computed of the same numbers is computed together, so they are read once. All threads
together have ROOMS bytes of their sources in memory, and each some 30 bytes for an element of its
block.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from ckptsurgeon import disk
from ckptsurgeon.errors import DEFECT, SurgeryError
from ckptsurgeon.hints import command
from ckptsurgeon.plans.edits import Checksum, Computed
from ckptsurgeon.plans.sources import Numbers
from ckptsurgeon.transaction.arithmetic import spoilt, together
from ckptsurgeon.transaction.coding import Numbered, cut, numel, reader, told, width
from ckptsurgeon.transaction.crc32 import joined
from ckptsurgeon.transaction.reading import ALIGN, ROOM, Rooms, forget
from ckptsurgeon.workers import each

STRETCH = 1 << 23
"""Elements that one thread computes one after the other."""
BLOCK = 1 << 17
"""Elements that are read and computed at once. Their float64 stay in a cache, and arrays this
small get the same memory again: fresh memory costs ten times what the arithmetic does."""
LEAP = 8
"""Blocks after which the kernel is told to write them, and to let go of them."""
ROOMS = 96 << 20
"""Bytes of sources that are in memory at once, in all threads. Where they are many, blocks are
smaller."""
CHUNK = 1 << 20
TURNS = threading.Semaphore(len(os.sched_getaffinity(0)))
"""One for each core: as many threads compute at once, while the others read. More of them would
take the interpreter's lock from each other, which costs a fifth of the time."""


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


Group = tuple[Numbers, ...]
"""One source of each term, with equally many numbers."""


def write(root: Path, places: Sequence[Place], jobs: int) -> Mapping[Path, Sequence[Sum]]:
    """Compute every piece and write it in its place. The sums of each file, ascending.

    The first error is raised once nothing is under way."""
    groups: dict[Group, list[Place]] = {}
    for place in places:
        for group, part in stretches(place, STRETCH):
            groups.setdefault(group, []).append(part)
    uses = Counter(source for group in groups for source in set(group))
    share = ROOMS // max(1, min(jobs, len(groups)))
    sums: dict[Path, list[Sum]] = {place.path: [] for place in places}
    rooms = Rooms()

    def fill(group: Group) -> None:
        size = min(ROOM, max(4 * ALIGN, share // len(group)))
        once = [uses[source] == 1 for source in group]
        for place, crc in compute(root, group, groups[group], once, rooms, size):
            sums[place.path].append(Sum(place.at, numel(group[0]) * width(place.piece.dtype), crc))

    each(fill, list(groups), jobs)
    return {path: sorted(found) for path, found in sums.items()}


def stretches(place: Place, most: int) -> Iterator[tuple[Group, Place]]:
    """The parts of a place of which each term lies in one source, of up to `most` elements. Their
    pieces have no terms. Raises SurgeryError unless every term has as many numbers as the piece."""
    path, at, piece = place
    bare = replace(piece, terms=())
    rest = [list(term[::-1]) for term in piece.terms]
    left = piece.size // width(piece.dtype)
    while left > 0 and all(rest):
        heads = [term.pop() for term in rest]
        count = min(most, *map(numel, heads))
        if count:
            yield tuple(cut(head, 0, count) for head in heads), Place(path, at, bare)
        for term, head in zip(rest, heads, strict=True):
            if count < numel(head):
                term.append(cut(head, count, numel(head)))
        at += count * width(piece.dtype)
        left -= count
    if left or any(numel(source) for term in rest for source in term):
        raise SurgeryError(
            f"{path}: {piece.label}: its sources have another number of elements", next=DEFECT
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
    label = f" ({piece.label})" if piece.label else ""
    where = told(source, (first + element) * width(source.dtype))
    if wrong < 0:
        raise SurgeryError(
            f"{where}: this number would be too large for {piece.dtype}{label}",
            next=command("verify", "--level", "4", why="how large the numbers are"),
        )
    raise SurgeryError(
        f"{where}: NaN or infinite, so nothing is made of it{label}",
        next=command("verify", "STEP", "--level", "4", why="of the step that this file is of"),
    )


def names(sources: Iterable[Numbers]) -> Iterable[str]:
    """The files that they read from, each once."""
    return dict.fromkeys(file for source in sources for file, _, _ in source.ranges())


def compute(
    root: Path,
    group: Group,
    places: Sequence[Place],
    once: Sequence[bool],
    rooms: Rooms,
    size: int,
    still: Callable[[], None] = lambda: None,
) -> list[tuple[Place, int]]:
    """Each place with the CRC of what was written there. A source has up to `size` bytes of memory,
    which hold two blocks of it; `once` says which nobody else reads. `still` is called before each
    write, once all files are open, and may raise."""
    dtypes = [source.dtype for source in group]
    items = [width(dtype) for dtype in dtypes]
    whole = numel(group[0])
    size = min(size, 2 * (whole * max(items) + ALIGN))
    block = min(BLOCK, (size // 2 - ALIGN) // max(items))
    crcs = [0] * len(places)
    for name in names(group):
        os.close(disk.read_from(root / name, places[0].path))
    with contextlib.ExitStack() as stack:
        terms: list[Numbered] = []
        given = zip(group, rooms.get(len(group), size), items, once, strict=True)
        for source, room, item, alone in given:
            terms.append(reader(root, source, room, block * item, alone))
            stack.push(terms[-1])
        outs = [stack.enter_context(disk.opened(place.path, os.O_WRONLY)) for place in places]
        for first in range(0, whole, block):
            count = min(block, whole - first)
            numbers = [term.next(count * item) for term, item in zip(terms, items, strict=True)]
            _refuse_short(root, group, numbers, count)
            still()
            with TURNS:
                made = together([place.piece for place in places], numbers, dtypes)
                for i, ((path, at, piece), data) in enumerate(zip(places, made, strict=True)):
                    _refuse_spoilt(piece, data, group, numbers, first)
                    disk.write_at(outs[i], path, at + first * width(piece.dtype), data)
                    crcs[i] = zlib.crc32(data, crcs[i])
            if first // block % LEAP == LEAP - 1 or first + count == whole:
                for out, place in zip(outs, places, strict=True):
                    forget(out, place.at, place.at + (first + count) * width(place.piece.dtype))
    return list(zip(places, crcs, strict=True))


def _refuse_short(root: Path, group: Group, numbers: Sequence[memoryview], count: int) -> None:
    """Raise SurgeryError unless `count` elements of each source are there."""
    for source, data in zip(group, numbers, strict=True):
        if len(data) < count * width(source.dtype):
            name = root / next(iter(names([source])))
            raise SurgeryError(f"{name} shrank while it was being read", next="try again")


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
