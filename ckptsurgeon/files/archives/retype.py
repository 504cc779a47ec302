"""A torch file in which some tensors have numbers of another dtype, computed when they are written.

Offsets, sizes and strides count elements, so they stay: a storage becomes one of the new dtype with
as many elements, in a record of its own length. The file is written anew, record after record.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.files.archives.archive import PICKLE, Archive
from ckptsurgeon.files.archives.compact import VERSION
from ckptsurgeon.files.archives.rewrite import ENTRY_CRC, LOCAL_CRC
from ckptsurgeon.files.archives.storage_edit import TensorEdit, contiguous, one_by_one
from ckptsurgeon.files.archives.zip_tail import Moved, directory_parts, end_records, local_header
from ckptsurgeon.files.dtypes import ITEM_BYTES, STORAGES
from ckptsurgeon.files.pickles import opcodes
from ckptsurgeon.files.pickles.scan import Scan, scan
from ckptsurgeon.files.pickles.sharing import Cut, cut
from ckptsurgeon.files.pickles.splice import replaced
from ckptsurgeon.files.pickles.tree import tensors
from ckptsurgeon.files.pickles.values import scalar
from ckptsurgeon.plans.edits import Checksum, Computed, Content, Hole, Piece, Span

CLASSES = {dtype: name for name, dtype in STORAGES.items() if name != "UntypedStorage"}
"""dtype → the class that torch saves its storages under."""


def changes_dtype(tensor_edit: TensorEdit) -> bool:
    """Whether a tensor is to hold numbers of another dtype than it does."""
    new = tensor_edit.number
    return isinstance(new, Computed) and any(t.dtype != new.dtype for t in tensor_edit.tensors)


@dataclass
class _Storage:
    """One storage as it will be: what is computed, by its first byte."""

    dtype: str
    numel: int
    numbers: dict[int, Computed] = field(default_factory=dict)

    @property
    def size(self) -> int:
        return self.numel * ITEM_BYTES[self.dtype]

    def pieces(self) -> Iterator[Piece]:
        """All its bytes; elements that no tensor has are zeros."""
        position = 0
        for start, number in sorted(self.numbers.items()):
            if start > position:
                yield Hole(start - position)
            yield number
            position = start + number.size
        if position < self.size:
            yield Hole(self.size - position)


def render(archive: Archive, file: str, data: bytes, tensor_edits: Sequence[TensorEdit]) -> Content:
    """The content of the file with `data` as its pickle, in which these tensors get new dtypes.

    Raises SurgeryError for a file of the legacy format, a tensor that is scattered over its
    storage, and one that shares it with a tensor that keeps its dtype."""
    old = archive.directory
    if old is None:
        raise SurgeryError(
            f"{file} is of torch's legacy format, whose storages can't change their dtype",
            next="torch.save(torch.load(FILE), FILE)    writes it in today's format",
        )
    storages = _storages(archive, file, tensor_edits)
    start = archive.payload(PICKLE)
    scanned = scan(data, where=str(archive.path), base=start, whole=True)
    data = _retold(scanned, {key: CLASSES[item.dtype] for key, item in storages.items()})
    pieces: list[Piece] = []
    moved: list[Moved] = []
    end = 0
    for record in old.records.values():
        at, size, crc = archive.payload(record.name), record.size, record.crc
        content: list[Piece] = [Span(file, at, at + size)]
        new = storages.get(record.name.removeprefix("data/"))
        if record.name == PICKLE:
            content, size, crc = [data], len(data), zlib.crc32(data)
        elif record.name == VERSION:
            content, size, crc = [b"0"], 1, zlib.crc32(b"0")
        elif new is not None:
            content, size = list(new.pieces()), new.size
        header = local_header(old.folder, record.name, crc, size, end)
        if new is not None:
            check = Checksum(len(header) - LOCAL_CRC, size)
            pieces += (header[:LOCAL_CRC], check, header[LOCAL_CRC + 4 :])
        else:
            pieces.append(header)
        pieces += content
        moved.append(Moved(record, end, size, crc))
        end += len(header) + size
    begin = end
    for entry, item in directory_parts(old, moved):
        if item is not None and item.record.name.removeprefix("data/") in storages:
            header = local_header(old.folder, item.record.name, item.crc, item.size, item.offset)
            payload = item.offset + len(header)
            check = Checksum(payload - (end + ENTRY_CRC), item.size)
            pieces += (entry[:ENTRY_CRC], check, entry[ENTRY_CRC + 4 :])
        else:
            pieces.append(entry)
        end += len(entry)
    wide, tail = end_records(len(old.records), end - begin, begin)
    return Content((*pieces, wide + tail))


def _storages(
    archive: Archive, file: str, tensor_edits: Sequence[TensorEdit]
) -> dict[str, _Storage]:
    out: dict[str, _Storage] = {}
    for tensor, number, elements in one_by_one(tensor_edits):
        assert isinstance(number, Computed)
        new = out.setdefault(tensor.storage, _Storage(number.dtype, tensor.storage_numel))
        whole = elements in (None, (0, tensor.numel))
        first = tensor.offset * ITEM_BYTES[number.dtype]
        known = new.numbers.setdefault(first, number)
        if new.dtype != number.dtype or known != number or not whole or not contiguous(tensor):
            raise SurgeryError(
                f"{file}: {number.label or number.rule}: a tensor is scattered over its storage, "
                "or only a part of it would change its dtype",
                next="save the checkpoint again with tensors that are contiguous",
            )
    chosen = {id(tensor) for tensor_edit in tensor_edits for tensor in tensor_edit.tensors}
    for path, tensor in tensors(archive.tree()):
        if tensor.storage in out and id(tensor) not in chosen and tensor.numel:
            raise SurgeryError(
                f"{file}: the tensor {path!r} shares its storage with one that gets another dtype",
                next="save the checkpoint again with tensors that share no storage",
            )
    return out


def _retold(scanned: Scan, classes: Mapping[str, str]) -> bytes:
    """The pickle with the new class of each storage, wherever it is named."""
    cuts: list[Cut] = []
    for value, parts in scanned.parts.items():
        if scanned.data[value] != opcodes.BINPERSID:
            continue
        about = scanned.parts[scanned.made(parts[0])]
        key = scalar(scanned, about[3])
        name = classes.get(key) if isinstance(key, str) else None
        if name is None:
            continue
        old = about[2]
        span = (scanned.start(old), scanned.start(about[3]))
        cuts.append(Cut((span,), f"ctorch\n{name}\n".encode()))
    return replaced(scanned, cut(scanned, cuts))
