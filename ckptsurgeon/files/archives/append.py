"""Renders the changes of one torch file to one edit of its bytes.

`Append`: new records after the last byte, then a new directory; every old byte stays. `Content`: a
new file with the old bytes in their old places, for a file that must not or can't grow in place.
"""

from __future__ import annotations

import os
import pickle
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ckptsurgeon.errors import DEFECT, SurgeryError
from ckptsurgeon.files.archives import retype, rewrite
from ckptsurgeon.files.archives.archive import PICKLE, Archive
from ckptsurgeon.files.archives.storage_edit import StorageEdit, TensorEdit, blanks, storage_edits
from ckptsurgeon.files.archives.zip_directory import Directory, Records
from ckptsurgeon.files.archives.zip_tail import Columns, end_records, local_header, redirected
from ckptsurgeon.files.collector import collector_paused
from ckptsurgeon.files.dtypes import ITEM_BYTES
from ckptsurgeon.files.pickles.splice import Steps, splice
from ckptsurgeon.files.pickles.tree import Tensor, get_each
from ckptsurgeon.plans.edits import (
    ABSENT,
    ZEROS,
    Append,
    Change,
    Computed,
    Content,
    Elements,
    Fill,
    Renamed,
    Value,
)
from ckptsurgeon.transaction import crc32

FIRST_GAP = 128 << 10
"""Bytes between the old end and the first new record. Readers look for the end record in the last
65,557 bytes and in the blocks those are in (torch: 4 KiB; unzip: 66,000 in blocks of 8 KiB), so
from the moment the file has grown until the new end record is there, none finds the old one."""
LARGEST_COPY = 4 << 20
"""Bytes of a storage that an Append writes again because its neighbours change."""
SMALLEST_HOLE = 4096
"""Zeros shorter than a block of the file system are written."""

__all__ = ["Archive", "render"]


def render(
    source: Path | Archive, file: str, changes: Sequence[Change], *, strict: bool = False
) -> Append | Content:
    """One edit that makes all `changes` to the torch file `source`, called `file` in the edit.

    A value of data.pkl is set by `splice`; a tensor becomes `ZEROS`, `Elements` or `Computed`,
    one of bytes a `Fill` (as many bytes are written), one of one element a number of its dtype,
    and any may make way for None. A key whose `old` is `ABSENT` is inserted, one whose `new` is
    goes, and a `Renamed` one keeps its value. The result is `Content` if the file has other links,
    is a symbolic link, may not be written, is of the legacy format, if too much of a shared storage
    stays, if bytes are yet to be computed, or if `strict`:
    storages then stay where they are, for readers that compute where they must be. A tensor whose
    `Computed` numbers are of another dtype gets that one, in a file written anew.
    Raises DamagedFile, or SurgeryError if a path leads nowhere or a tensor can't be changed alone.
    """
    with collector_paused():
        archive = source if isinstance(source, Archive) else Archive.open(source)
        with archive.reading():
            return _render(archive, file, changes, strict)


def _render(
    archive: Archive, file: str, changes: Sequence[Change], strict: bool
) -> Append | Content:
    scanned = archive.scan()
    archive.tree(scanned)
    gone = [path for c in changes if c.new == ABSENT for path in c.paths()]
    renamed = {p: c.new.key for c in changes if isinstance(c.new, Renamed) for p in c.paths()}
    rest = [c for c in changes if c.new != ABSENT and not isinstance(c.new, Renamed)]
    values, tensors = _sorted(archive, file, rest)
    data: bytes | None = None
    if values or gone or renamed:
        try:
            whole = () in values  # the file is one number
            data = (
                pickle.dumps(values[()], 2)
                if whole
                else splice(scanned.data, values, delete=gone, rename=renamed, scanned=scanned)
            )
        except KeyError as missing:
            raise SurgeryError(f"{file}: {missing} can't be set", next=DEFECT) from None
    computed = any(isinstance(change.new, Computed) for change in rest)
    if computed and any(map(retype.changes_dtype, tensors)):
        return retype.render(archive, file, data or scanned.data, tensors)
    tree, old = archive.tree(), archive.directory
    zeros, others = ({}, tensors) if old is None or strict else blanks(tree, tensors)
    storages = storage_edits(tree, others)
    if old is not None and not strict and _can_grow(archive, storages):
        return _append(archive, old, file, data, zeros, storages)
    storages = storage_edits(tree, tensors) if zeros else storages
    return rewrite.render(archive, file, data, storages)


