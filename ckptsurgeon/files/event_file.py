"""TensorBoard event files: record frames, an index of the events, and tags under other names.

A file is a row of records: u64 length, masked CRC-32C of it, payload (an Event message), masked
CRC-32C of the payload. There is no header and no trailer, so every record border is a legal cut.
"""

from __future__ import annotations

import mmap
import os
import struct
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ckptsurgeon.errors import DamagedFile
from ckptsurgeon.files import event_message
from ckptsurgeon.files.crc32c import masked

FRAME = 16
"""Bytes of a record beside its payload."""
LARGEST = 64 << 20
"""Bytes of the largest payload that is believed."""
DROPPED = 255
"""`Index.kinds` of bytes that are no record: what salvage leaves out."""

_HEADER = struct.Struct("<QI")
_CHECK = struct.Struct("<I")
_NEXT = (
    "ckptsurgeon truncate-tb-events --salvage …    leave out just that record",
    "restore the file from a copy",
)

Bytes = bytes | mmap.mmap


@dataclass(frozen=True)
class Index:
    """Where each record of one file is, and what it says.

    Record i is the bytes [offsets[i], offsets[i + 1]), the last one ends at `end`. `tags[i]` is an
    index into `names`, or -1 for an event without values; an event may carry several values, so an
    entry of `names` is a tuple of tags. `kinds[i]` is the field number of what the event holds
    (3 file_version, 5 summary, 7 session_log, …; 0 nothing). Bytes from `end` to `size` are a torn
    tail: an unfinished last record."""

    path: Path
    size: int
    mtime_ns: int
    end: int
    offsets: array[int]
    steps: array[int]
    walls: array[float]
    tags: array[int]
    kinds: array[int]
    names: tuple[tuple[str, ...], ...]

    def __len__(self) -> int:
        return len(self.offsets)

    @property
    def torn(self) -> int:
        """Bytes of the unfinished record at the end."""
        return self.size - self.end

    @property
    def dropped(self) -> list[tuple[int, int]]:
        """Byte ranges that salvage left out."""
        return [self.span(i) for i, kind in enumerate(self.kinds) if kind == DROPPED]

    def span(self, record: int) -> tuple[int, int]:
        """First byte of a record and the byte after its last."""
        after = record + 1
        return self.offsets[record], self.offsets[after] if after < len(self) else self.end


@dataclass
class Renamed:
    """Pieces of the file under its new tags: bytes, and (start, end) of bytes that stay."""

    pieces: list[bytes | tuple[int, int]] = field(default_factory=list)
    counts: dict[tuple[str, str], int] = field(default_factory=dict)
    tags: set[str] = field(default_factory=set)


def files(directory: Path) -> list[Path]:
    """The event files directly in `directory`, in the order in which TensorBoard reads them.

    It takes every file whose name contains `tfevents`, by name, except profiler markers."""
    with os.scandir(directory) as items:
        names = [
            item.name
            for item in items
            if "tfevents" in item.name
            and not item.name.endswith(".profile-empty")
            and item.is_file()
        ]
    return [directory / name for name in sorted(names)]


def frame(payload: bytes) -> bytes:
    """A record that holds `payload`."""
    length = struct.pack("<Q", len(payload))
    return b"".join((length, _CHECK.pack(masked(length)), payload, _CHECK.pack(masked(payload))))


def version_record(wall: float) -> bytes:
    """The first record of every event file. Without it TensorBoard drops points it takes for
    out of order."""
    return frame(event_message.version(wall))


def scan(path: Path, *, salvage: bool = False) -> Index:
    """Read and check every record of `path`, whole file, both checksums.

    Raises DamagedFile with the offset of a bad record that is not the last one. With `salvage` it
    is left out instead: alone when its length can be trusted, else up to the next good record."""
    offsets, steps, walls = array("Q"), array("q"), array("d")
    tags, kinds = array("i"), array("B")
    numbers: dict[tuple[bytes, ...], int] = {}
    single: dict[bytes, int] = {}
    read = event_message.read
    with _Opened(path) as (data, size, mtime_ns):
        records = _Records(str(path), data, size, salvage)
        for offset, payload in records:
            if payload is None:
                wall, step, kind, found = walls[-1] if walls else 0.0, 0, DROPPED, None
            else:
                try:
                    wall, step, kind, found = read(payload)
                except ValueError as error:
                    if not salvage:
                        raise _damaged(str(path), offset, f"not an event: {error}") from None
                    wall, step, kind, found = walls[-1] if walls else 0.0, 0, DROPPED, None
            if found is None:
                number = -1
            elif isinstance(found, bytes):
                number = single.get(found, -1)
                if number < 0:
                    number = single[found] = numbers.setdefault((found,), len(numbers))
            else:
                number = numbers.setdefault(found, len(numbers))
            offsets.append(offset)
            steps.append(step)
            walls.append(wall)
            tags.append(number)
            kinds.append(kind)
        end = records.end
    names = tuple(tuple(event_message.text(tag) for tag in group) for group in numbers)
    return Index(path, size, mtime_ns, end, offsets, steps, walls, tags, kinds, names)


def spans(index: Index, kept: Sequence[int]) -> list[tuple[int, int]]:
    """Byte ranges of the records i with `kept[i]`, neighbours joined. Salvaged bytes never."""
    out: list[tuple[int, int]] = []
    start = -1
    offsets = index.offsets
    for i, keep in enumerate(kept):
        if keep and index.kinds[i] != DROPPED:
            if start < 0:
                start = offsets[i]
        elif start >= 0:
            out.append((start, offsets[i]))
            start = -1
    if start >= 0:
        out.append((start, index.end))
    return out


