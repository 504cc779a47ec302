"""The frame of a `.wandb` file: records in blocks of 32 KiB, as LevelDB's log has them.

A file begins with seven bytes, and blocks count from the first of them. A record is one chunk, or
several where it does not fit into its block: four bytes of CRC-32 over type and data, two of
length, one of type. A chunk says nothing of where it lies, so a record that stays in one piece is
copied as it is; only those that meet the end of a block are framed anew.
"""

from __future__ import annotations

import mmap
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ckptsurgeon.errors import DamagedFile, SurgeryError, count
from ckptsurgeon.logs.source import leave
from ckptsurgeon.plans.edits import Piece, Span

START = b":W&B\xe1\xbe\x00"
BLOCK, HEADER = 32 << 10, 7
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4
_HEADER = struct.Struct("<IHB")


class Record(NamedTuple):
    """One record: its bytes [start, end) in the file, with what lies between its chunks, those of
    its data, and the data."""

    start: int
    end: int
    chunks: tuple[tuple[int, int], ...]
    data: bytes


def opened(path: Path) -> mmap.mmap | bytes:
    """The bytes of a file, mapped. Raises SurgeryError for one that is none of W&B's."""
    with path.open("rb") as file:
        head = file.read(len(START))
        if head != START[: len(head)] or 0 < len(head) < len(START):
            raise SurgeryError(
                f"{path} does not begin as a log of W&B that is known",
                next=leave(path.parent, "records"),
            )
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if head else b""


def records(data: mmap.mmap | bytes, path: Path, at: int = len(START)) -> Iterator[Record]:
    """The whole records from `at` on, which is the first byte of one, or of a block. What a killed
    writer left unfinished at the end is none. Raises DamagedFile for a bad chunk before it."""
    size = len(data)
    chunks: list[tuple[int, int]] = []
    start = at
    while at + HEADER <= size:
        left = BLOCK - at % BLOCK
        if left < HEADER:
            at += left
            continue
        crc, length, kind = _HEADER.unpack_from(data, at)
        begin, after = at + HEADER, at + HEADER + length
        if (crc, length, kind) == (0, 0, 0):  # room that was made and not used
            at += left
            continue
        if after > size:
            return
        if length > left - HEADER or not FULL <= kind <= LAST:
            raise _damaged(path, at, f"a chunk of type {kind} and {count(length, 'byte')}")
        if zlib.crc32(data[begin - 1 : after]) != crc:
            if after == size:
                return
            raise _damaged(path, at, "the checksum of a chunk is wrong")
        if kind == FULL and not chunks:  # nearly all
            yield Record(at, after, ((begin, after),), data[begin:after])
            at = after
            continue
        if kind in (FULL, FIRST):
            if chunks:
                raise _damaged(path, at, "a record begins inside another one")
            start = at
        elif not chunks:
            raise _damaged(path, at, "a record goes on that did not begin")
        chunks.append((begin, after))
        at = after
        if kind in (FULL, LAST):
            content = b"".join(data[a:b] for a, b in chunks) if len(chunks) > 1 else data[begin:at]
            yield Record(start, at, tuple(chunks), content)
            chunks = []


def record_at(data: mmap.mmap | bytes, start: int, end: int) -> Record:
    """The record that `records` has found at [start, end)."""
    at, chunks = start, []
    while at < end:
        left = BLOCK - at % BLOCK
        if left < HEADER:
            at += left
            continue
        length = _HEADER.unpack_from(data, at)[1]
        chunks.append((at + HEADER, at + HEADER + length))
        at += HEADER + length
    return Record(start, end, tuple(chunks), b"".join(data[a:b] for a, b in chunks))