def _sorted(
    archive: Archive, file: str, changes: Sequence[Change]
) -> tuple[dict[Steps, Value], list[TensorEdit]]:
    """Changes of values of the pickle, and changes of tensors."""
    values: dict[Steps, Value] = {}
    tensors: list[TensorEdit] = []
    for change in changes:
        found = _found(archive.tree(), file, change)
        kinds = {*map(type, found)}
        if change.new is not None and kinds == {Tensor}:
            archive.check_storages(found)
            tensors += _wishes(archive, file, change, found)
        elif change.new is not None and Tensor in kinds:
            apart = _sorted(archive, file, change.single())
            values |= apart[0]
            tensors += apart[1]
        elif isinstance(change.new, (Fill, Elements, Computed)) or (
            change.new == ZEROS and not all(isinstance(value, str) for value in found)
        ):
            raise SurgeryError(
                f"{file}: {change.path!r} is not a tensor, so it has no zeros", next=DEFECT
            )
        elif not isinstance(change.new, Renamed):
            values[change.path] = change.new
    return values, tensors


def _wishes(
    archive: Archive, file: str, change: Change, tensors: Sequence[Tensor]
) -> Iterable[TensorEdit]:
    new = change.new
    if new == ZEROS:
        return [TensorEdit(tensors, None, change.elements)]
    if isinstance(new, Elements):
        return [_of_bytes(file, change, new, tensor) for tensor in tensors]
    if isinstance(new, Computed):
        return [_computed(archive, file, change, new, tensor) for tensor in tensors]
    if isinstance(new, Fill) and all(ITEM_BYTES[tensor.dtype] == 1 for tensor in tensors):
        return [TensorEdit(tensors, bytes([new.byte]))]
    if isinstance(new, (int, float)) and all(tensor.numel == 1 for tensor in tensors):
        alike: dict[str, list[Tensor]] = {}
        for tensor in tensors:
            alike.setdefault(tensor.dtype, []).append(tensor)
        return [TensorEdit(mine, archive.encode(dtype, new)) for dtype, mine in alike.items()]
    raise SurgeryError(f"{file}: the tensor {change.path!r} can't become {new!r}", next=DEFECT)


def _of_bytes(file: str, change: Change, new: Elements, tensor: Tensor) -> TensorEdit:
    start, end = change.elements or (0, tensor.numel)
    if len(new.data) != (end - start) * ITEM_BYTES[tensor.dtype]:
        raise SurgeryError(f"{file}: {change.path!r} takes another number of bytes", next=DEFECT)
    return TensorEdit([tensor], new.data, change.elements)


def _computed(
    archive: Archive, file: str, change: Change, new: Computed, tensor: Tensor
) -> TensorEdit:
    """What is computed is little-endian and in the order of the tensor's shape."""
    start, end = change.elements or (0, tensor.numel)
    size = (end - start) * ITEM_BYTES[new.dtype]
    if new.size != size or archive.byte_order() != "<":
        raise SurgeryError(
            f"{file}: {change.path!r} takes other numbers than were computed", next=DEFECT
        )
    return TensorEdit([tensor], new, (start, end))


def _found(tree: Any, file: str, change: Change) -> list[Any]:
    try:
        return get_each(tree, change.path)
    except KeyError:
        if change.old == ABSENT:
            return [None] * change.places
        raise SurgeryError(f"{file}: there is no {change.path!r}", next=DEFECT) from None


