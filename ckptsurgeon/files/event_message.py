"""The Event message of TensorBoard in protobuf's wire format: as much of it as surgery needs.

Event: 1 wall_time, 2 step, 3 file_version, 5 summary, 10 source_metadata, … · Summary: 1 value ·
Value: 1 tag, 9 metadata, … A reader's errors are ValueErrors; the caller knows file and offset.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator

SUMMARY = 5
FILE_VERSION = 3

_DOUBLE = struct.Struct("<d")
_wall = struct.Struct("<xd").unpack_from

Field = tuple[int, int, int, int]
"""Key (field number << 3 | wire type), and the offsets of the key, of the content, and after."""

Found = bytes | tuple[bytes, ...] | None
"""The tag of the only value, the tags of several values, or None when there is no value."""


def text(tag: bytes) -> str:
    """A tag as it is shown; bytes that are not UTF-8 survive the way back."""
    return tag.decode("utf-8", "surrogateescape")


def encoded(tag: str) -> bytes:
    """The inverse of `text`."""
    return tag.encode("utf-8", "surrogateescape")


def version(wall: float) -> bytes:
    """The first event of a file: `brain.Event:2`, written by ckptsurgeon."""
    metadata = _delimited(0x0A, b"ckptsurgeon")
    return (
        b"\x09"
        + _DOUBLE.pack(wall)
        + _delimited(0x1A, b"brain.Event:2")
        + _delimited(0x52, metadata)
    )


class Reader:
    """Reads events: called with a message it returns wall time, step, the field number of what the
    event holds, and its tags."""

    def __init__(self) -> None:
        self._heads: dict[bytes, tuple[int, bytes]] = {}

    def __call__(self, event: bytes) -> tuple[float, int, int, Found]:
        # Events of the common shape (see `_plain`) are told by the bytes from the summary's key to
        # the end of the tag, once these were met.
        size = len(event)
        if size > 24 and event[0] == 0x09 and event[9] == 0x10:
            step, shift, at = 0, 0, 10
            byte = event[10]
            while byte > 127 and at < 18:
                step |= (byte & 127) << shift
                shift += 7
                at += 1
                byte = event[at]
            step |= byte << shift
            known = self._heads.get(event[at + 1 : at + 7 + event[at + 6]])
            if known is not None and byte < 128 and at + 1 + known[0] == size:
                return _wall(event)[0], step, SUMMARY, known[1]
        where = _plain(event)
        if where is None:
            return _read(event)
        tag, end = where
        self._heads[event[tag - 6 : end]] = size - tag + 6, event[tag:end]
        step = _varint(event, 10, size)[0] if event[9] == 0x10 else 0
        return _wall(event)[0], step, SUMMARY, event[tag:end]


def _read(event: bytes) -> tuple[float, int, int, Found]:
    wall, step, kind = 0.0, 0, 0
    found: list[bytes] = []
    for key, _, start, end in _fields(event, 0, len(event)):
        if key == 0x09:
            wall = _DOUBLE.unpack_from(event, start)[0]
        elif key == 0x10:
            step = _signed(_varint(event, start, end)[0])
        elif 3 <= key >> 3 <= 9:
            kind = key >> 3
            if key == 0x2A:
                found += _tags(event, start, end)
    if kind == SUMMARY and found:
        return wall, step, kind, found[0] if len(found) == 1 else tuple(found)
    return wall, step, kind, None


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


def _plain(event: bytes) -> tuple[int, int] | None:
    """Where the tag is in an event of the most common shape: wall time, step, one value, and no
    length over 127. None: any other shape."""
    size = len(event)
    if size < 18 or event[0] != 0x09:
        return None
    at = 9
    if event[9] == 0x10:
        at = 11
        while event[at - 1] > 127:
            at += 1
            if at > 19 or at + 6 > size:
                return None
    if at + 6 > size or event[at] != 0x2A:
        return None
    length = event[at + 1]
    if (
        length > 127
        or at + 2 + length != size
        or event[at + 2] != 0x0A
        or event[at + 3] != length - 2
        or event[at + 4] != 0x0A
    ):
        return None
    end = at + 6 + event[at + 5]
    if event[at + 5] > 127 or end > size:
        return None
    return at + 6, end


def _tags(event: bytes, start: int, end: int) -> Iterator[bytes]:
    """The tag of each value in the Summary at [start, end); empty for a value without one."""
    for key, _, begin, stop in _fields(event, start, end):
        if key == 0x0A:
            where = _tag(event, begin, stop)
            yield event[where[1] : where[2]] if where else b""


def _tag(event: bytes, start: int, end: int) -> tuple[int, int, int] | None:
    """The field of the first tag in the Value at [start, end): its offset, where the tag starts and
    ends. The rest of the value is not looked at."""
    for key, begin, content, stop in _fields(event, start, end):
        if key == 0x0A:
            return begin, content, stop
    return None


class Renaming:
    """Gives events their new tags: called with a message it returns the new one, or None when
    nothing changes. `target` is asked once per tag and answers None for a tag that stays; `counts`
    are the events per tag that was renamed."""

    def __init__(self, target: Callable[[bytes], bytes | None]) -> None:
        self.target = target
        self.counts: dict[bytes, int] = {}
        self._names: dict[bytes, bytes | None] = {}
        self._heads: dict[bytes, tuple[bytes, bytes] | None] = {}

    def __call__(self, event: bytes) -> bytes | None:
        where = _plain(event)
        if where is None:
            return self._general(event)
        tag, end = where
        start = tag - 6
        head = event[start:end]
        if head in self._heads:
            known = self._heads[head]
        else:
            known = self._heads[head] = self._head(event, tag, end)
        if known is None:
            return None
        new, old = known
        self.counts[old] += 1
        return event[:start] + new + event[end:]

    def _head(self, event: bytes, tag: int, end: int) -> tuple[bytes, bytes] | None:
        """The bytes from the summary's key to the end of the tag, with the new tag; and the old."""
        old = event[tag:end]
        new = self._name(old)
        if new is None:
            return None
        field = _delimited(0x0A, new)
        value = len(field) + len(event) - end
        inner = b"\x0a" + _encoded(value)
        return b"\x2a" + _encoded(len(inner) + value) + inner + field, old

    def _name(self, tag: bytes) -> bytes | None:
        if tag not in self._names:
            self._names[tag] = self.target(tag)
            self.counts[tag] = 0
        return self._names[tag]

    def _general(self, event: bytes) -> bytes | None:
        out: list[bytes] = []
        changed = False
        for key, begin, start, end in _fields(event, 0, len(event)):
            new = self._summary(event, start, end) if key == 0x2A else None
            changed = changed or new is not None
            out.append(event[begin:end] if new is None else _delimited(key, new))
        return b"".join(out) if changed else None

    def _summary(self, event: bytes, start: int, end: int) -> bytes | None:
        out: list[bytes] = []
        changed = False
        for key, begin, content, stop in _fields(event, start, end):
            new = self._value(event, content, stop) if key == 0x0A else None
            changed = changed or new is not None
            out.append(event[begin:stop] if new is None else _delimited(key, new))
        return b"".join(out) if changed else None

    def _value(self, event: bytes, start: int, end: int) -> bytes | None:
        where = _tag(event, start, end)
        if where is None:
            return None
        begin, content, stop = where
        new = self._name(event[content:stop])
        if new is None:
            return None
        self.counts[event[content:stop]] += 1
        return event[start:begin] + _delimited(0x0A, new) + event[stop:end]


# --- wire format ---------------------------------------------------------------------------------


def _fields(data: bytes, at: int, end: int) -> Iterator[Field]:
    """The fields of the message at [at, end)."""
    while at < end:
        begin = at
        key, at = _varint(data, at, end)
        kind = key & 7
        if kind == 2:
            length, start = _varint(data, at, end)
            at = start + length
        elif kind == 0:
            start = at
            _, at = _varint(data, at, end)
        elif kind == 1:
            start, at = at, at + 8
        elif kind == 5:
            start, at = at, at + 4
        else:
            raise ValueError(f"wire type {kind}")
        if at > end:
            raise ValueError("a field ends after its message")
        yield key, begin, start, at


def _varint(data: bytes, at: int, end: int) -> tuple[int, int]:
    """An unsigned integer of up to 64 bits, and the offset after it."""
    value = 0
    for shift in range(0, 70, 7):
        if at >= end:
            raise ValueError("an integer ends after its message")
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value & 0xFFFFFFFFFFFFFFFF, at
    raise ValueError("an integer of more than 64 bits")


def _encoded(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def _delimited(key: int, content: bytes) -> bytes:
    """A length-delimited field."""
    return _encoded(key) + _encoded(len(content)) + content
