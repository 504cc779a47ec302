"""A torch file as a new file: the old bytes in their old places, but for what changes.

For files that an Append must not touch. Storages stay where they are; a pickle of another length
goes after them, and the directory after it.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field

from ckptsurgeon.errors import DamagedFile
from ckptsurgeon.files.archives.archive import PICKLE, Archive
from ckptsurgeon.files.archives.storage_edit import StorageEdit
from ckptsurgeon.files.archives.zip_directory import DESCRIPTOR, Directory, Record
from ckptsurgeon.files.archives.zip_tail import Moved, directory_parts, end_records, local_header
from ckptsurgeon.plans.edits import Checksum, Computed, Content, Hole, Piece, Span
from ckptsurgeon.transaction import crc32

CHUNK = 1 << 20
LOCAL_CRC, ENTRY_CRC = 14, 16
"""Where the CRC stands in a local header, and in an entry of the directory."""


def render(
    archive: Archive, file: str, data: bytes | None, storages: dict[str, StorageEdit]
) -> Content:
    """The content of the file with `data` as its pickle and the edited storages."""
    patches = _Patches(archive)
    for key, edit in storages.items():
        patches.storage(f"data/{key}", edit)
    if archive.directory is None:
        if data is not None:
            record = archive.record(PICKLE)
            patches.put(record.offset, record.offset + record.size, data)
        return Content(tuple(patches.pieces(file, 0, archive.size)))
    return Content(tuple(_zip_pieces(archive, archive.directory, file, data, patches)))


def _zip_pieces(
    archive: Archive, old: Directory, file: str, data: bytes | None, patches: _Patches
) -> Iterator[Piece]:
    tail, start = b"", old.offset
    if data is not None:
        record = archive.record(PICKLE)
        at = archive.payload(PICKLE)
        if len(data) == record.size:
            patches.put(at, at + record.size, data)
            patches.crc(record, zlib.crc32(data))
        else:
            crc = zlib.crc32(data)
            tail = local_header(old.folder, PICKLE, crc, len(data), start) + data
            patches.moved.append(Moved(record, start, len(data), crc))
    entries = list(directory_parts(old, patches.moved))
    size = sum(len(entry) for entry, _ in entries)
    wide, end = end_records(len(old.records), size, start + len(tail))
    yield from patches.pieces(file, 0, start)
    yield tail
    at = start + len(tail)
    for entry, moved in entries:
        if moved is not None and moved.record.name in patches.computed:
            yield entry[:ENTRY_CRC]
            yield patches.checksum(moved.record, at + ENTRY_CRC)
            yield entry[ENTRY_CRC + 4 :]
        else:
            yield entry
        at += len(entry)
    yield wide + end


@dataclass
class _Patches:
    """Byte ranges of the old file that change in place, and the entries that say so."""

    archive: Archive
    changes: list[tuple[int, int, bytes | Computed | Checksum | None]] = field(default_factory=list)
    moved: list[Moved] = field(default_factory=list)
    computed: set[str] = field(default_factory=set)
    """The records whose CRC is known once they are written."""

    def put(self, start: int, end: int, data: bytes | Computed | Checksum | None) -> None:
        self.changes.append((start, end, data))

    def checksum(self, record: Record, at: int) -> Checksum:
        """The CRC of a record, standing at `at`."""
        return Checksum(self.archive.payload(record.name) - at, record.size)

    def storage(self, name: str, edit: StorageEdit) -> None:
        record, base = self.archive.record(name), self.archive.payload(name)
        crc = record.crc
        if edit.computed and record.crc:
            self.computed.add(name)
        for start, end, data, unchanged in edit.pieces():
            if unchanged:
                continue
            self.put(base + start, base + end, data)
            if not record.crc or edit.computed:
                continue
            assert not isinstance(data, Computed)
            new = crc32.of_zeros(end - start) if data is None else zlib.crc32(data)
            if end - start == record.size:
                crc = new
            else:
                old = self._crc_of(base + start, base + end)
                crc = crc32.replaced(crc, old, new, record.size - end)
        if record.crc:
            self.crc(record, crc)

    def crc(self, record: Record, crc: int) -> None:
        """The CRC of a record that stays in its place, in the file and in the directory."""
        at = record.offset + LOCAL_CRC
        if record.flags & DESCRIPTOR:
            after = self.archive.payload(record.name) + record.size
            if self.archive.read_at(after, 4) != b"PK\7\x08":
                raise DamagedFile(
                    self.archive.where, after, f"{record.name!r} has no data descriptor"
                )
            at = after + 4
        pending = record.name in self.computed
        self.put(at, at + 4, self.checksum(record, at) if pending else crc.to_bytes(4, "little"))
        self.moved.append(Moved(record, record.offset, record.size, crc, in_place=True))

    def _crc_of(self, start: int, end: int) -> int:
        crc = 0
        for at in range(start, end, CHUNK):
            crc = zlib.crc32(self.archive.read_at(at, min(CHUNK, end - at)), crc)
        return crc

    def pieces(self, file: str, start: int, end: int) -> Iterator[Piece]:
        """The bytes [start, end) of the file with the changes."""
        position = start
        for begin, finish, data in sorted(self.changes, key=lambda change: change[0]):
            if position < begin:
                yield Span(file, position, begin)
            if data is not None:
                yield data
            else:
                yield Hole(finish - begin)
            position = finish
        if position < end:
            yield Span(file, position, end)
