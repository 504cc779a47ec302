"""New records and a new central directory after the last byte of a torch archive.

The old directory is copied, and only the entries of changed records are rewritten.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from ckptsurgeon.files.archives.zip_directory import (
    END,
    END_64,
    ENTRY,
    FULL_16,
    FULL_32,
    LOCAL,
    LOCATOR_64,
    STORED,
    Directory,
    Record,
    Records,
)
from ckptsurgeon.plans.frozen import frozen

ALIGNMENT = 64
"""Payloads start at multiples of it, as `torch.save` aligns them."""
_UTF_8 = 0x0800
_ZIP_64 = 45
"""Version needed to read 64-bit sizes."""


@frozen
class Moved:
    """A record's new place, size and CRC. One that is changed `in_place` keeps its flags, and with
    them the data descriptor behind its bytes."""

    record: Record
    offset: int
    size: int
    crc: int
    in_place: bool = False


def local_header(folder: str, name: str, crc: int, size: int, offset: int) -> bytes:
    """The header at `offset` of a record that holds `size` bytes right after it, padded as torch
    pads it so that they are aligned."""
    full = f"{folder}/{name}".encode("utf-8", "surrogateescape")
    wide = struct.pack("<HHQQ", 1, 16, size, size) if size >= FULL_32 else b""
    padding = -(offset + LOCAL.size + len(full) + len(wide) + 4) % ALIGNMENT
    extra = wide + struct.pack("<2sH", b"FB", padding) + b"Z" * padding
    short, version = min(size, FULL_32), _ZIP_64 if wide else 0
    fields = (version, _UTF_8, STORED, 0, 0, crc, short, short, len(full), len(extra))
    return LOCAL.pack(b"PK\3\4", *fields) + full + extra


class Columns(NamedTuple):
    """Many records that move: name, offset, size and CRC of each."""

    names: list[str]
    offsets: list[int]
    sizes: list[int]
    crcs: list[int]

    def add(self, name: str, offset: int, size: int, crc: int) -> None:
        """One more."""
        self.extend([name], [offset], [size], [crc])

    def extend(
        self, names: list[str], offsets: list[int], sizes: list[int], crcs: list[int]
    ) -> None:
        """More of them, which are as many in each column."""
        self.names.extend(names)
        self.offsets.extend(offsets)
        self.sizes.extend(sizes)
        self.crcs.extend(crcs)


def redirected(old: Directory, moved: Columns) -> bytes:
    """The old central directory with new entries for the records that moved."""
    if isinstance(old.records, Records):
        data = old.records.redirected(*moved)
        if data is not None:
            return data
    return directory(
        old,
        (
            Moved(old.records[name], offset, size, crc)
            for name, offset, size, crc in zip(*moved, strict=True)
        ),
    )


def directory(old: Directory, moved: Iterable[Moved]) -> bytes:
    """The old central directory with new entries for the records that moved."""
    return b"".join(data for data, _ in directory_parts(old, moved))


def directory_parts(old: Directory, moved: Iterable[Moved]) -> Iterator[tuple[bytes, Moved | None]]:
    """The same in parts: each new entry with what it is of, and what stays between them."""
    position = 0
    for item in sorted(moved, key=lambda item: item.record.entry):
        start = item.record.entry
        fields = ENTRY.unpack_from(old.data, start)
        name, extra, comment = fields[10:13]
        yield old.data[position:start], None
        yield _entry(old, item, fields), item
        position = start + ENTRY.size + name + extra + comment
    yield old.data[position:], None


def _entry(old: Directory, moved: Moved, fields: tuple[Any, ...]) -> bytes:
    made, needed, flags, method = fields[1:5]
    time, date, name_length, attributes = fields[5], fields[6], fields[10], fields[13:16]
    start = moved.record.entry + ENTRY.size
    name = old.data[start : start + name_length]
    wide = b""
    for value in (moved.size, moved.size, moved.offset):
        if value >= FULL_32:
            wide += value.to_bytes(8, "little")
    if wide:
        wide, needed = struct.pack("<HH", 1, len(wide)) + wide, max(needed, _ZIP_64)
    if not moved.in_place:
        flags, method = _UTF_8, STORED
    size, offset = min(moved.size, FULL_32), min(moved.offset, FULL_32)
    head = (b"PK\1\2", made, needed, flags, method, time, date, moved.crc, size, size)
    return ENTRY.pack(*head, name_length, len(wide), 0, *attributes, offset) + name + wide


def end_records(count: int, length: int, offset: int) -> tuple[bytes, bytes]:
    """What follows a central directory of `count` entries and `length` bytes at `offset`: the
    zip64 records, which torch always writes, and the 22 bytes that make the archive readable."""
    made, needed = 3 << 8 | 30, _ZIP_64
    wide = (END_64.size - 12, made, needed, 0, 0, count, count, length, offset)
    locator = LOCATOR_64.pack(b"PK\6\7", 0, offset + length, 1)
    short = min(count, FULL_16)
    sizes = (short, short, min(length, FULL_32), min(offset, FULL_32), 0)
    return END_64.pack(b"PK\6\6", *wide) + locator, END.pack(b"PK\5\6", 0, 0, *sizes)