def first_after(data: mmap.mmap | bytes, at: int) -> int:
    """The first byte of a record in the block that begins at or after `at`, or the size: where
    reading may begin in the middle of a file."""
    at += -at % BLOCK
    while at + HEADER <= len(data):
        if BLOCK - at % BLOCK < HEADER:
            at += BLOCK - at % BLOCK
            continue
        _, length, kind = _HEADER.unpack_from(data, at)
        if kind not in (MIDDLE, LAST):
            return at
        at += HEADER + length
    return len(data)


def _damaged(path: Path, offset: int, what: str) -> DamagedFile:
    return DamagedFile(str(path), offset, what, next=leave(path.parent, "records"))


class Framed:
    """A new file of records: spans of the file `name`, and bytes for what is framed anew."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._pieces: list[Piece] = [START]
        self._at = len(START)

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """The whole file."""
        return tuple(self._pieces)

    def copy(self, record: Record) -> None:
        """A record of the file as it is."""
        self._pad()
        if (self._at - record.start) % BLOCK == 0:  # then its chunks end where blocks do
            self._span(record.start, record.end)
            return
        length = sum(end - start for start, end in record.chunks)
        if len(record.chunks) == 1 and HEADER + length <= BLOCK - self._at % BLOCK:
            self._span(record.start, record.end)
            return
        at = 0
        for kind, end in self._chunks(length):
            self._bytes(_header(kind, record.data[at:end]))
            for start, stop in _within(record.chunks, at, end):
                self._span(start, stop)
            at = end
            self._pad()

    def stretch(self, start: int, end: int) -> bool:
        """Bytes [start, end) of whole records as they are, and whether that can be: what is behind
        lies as it does in the old file."""
        self._pad()
        if (self._at - start) % BLOCK:
            return False
        self._span(start, end)
        return True

    def reach(self, start: int) -> int:
        """How far records that begin at `start` in the old file can be copied as one row: to the
        end of its block, or of the new one."""
        self._pad()
        return start + min(BLOCK - start % BLOCK, BLOCK - self._at % BLOCK)

    def row(self, start: int, end: int) -> None:
        """Whole records [start, end) of one block, which `reach` says fit in here."""
        self._span(start, end)

    def write(self, data: bytes) -> None:
        """A record of this data."""
        self._pad()
        at = 0
        for kind, end in self._chunks(len(data)):
            self._bytes(_header(kind, data[at:end]) + data[at:end])
            at = end
            self._pad()

    def _chunks(self, length: int) -> Iterator[tuple[int, int]]:
        """The type and the end of each chunk, from where the file is now on."""
        at = 0
        while True:
            room = BLOCK - self._at % BLOCK - HEADER
            end = min(length, at + room)
            if at == 0:
                yield (FULL if end == length else FIRST), end
            else:
                yield (LAST if end == length else MIDDLE), end
            if end == length:
                return
            at = end

    def _pad(self) -> None:
        left = BLOCK - self._at % BLOCK
        if left < HEADER:
            self._bytes(bytes(left))

    def _bytes(self, data: bytes) -> None:
        last = self._pieces[-1]
        if isinstance(last, bytes) and len(last) < BLOCK:
            self._pieces[-1] = last + data
        else:
            self._pieces.append(data)
        self._at += len(data)

    def _span(self, start: int, end: int) -> None:
        last = self._pieces[-1]
        if isinstance(last, Span) and last.end == start:
            self._pieces[-1] = Span(self._name, last.start, end)
        elif end > start:
            self._pieces.append(Span(self._name, start, end))
        self._at += end - start


def _header(kind: int, data: bytes) -> bytes:
    tail = struct.pack("<HB", len(data), kind)
    return struct.pack("<I", zlib.crc32(tail[2:] + data)) + tail


def _within(chunks: tuple[tuple[int, int], ...], first: int, end: int) -> Iterator[tuple[int, int]]:
    """Bytes [first, end) of the data of a record, as ranges of its file."""
    at = 0
    for start, stop in chunks:
        a, b = max(first, at), min(end, at + stop - start)
        if a < b:
            yield start + a - at, start + b - at
        at += stop - start