def payload(path: Path, start: int, end: int) -> bytes:
    """The event message of the record [start, end), which `scan` has checked."""
    with path.open("rb") as file:
        file.seek(start + 12)
        return file.read(end - start - FRAME)


def rename(path: Path, name: Callable[[str], str]) -> Renamed:
    """All tags of `path` through `name`, in one pass and simultaneously; every other byte stays.

    `name` is called once per tag. A torn tail stays as it is. Raises DamagedFile on a bad record.
    """
    out = Renamed()
    renaming = event_message.Renaming(name)
    kept = 0
    fresh: list[bytes] = []
    lengths: dict[int, bytes] = {}

    def flush(until: int) -> None:
        if fresh:
            out.pieces.append(b"".join(fresh))
            fresh.clear()
        if until > kept:
            out.pieces.append((kept, until))

    with _Opened(path) as (data, size, _):
        for offset, message in _Records(str(path), data, size, salvage=False):
            assert message is not None
            try:
                new = renaming(message)
            except ValueError as error:
                raise _damaged(str(path), offset, f"not an event: {error}") from None
            if new is None:
                continue
            if offset > kept:
                flush(offset)
            header = lengths.get(len(new))
            if header is None:
                length = struct.pack("<Q", len(new))
                header = lengths[len(new)] = length + _CHECK.pack(masked(length))
            fresh += (header, new, _CHECK.pack(masked(new)))
            kept = offset + FRAME + len(message)
        flush(size)
    out.counts, out.tags = renaming.counts, renaming.tags
    return out


def last_events(path: Path, window: int = 1 << 18) -> Iterator[tuple[float, int, int, list[str]]]:
    """(wall time, step, kind, tags) of the records in the last `window` bytes of `path`.

    For a quick look: it starts at the first record border it finds there and stops at the first
    bad one, without an error."""
    with _Opened(path) as (data, size, _):
        start = 0 if size <= window else _resync(data, size - window, size)
        records = _Records(str(path), data, size, salvage=True, start=start)
        for _, message in records:
            if message is None:
                return
            try:
                wall, step, kind, found = event_message.read(message)
            except ValueError:
                return
            group = () if found is None else (found,) if isinstance(found, bytes) else found
            yield wall, step, kind, [event_message.text(tag) for tag in group]


# --- frames --------------------------------------------------------------------------------------


class _Opened:
    """The bytes of a file, its size and mtime, for a `with` block. Nothing is locked."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> tuple[Bytes, int, int]:
        with self.path.open("rb") as file:
            status = os.fstat(file.fileno())
            self.data: Bytes = b""
            if status.st_size:
                self.data = mmap.mmap(file.fileno(), status.st_size, access=mmap.ACCESS_READ)
        return self.data, status.st_size, status.st_mtime_ns

    def __exit__(self, *_: object) -> None:
        if isinstance(self.data, mmap.mmap):
            self.data.close()


class _Records:
    """(offset, payload) of each record; payload None for bytes that salvage leaves out.

    `end` is the first byte after the last whole record, once iterated."""

    def __init__(self, path: str, data: Bytes, size: int, salvage: bool, *, start: int = 0) -> None:
        self.path, self.data, self.size, self.salvage = path, data, size, salvage
        self.end = start

    def __iter__(self) -> Iterator[tuple[int, bytes | None]]:
        data, size = self.data, self.size
        headers: set[bytes] = set()
        header, check = _HEADER.unpack, _CHECK.unpack
        at = self.end
        while at < size:
            head = data[at : at + 12]
            if head not in headers:
                problem = _bad_header(head)
                if problem and _unfinished(data, at, size, head):
                    return
                if problem and not self.salvage:
                    raise _damaged(self.path, at, problem)
                if problem:
                    after = _resync(data, at + 1, size)
                    if after == size:
                        return
                    yield at, None
                    self.end = at = after
                    continue
                headers.add(head)
            after = at + FRAME + header(head)[0]
            if after > size:
                return
            message = data[at + 12 : after - 4]
            if masked(message) != check(data[after - 4 : after])[0]:
                if after == size:
                    return
                if not self.salvage:
                    raise _damaged(self.path, at, "the checksum of the record is wrong")
                yield at, None
            else:
                yield at, message
            self.end = at = after


def _damaged(path: str, offset: int, what: str) -> DamagedFile:
    return DamagedFile(path, offset, what, next=_NEXT)


def _bad_header(head: bytes) -> str:
    """Why these 12 bytes are no record header, or the empty string."""
    if len(head) < 12:
        return "the file ends inside a record"
    length, check = _HEADER.unpack(head)
    if masked(head[:8]) != check:
        return "the checksum of the record's length is wrong"
    if length > LARGEST:
        return f"a record of {length} bytes; the largest that is believed has {LARGEST}"
    return ""


def _unfinished(data: Bytes, at: int, size: int, head: bytes) -> bool:
    """Whether a bad header at `at` is a write that was cut off: too few bytes, or only zeros up
    to the end of the file (a crash may leave the length of a file without its data)."""
    if len(head) < 12:
        return True
    return all(not any(data[i : i + 65536]) for i in range(at, size, 65536))


def _resync(data: Bytes, at: int, size: int) -> int:
    """The first offset from `at` on where a whole good record starts, or `size`."""
    while True:
        # The length is below 2**26, so bytes 4 to 7 of a header are zeros.
        zeros = data.find(b"\0\0\0\0", at + 4)
        if zeros < 0 or zeros + 12 > size:
            return size
        at = zeros - 4
        head = data[at : at + 12]
        if not _bad_header(head):
            after = at + FRAME + _HEADER.unpack(head)[0]
            if after <= size:
                message = data[at + 12 : after - 4]
                if masked(message) == _CHECK.unpack(data[after - 4 : after])[0]:
                    return at
        at += 1
