"""The central directory of a zip archive as torch writes it, read from the file's last bytes.

Accepted is what torch, Python's zipfile and unzip read in the same way: an end record without a
comment as the last 22 bytes, the directory right before it, records that do not overlap. The native
module `_shards` reads a directory of plain records; what it refuses is always judged here.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

from ckptsurgeon.errors import DamagedFile, count
from ckptsurgeon.files import native
from ckptsurgeon.files.collector import collector_paused
from ckptsurgeon.files.pickles.tree import Tensor
from ckptsurgeon.plans.frozen import frozen

Read = Callable[[int, int], bytes]
"""The bytes from an offset, of a length."""

LOCAL = struct.Struct("<4sHHHHHIIIHH")
ENTRY = struct.Struct("<4sHHHHHHIIIHHHHHII")
END = struct.Struct("<4sHHHHIIH")
END_64 = struct.Struct("<4sQHHIIQQQQ")
LOCATOR_64 = struct.Struct("<4sIQI")

MAX_DIRECTORY = 256 << 20
"""Bytes of the largest central directory: a record takes about 60."""
FULL_16, FULL_32 = 0xFFFF, 0xFFFFFFFF
STORED = 0
ENCRYPTED = 0x2041
DESCRIPTOR = 0x0008
"""Flag: CRC and sizes come after the payload, the local header has zeros."""


class Record(NamedTuple):
    """One file of the archive. `offset` is that of its local header, `entry` is where its entry
    stands in the central directory, `packed` its bytes in the file; `name` has no folder."""

    name: str
    offset: int
    size: int
    crc: int
    method: int
    flags: int
    packed: int
    entry: int


UNKNOWN = (1 << 64) - 1
"""In place of the size and the CRC of a record that is not there."""


class Records(Mapping[str, Record]):
    """The records in a directory of the native module, each made when it is asked for."""

    def __init__(self, native: Any) -> None:
        self._native = native

    def __getitem__(self, name: str) -> Record:
        fields = self._native.find(name) if name.isascii() else None
        if fields is None:
            raise KeyError(name)
        offset, size, crc, flags, entry = fields
        return Record(name, offset, size, crc, STORED, flags, size, entry)

    def __iter__(self) -> Iterator[str]:
        return iter(self._native.names())

    def __len__(self) -> int:
        return len(self._native)

    def sums(self, tensors: Sequence[Tensor]) -> tuple[list[int], list[int]]:
        """The sizes and the CRCs of the records that have the elements of each; UNKNOWN where
        there is none."""
        sums = memoryview(self._native.sums([*tensors])).cast("Q")
        return sums[::2].tolist(), sums[1::2].tolist()

    def blanks(
        self, names: list[str], sizes: list[int], crcs: list[int], start: int, hole: int
    ) -> tuple[bytes, list[tuple[int, int]], list[int], int] | None:
        """New records of zeros from `start` on: the bytes that are written, the [start, end) that
        they go to, where each record begins, and where the last one ends. Zeros of at least `hole`
        bytes are between the spans. None where only `zip_tail` can tell."""
        made: tuple[bytes, list[tuple[int, int]], list[int], int] | None
        made = self._native.blanks(names, sizes, crcs, start, hole)
        return made

    def redirected(
        self, names: list[str], offsets: list[int], sizes: list[int], crcs: list[int]
    ) -> bytes | None:
        """The directory with these records in new places. None where only `zip_tail` can tell."""
        data: bytes | None = self._native.redirected(names, offsets, sizes, crcs)
        return data

    def elements(self, file: int, names: list[str], widths: list[int]) -> list[bytes | None]:
        """The bytes of short records of the open `file`, with the checks of `payload`; None where
        only that can tell, or where a record has another size."""
        data: list[bytes | None] = self._native.elements(file, names, widths)
        return data


@frozen
class Directory:
    """All records by name, and the bytes of the central directory, which starts at `offset`."""

    folder: str
    records: Mapping[str, Record]
    data: bytes
    offset: int


def read_directory(path: str, size: int, read: Read) -> Directory:
    """The directory of the archive of `size` bytes. Raises DamagedFile."""
    end = size - END.size
    if end < 0 or read(end, 4) != b"PK\5\6":
        raise DamagedFile(
            path, max(end, 0), "no zip end record in the last 22 bytes: the file is cut short"
        )
    _, disk, first_disk, here, number, length, offset, comment = END.unpack(read(end, END.size))
    if disk or first_disk or here != number or comment:
        raise DamagedFile(path, end, "the zip end record has a comment or names other disks")
    if end >= LOCATOR_64.size and read(end - LOCATOR_64.size, 4) == b"PK\6\7":
        end, wide = _end_64(path, end, read)
        for short, full, value in zip(
            (number, length, offset), (FULL_16, FULL_32, FULL_32), wide, strict=True
        ):
            if short not in (value, full):
                raise DamagedFile(path, end, "the two zip end records disagree")
        number, length, offset = wide
    if offset + length != end or length < number * ENTRY.size:
        raise DamagedFile(
            path,
            end,
            f"a central directory of {count(length, 'byte')} at {offset} does not end here",
        )
    if length > MAX_DIRECTORY:
        raise DamagedFile(path, offset, f"the central directory has {count(length, 'byte')}")
    data = read(offset, length)
    fast = native.shards and native.shards.directory(data, number, offset)
    if fast is not None:
        return Directory(fast.folder, Records(fast), data, offset)
    with collector_paused():
        folder, entries, plain = _entries(path, data, offset, number)
        _check_extents(path, entries, offset)
        if not plain:
            _refuse_packed(path, entries)
        records = {record.name: record for record in entries}
        names = "\0".join(records)
        whole = f"{folder}/{names}"
        if whole[0] == "/" or "\\" in whole or ".." in whole:
            _refuse_climbing(path, folder, entries, offset)
        lower = names.lower()
        # torch bisects names, as C strings and without regard to case: which of two that look the
        # same it finds is chance.
        alone = len(records) == number and names.count("\0") == number - 1
        if not alone or (lower != names and len(set(lower.split("\0"))) != number):
            raise DamagedFile(path, offset, "two records have the same name")
    return Directory(folder, records, data, offset)


def _refuse_packed(path: str, entries: list[Record]) -> None:
    for record in entries:
        if record.method != STORED or record.packed != record.size:
            raise DamagedFile(path, record.offset, f"the record {record.name!r} is compressed")
        if record.flags & ENCRYPTED:
            raise DamagedFile(path, record.offset, f"the record {record.name!r} is encrypted")


def _refuse_climbing(path: str, folder: str, entries: list[Record], base: int) -> None:
    """Nothing is extracted here, but other tools do that with the same file."""
    for record in entries:
        name = f"{folder}/{record.name}"
        if name[0] == "/" or "\\" in name or (".." in name and ".." in name.split("/")):
            raise DamagedFile(path, base + record.entry, f"the record {name!r} leaves its folder")


def _end_64(path: str, end: int, read: Read) -> tuple[int, tuple[int, int, int]]:
    """The offset of the zip64 end record, and its count, length and offset of the directory."""
    _, disk, start, disks = LOCATOR_64.unpack(read(end - LOCATOR_64.size, LOCATOR_64.size))
    if disk or disks > 1 or start + END_64.size != end - LOCATOR_64.size:
        raise DamagedFile(path, end - LOCATOR_64.size, "the zip64 locator points elsewhere")
    fields = END_64.unpack(read(start, END_64.size))
    signature, rest, _, _, disk, first_disk, here, number, length, offset = fields
    if signature != b"PK\6\6" or rest != END_64.size - 12 or disk or first_disk or here != number:
        raise DamagedFile(path, start, "no zip64 end record where the locator points")
    return start, (number, length, offset)


def _entries(path: str, data: bytes, base: int, number: int) -> tuple[str, list[Record], bool]:
    """The folder of entry 0, in which torch looks for all records, the entries in their order, and
    whether all are stored as they are."""
    out: list[Record] = []
    prefix, plain = b"", True
    at = 0
    while len(out) < number:
        if at + ENTRY.size > len(data):
            raise DamagedFile(
                path, base + at, f"the directory ends after {count(len(out), 'entry', 'entries')}"
            )
        fields = ENTRY.unpack_from(data, at)
        signature, _, _, flags, method, _, _, crc, packed, size = fields[:10]
        name, extra, comment, disk, _, _, offset = fields[10:]
        start = at + ENTRY.size
        text = data[start : start + name]
        if not out:
            prefix = text[: text.find(b"/") + 1]
        if disk or not prefix:
            raise DamagedFile(path, base + at, "an entry names no folder, or another disk")
        if not text.startswith(prefix):
            raise DamagedFile(path, base + at, f"the record {text!r} is not where torch looks")
        end = start + name + extra + comment
        if signature != b"PK\1\2" or end > len(data):
            raise DamagedFile(path, base + at, "no entry of the central directory starts here")
        if packed == FULL_32 or size == FULL_32 or offset == FULL_32:
            more = data[start + name : start + name + extra]
            size, packed, offset = _wide(path, base + at, more, size, packed, offset)
        label = text[len(prefix) :].decode("utf-8", "surrogateescape")
        plain = plain and method == STORED and packed == size and not flags & ENCRYPTED
        out.append(Record(label, offset, size, crc, method, flags, packed, at))
        at = end
    if at != len(data):
        raise DamagedFile(
            path, base + at, f"the last entry is followed by {count(len(data) - at, 'byte')}"
        )
    return prefix[:-1].decode("utf-8", "surrogateescape"), out, plain


def _wide(
    path: str, at: int, extra: bytes, size: int, packed: int, offset: int
) -> tuple[int, int, int]:
    """Size, packed size and offset, those that do not fit in 32 bits from the zip64 field."""
    values = [size, packed, offset]
    position = 0
    while position + 4 <= len(extra):
        kind, length = struct.unpack_from("<HH", extra, position)
        field = extra[position + 4 : position + 4 + length]
        position += 4 + length
        if kind != 1:
            continue
        for i, value in enumerate(values):
            if value == FULL_32:
                if len(field) < 8:
                    break
                values[i], field = int.from_bytes(field[:8], "little"), field[8:]
    if FULL_32 in values:
        raise DamagedFile(path, at, "an entry lacks its zip64 sizes")
    return values[0], values[1], values[2]


def _check_extents(path: str, entries: list[Record], end: int) -> None:
    """No record reaches into the next one or into the directory, by the least that its local
    header takes; `payload` knows the exact bounds."""
    starts = [record.offset for record in entries]
    if starts == sorted(starts):  # nearly always
        entries = entries[::-1]
    else:
        entries = sorted(entries, key=attrgetter("offset"), reverse=True)
    after = end
    for record in entries:
        if record.offset + LOCAL.size + len(record.name) + record.packed > after:
            its = count(record.packed, "byte")
            what = f"the record {record.name!r} of {its} ends after byte {after}"
            raise DamagedFile(path, record.offset, what)
        after = record.offset


def payload(path: str, directory: Directory, record: Record, read: Read) -> int:
    """Where the bytes of a stored record start. Its local header must say what its entry says:
    torch believes the one, unzip the other. Raises DamagedFile."""
    name = f"{directory.folder}/{record.name}".encode("utf-8", "surrogateescape")
    room = directory.offset - record.offset
    head = read(record.offset, min(LOCAL.size + len(name), room))
    if len(head) < LOCAL.size + len(name) or head[:4] != b"PK\3\4":
        raise DamagedFile(path, record.offset, f"no local header of {record.name!r} here")
    _, _, flags, method, _, _, crc, packed, size, length, extra = LOCAL.unpack_from(head)
    known = (crc, packed, size) == (
        record.crc,
        min(record.packed, FULL_32),
        min(record.size, FULL_32),
    )
    later = flags & DESCRIPTOR and not crc and {packed, size} <= {0, FULL_32}
    same = length == len(name) and head[LOCAL.size :] == name and flags == record.flags
    if not (same and method == record.method and (known or later)):
        raise DamagedFile(path, record.offset, f"local header and entry of {record.name!r} differ")
    if method != STORED or record.packed != record.size:
        raise DamagedFile(path, record.offset, f"the record {record.name!r} is compressed")
    if flags & ENCRYPTED:
        raise DamagedFile(path, record.offset, f"the record {record.name!r} is encrypted")
    start = LOCAL.size + int(length) + int(extra)
    if start + record.size > room:
        raise DamagedFile(path, record.offset, f"the record {record.name!r} has no room")
    return record.offset + start
