"""Record frames of an event file.

A record is u64 length, masked CRC-32C of it, payload, masked CRC-32C of the payload. There is no
header and no trailer, so every record border is a legal cut.
"""

from __future__ import annotations

import mmap
import os
import stat
import struct
from collections.abc import Iterator
from pathlib import Path

from ckptsurgeon.errors import DamagedFile, count
from ckptsurgeon.hints import command
from ckptsurgeon.logs.tensorboard.crc32c import masked, value

OVERHEAD = 16
"""Bytes of a record beside its payload."""
LARGEST = 64 << 20
"""Bytes of the largest payload that is believed."""

Data = bytes | mmap.mmap

_HEADER = struct.Struct("<QI")
_CHECK = struct.Struct("<I")
_ZEROS = bytes(1 << 20)
_NEXT = (
    command("truncate-tb-events", "--salvage", "…", why="leave out just that record"),
    "restore the file from a copy",
)


class Opened:
    """The bytes of a file, its size and mtime, for a `with` block. Nothing is locked."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> tuple[Data, int]:
        descriptor = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise DamagedFile(str(self.path), 0, "this is not a regular file")
            self.data: Data = b""
            if status.st_size:
                self.data = mmap.mmap(descriptor, status.st_size, access=mmap.ACCESS_READ)
        finally:
            os.close(descriptor)
        return self.data, status.st_mtime_ns

    def __exit__(self, *_: object) -> None:
        if isinstance(self.data, mmap.mmap):
            self.data.close()


def frame(payload: bytes) -> bytes:
    """A record that holds `payload`."""
    return header(len(payload)) + payload + check(payload)


def header(length: int) -> bytes:
    """The 12 bytes before a payload of this length."""
    data = length.to_bytes(8, "little")
    return data + _CHECK.pack(masked(data))


def check(payload: bytes) -> bytes:
    """The 4 bytes after a payload."""
    return _CHECK.pack(masked(payload))


class Records:
    """(offset, payload) of each record from `start` on; payload None for bytes that salvage leaves
    out: one record when its length can be trusted, else all up to the next good one.

    `end` is the first byte after the last whole record, once iterated: what follows is a torn tail.
    Raises DamagedFile with the offset of a bad record, when it is not the last one."""

    def __init__(self, path: Path, data: Data, salvage: bool, start: int = 0) -> None:
        self.path, self.data, self.salvage = path, data, salvage
        self.end = start

    def __iter__(self) -> Iterator[tuple[int, bytes | None]]:
        data, size = self.data, len(self.data)
        headers: set[bytes] = set()
        unpack_header, unpack_check = _HEADER.unpack, _CHECK.unpack
        at = self.end
        while at < size:
            head = data[at : at + 12]
            if head not in headers:
                problem = _bad_header(head)
                if problem and _unfinished(data, at, head):
                    return
                if problem and not self.salvage:
                    raise damaged(self.path, at, problem)
                if problem:
                    after = first_good(data, at + 1)
                    if after == size:
                        return
                    yield at, None
                    self.end = at = after
                    continue
                headers.add(head)
            after = at + OVERHEAD + unpack_header(head)[0]
            if after > size:
                return
            message = data[at + 12 : after - 4]
            crc = value(message)
            actual = (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF
            if actual != unpack_check(data[after - 4 : after])[0]:
                if after == size:
                    return
                if not self.salvage:
                    raise damaged(self.path, at, "the checksum of the record is wrong")
                yield at, None
            else:
                yield at, message
            self.end = at = after


def damaged(path: Path, offset: int, what: str) -> DamagedFile:
    """The error for a bad record at `offset`."""
    return DamagedFile(str(path), offset, what, next=_NEXT)


def first_good(data: Data, at: int) -> int:
    """The first offset from `at` on where a whole good record starts, or the size."""
    size = len(data)
    while True:
        # The length is below 2**26, so bytes 4 to 7 of a header are zeros.
        zeros = data.find(b"\0\0\0\0", at + 4)
        if zeros < 0 or zeros + 8 > size:
            return size
        at = zeros - 4
        head = data[at : at + 12]
        if not any(head):  # 12 zeros are no header: nor is what begins among more of them
            at = max(at + 1, past_zeros(data, at) - 11)
            continue
        if not _bad_header(head):
            after = at + OVERHEAD + _HEADER.unpack(head)[0]
            if after <= size:
                message = data[at + 12 : after - 4]
                if masked(message) == _CHECK.unpack(data[after - 4 : after])[0]:
                    return at
        at += 1


def past_zeros(data: Data, at: int) -> int:
    """The first byte from `at` on that is not zero, or the size: a crash leaves gigabytes of zeros,
    and they are compared a block at a time."""
    while at < len(data):
        block = data[at : at + len(_ZEROS)]
        if block != _ZEROS[: len(block)]:
            return at + len(block) - len(block.lstrip(b"\0"))
        at += len(block)
    return len(data)


def _bad_header(head: bytes) -> str:
    """Why these 12 bytes are not a record header, or the empty string."""
    if len(head) < 12:
        return "the file ends inside a record"
    length, check = _HEADER.unpack(head)
    if masked(head[:8]) != check:
        return "the checksum of the record's length is wrong"
    if length > LARGEST:
        return f"a record of {count(length, 'byte')}; the largest that is believed has {LARGEST}"
    return ""


def _unfinished(data: Data, at: int, head: bytes) -> bool:
    """Whether a bad header at `at` is a write that was cut off: too few bytes, or only zeros up
    to the end of the file (a crash may leave the length of a file without its data)."""
    if len(head) < 12:
        return True
    return past_zeros(data, at) == len(data)