def _can_grow(archive: Archive, storages: dict[str, StorageEdit]) -> bool:
    status = archive.status
    alone = status.st_nlink == 1 and not archive.is_link
    # access(2) asks a server. The owner's rights are known, and a mount that is read-only refuses
    # the surgery before it writes.
    mine = status.st_uid == os.geteuid()
    return (
        alone
        and bool(status.st_mode & 0o200)
        and (mine or os.access(archive.path, os.W_OK))
        and all(
            edit.unchanged_bytes <= LARGEST_COPY and not edit.computed for edit in storages.values()
        )
    )


def _append(
    archive: Archive,
    old: Directory,
    file: str,
    data: bytes | None,
    zeros: dict[str, int],
    storages: dict[str, StorageEdit],
) -> Append:
    tail = _Tail(old, archive.size + FIRST_GAP)
    if data is not None:
        tail.record(PICKLE, [(len(data), data)])
    if (zeros or storages) and ".format_version" in old.records:
        # Version 1 promises storages in the order and places of torch.save, and with
        # calculate_storage_offsets torch then reads where they would be.
        tail.record(".format_version", [(1, b"0")])
    tail.blanks({f"data/{key}": size for key, size in zeros.items()})
    for key, edit in storages.items():
        tail.record(f"data/{key}", _pieces(archive, key, edit))
    tail.finish()
    spans = tuple(tail.spans)
    return Append(file, archive.size, b"".join(tail.data), spans, archive.status.st_mtime_ns)


def _pieces(archive: Archive, key: str, edit: StorageEdit) -> list[tuple[int, bytes | None]]:
    """The whole storage as (length, bytes), where None is zeros."""
    if not edit.unchanged_bytes and not edit.numbers:
        return [(edit.size, None)]
    out: list[tuple[int, bytes | None]] = []
    for start, end, new, unchanged in edit.pieces():
        assert not isinstance(new, Computed)  # by `_can_grow`
        if unchanged:
            new = archive.read_at(archive.payload(f"data/{key}") + start, end - start)
        out.append((end - start, new))
    return out


class _Tail:
    """What comes after the old end: writes in ascending order, and holes between them."""

    def __init__(self, old: Directory, start: int) -> None:
        self.old = old
        self.end = start
        self.moved = Columns([], [], [], [])
        self.data: list[bytes] = []
        self.spans: list[tuple[int, int]] = []

    def record(self, name: str, pieces: Sequence[tuple[int, bytes | None]]) -> None:
        crc = size = 0
        for length, data in pieces:
            of_piece = crc32.of_zeros(length) if data is None else zlib.crc32(data)
            crc = crc32.joined(crc, of_piece, length) if size else of_piece
            size += length
        self.moved.add(name, self.end, size, crc)
        self._put(local_header(self.old.folder, name, crc, size, self.end))
        for length, data in pieces:
            if data is not None or length < SMALLEST_HOLE:
                self._put(data or bytes(length))
            else:
                self.end += length

    def blanks(self, sizes: dict[str, int]) -> None:
        """A record of zeros for each name, as `record` makes them one by one."""
        crcs = [crc32.of_zeros(size) for size in sizes.values()]
        columns = (list(sizes), list(sizes.values()), crcs)
        made = None
        if isinstance(self.old.records, Records):
            made = self.old.records.blanks(*columns, self.end, SMALLEST_HOLE)
        if made is None or not sizes:
            for name, size in sizes.items():
                self.record(name, [(size, None)])
            return
        data, spans, offsets, end = made
        if self.spans and self.spans[-1][1] == spans[0][0]:
            spans[0] = (self.spans.pop()[0], spans[0][1])
        self.data.append(data)
        self.spans += spans
        self.end = end
        self.moved.extend(columns[0], offsets, columns[1], crcs)

    def finish(self) -> None:
        """The directory, and last the end record, in a span of its own."""
        entries, start = redirected(self.old, self.moved), self.end
        wide, end = end_records(len(self.old.records), len(entries), start)
        self._put(entries + wide)
        self.data.append(end)
        self.spans.append((self.end, self.end + len(end)))

    def _put(self, data: bytes) -> None:
        start, self.end = self.end, self.end + len(data)
        self.data.append(data)
        if self.spans and self.spans[-1][1] == start:
            start = self.spans.pop()[0]
        self.spans.append((start, self.end))
