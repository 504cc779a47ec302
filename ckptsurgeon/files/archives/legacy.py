"""The format of `torch.save` before torch 1.6: five pickles, then the bytes of each storage.

Magic number, protocol version, system info, the object, the storage keys; then for each key its
number of elements (8 bytes) and the elements. There are no CRCs, and nothing may follow.
"""

from __future__ import annotations

from typing import Any

from ckptsurgeon.errors import DamagedFile, count
from ckptsurgeon.files.archives.zip_directory import STORED, Read, Record
from ckptsurgeon.files.dtypes import ITEM_BYTES
from ckptsurgeon.files.pickles.reader import read_storages, read_with_globals
from ckptsurgeon.files.pickles.scan import MAX_BYTES, CutShort, Scan, scan

MAGIC = 0x1950A86A20F9469CFC6C
PROTOCOL = 1001
BLOCK = 512
"""Bytes of a tar header."""
WINDOW = 1 << 16
"""Bytes in which the end of a pickle is looked for first; eight times as many next."""


def read_records(path: str, size: int, read_at: Read) -> dict[str, Record]:
    """The object as `data.pkl` and the storages as `data/<key>`: a record's offset is that of its
    first byte. Raises DamagedFile if the file is not of this format, whole, and nothing more."""
    if _is_tar(read_at(0, min(BLOCK, size))):
        raise DamagedFile(path, 0, "torch takes this for a tar archive, the format before this one")
    position = 0
    values: list[Any] = []
    records: dict[str, Record] = {}
    elements: dict[str, int] = {}
    for part in range(5):
        scanned = _scan(path, size, position, read_at)
        if part == 3:
            records["data.pkl"] = _record("data.pkl", position, scanned.stop)
            storages = read_storages(scanned)
            elements = {key: ITEM_BYTES[dtype] for dtype, key, _ in storages}
        else:
            value, globals = read_with_globals(scanned)
            if globals:  # torch loads these four with the plain unpickler, before the object
                raise DamagedFile(path, position, f"a header pickle names {min(globals)}")
            values.append(value)
        position += scanned.stop
        if values[:1] != [MAGIC] or values[1:2] not in ([], [PROTOCOL]):
            raise DamagedFile(path, 0, "this is not a file of torch.save, neither zip nor legacy")
    keys = values[3]
    if not isinstance(keys, list) or sorted(keys) != sorted(elements):
        raise DamagedFile(path, position, "the storage keys are not those of the object")
    for key in keys:
        numel = int.from_bytes(read_at(position, 8), "little")
        length = numel * elements[key]
        if position + 8 + length > size:
            raise DamagedFile(
                path, position, f"the storage {key!r} of {count(length, 'byte')} is cut short"
            )
        records[f"data/{key}"] = _record(f"data/{key}", position + 8, length)
        position += 8 + length
    if position != size:
        raise DamagedFile(
            path, position, f"the last storage is followed by {count(size - position, 'byte')}"
        )
    return records


def _is_tar(block: bytes) -> bool:
    """Whether `torch.load` would unpickle a member of a tar archive instead: it asks `tarfile`
    first, and a pickle can begin with a string that is a tar header."""
    import tarfile

    try:
        tarfile.TarInfo.frombuf(block, tarfile.ENCODING, "surrogateescape")
    except tarfile.TarError:
        return False
    return True


def _record(name: str, offset: int, size: int) -> Record:
    return Record(name, offset, size, crc=0, method=STORED, flags=0, packed=size, entry=0)


def _scan(path: str, size: int, position: int, read_at: Read) -> Scan:
    """The pickle at `position`, whose length only its opcodes tell."""
    window = WINDOW
    while True:
        window = min(window, size - position)
        data = read_at(position, window)
        try:
            return scan(data, where=path, base=position)
        except CutShort:
            if window == size - position or window >= MAX_BYTES:
                raise
            window = min(8 * window, MAX_BYTES)
