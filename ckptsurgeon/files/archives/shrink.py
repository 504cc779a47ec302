"""A torch file whose storages hold only what its tensors use.

`torch.save` writes the whole storage of every view: a layer cut out of a flat buffer takes the
buffer along, which made files of the 1.3B runs ten times as large.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator

from ckptsurgeon.files.archives.archive import CHUNK, PICKLE, Archive
from ckptsurgeon.files.archives.compact import VERSION
from ckptsurgeon.files.archives.storage_edit import ranges
from ckptsurgeon.files.archives.zip_tail import Moved, directory, end_records, local_header
from ckptsurgeon.files.dtypes import ITEM_BYTES
from ckptsurgeon.files.pickles import opcodes
from ckptsurgeon.files.pickles.scan import Scan, scan
from ckptsurgeon.files.pickles.sharing import Splice
from ckptsurgeon.files.pickles.splice import replaced
from ckptsurgeon.files.pickles.tree import tensors
from ckptsurgeon.files.pickles.values import encode, scalar
from ckptsurgeon.plans.edits import Content, Span
from ckptsurgeon.plans.frozen import frozen

REBUILD = ("torch._utils", "_rebuild_tensor_v2")


@frozen
class Used:
    """The elements [start, end) of one storage are all that tensors use."""

    start: int
    end: int
    item: int


def shrink(archive: Archive, file: str) -> Content | None:
    """The content of a plain file with the same values and tensors, where each storage begins with
    the first element that a tensor uses and ends with the last. None when nothing would go (and
    for the legacy format)."""
    old = archive.directory
    if old is None:
        return None
    used = _used(archive)
    if not used:
        return None
    start = archive.payload(PICKLE)
    data = archive.read_at(start, archive.record(PICKLE).size)
    pickle = _retold(scan(data, where=str(archive.path), base=start, whole=True), used)
    pieces: list[bytes | Span] = []
    moved: list[Moved] = []
    end = 0
    for record in old.records.values():
        at, size, crc = archive.payload(record.name), record.size, record.crc
        content: bytes | Span = Span(file, at, at + size)
        if record.name == PICKLE:
            content, size, crc = pickle, len(pickle), zlib.crc32(pickle)
        elif record.name == VERSION:
            content, size, crc = b"0", 1, zlib.crc32(b"0")
        elif (cut := used.get(record.name.removeprefix("data/"))) is not None:
            first, last = at + cut.start * cut.item, at + cut.end * cut.item
            content, size = Span(file, first, last), last - first
            crc = _crc(archive, first, last) if crc else 0
        header = local_header(old.folder, record.name, crc, size, end)
        pieces += (header, content)
        moved.append(Moved(record, end, size, crc))
        end += len(header) + size
    entries = directory(old, moved)
    wide, tail = end_records(len(old.records), len(entries), end)
    return Content((*pieces, entries + wide + tail))


def _used(archive: Archive) -> dict[str, Used]:
    """By storage, what tensors use of it, where that is less than all."""
    hulls: dict[str, Used] = {}
    wholes: dict[str, int] = {}
    for _, tensor in tensors(archive.tree()):
        archive.storage(tensor)
        item = ITEM_BYTES[tensor.dtype]
        wholes[tensor.storage] = tensor.storage_numel
        parts = ranges(tensor)
        first = parts[0][0] // item if parts else tensor.offset
        last = parts[-1][1] // item if parts else tensor.offset
        seen = hulls.get(tensor.storage, Used(first, last, item))
        hulls[tensor.storage] = Used(min(seen.start, first), max(seen.end, last), item)
    return {key: hull for key, hull in hulls.items() if hull.end - hull.start < wholes[key]}


def _retold(scanned: Scan, used: dict[str, Used]) -> bytes:
    """The pickle with the new offsets of the tensors and sizes of the storages."""
    splices: dict[int, Splice] = {}
    for value, parts in scanned.parts.items():
        if scanned.data[value] != opcodes.REDUCE or _name(scanned, parts[0]) != REBUILD:
            continue
        arguments = scanned.parts[scanned.made(parts[1])][1:]
        storage = scanned.made(arguments[0])
        about = scanned.made(scanned.parts[storage][0])
        key = scalar(scanned, scanned.parts[about][3])
        cut = used.get(key) if isinstance(key, str) else None
        if cut is None:
            continue
        offset = _number(scanned, arguments[1])
        start, end = arguments[1], scanned.start(arguments[2])
        splices[start] = Splice(start, end, encode(offset - cut.start))
        numel = scanned.parts[about][-1]
        _number(scanned, numel)
        splices[numel] = Splice(numel, about, encode(cut.end - cut.start))
    return replaced(scanned, list(splices.values()))


def _number(scanned: Scan, value: int) -> int:
    """An integer that stands where it is used, and nowhere else."""
    number = scalar(scanned, value)
    if not isinstance(number, int) or value in scanned.alias:
        raise scanned.damaged(value, "a tensor's offset or size is not a plain number")
    return number


def _name(scanned: Scan, value: int) -> tuple[str, str] | None:
    at = scanned.made(value)
    if scanned.data[at] == opcodes.GLOBAL:
        module, name = scanned.data[at + 1 :].split(b"\n", 2)[:2]
        return module.decode("utf-8", "replace"), name.decode("utf-8", "replace")
    parts = [scalar(scanned, part) for part in scanned.parts.get(at, ())]
    return (str(parts[0]), str(parts[1])) if len(parts) == 2 else None


def _crc(archive: Archive, start: int, end: int) -> int:
    crc = 0
    for part in _chunks(archive, start, end):
        crc = zlib.crc32(part, crc)
    return crc


def _chunks(archive: Archive, start: int, end: int) -> Iterator[bytes]:
    for at in range(start, end, CHUNK):
        yield archive.read_at(at, min(CHUNK, end - at))
