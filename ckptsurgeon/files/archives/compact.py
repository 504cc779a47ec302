"""A torch file without the bytes that earlier surgeries left behind: its live records, in order."""

from __future__ import annotations

import zlib

from ckptsurgeon.files.archives.archive import Archive
from ckptsurgeon.files.archives.zip_directory import DESCRIPTOR
from ckptsurgeon.files.archives.zip_tail import Moved, directory, end_records, local_header
from ckptsurgeon.plans.edits import Content, Span

VERSION = ".format_version"


def compact(archive: Archive, file: str) -> Content | None:
    """The content of a plain file with the same records, or None when no byte of it is dead (and
    for the legacy format, which is never appended to).

    A storage that is a hole stays one. `.format_version` becomes 0: the records have no data
    descriptors any more, so that they are not where torch.save would have put them."""
    old = archive.directory
    if old is None:
        return None
    live = sum(_extent(archive, name) for name in old.records)
    tail = archive.size - old.offset
    if live + tail >= archive.size:
        return None
    pieces: list[bytes | Span] = []
    moved: list[Moved] = []
    end = 0
    for record in old.records.values():
        at, size, crc = archive.payload(record.name), record.size, record.crc
        if record.name == VERSION:
            size, crc = 1, zlib.crc32(b"0")
        header = local_header(old.folder, record.name, crc, size, end)
        if end == record.offset and record.name != VERSION:
            extent = _extent(archive, record.name)
            pieces.append(Span(file, record.offset, record.offset + extent))
            end += extent
            continue
        moved.append(Moved(record, end, size, crc))
        pieces.append(header)
        pieces.append(b"0" if record.name == VERSION else Span(file, at, at + size))
        end += len(header) + size
    entries = directory(old, moved)
    wide, last = end_records(len(old.records), len(entries), end)
    return Content((*pieces, entries + wide + last))


def _extent(archive: Archive, name: str) -> int:
    """Bytes from a record's local header to the end of its descriptor."""
    record = archive.record(name)
    described = archive.descriptor(name) if record.flags & DESCRIPTOR else 0
    return archive.payload(name) - record.offset + record.size + described
