"""The Event message of TensorBoard in protobuf's wire format: as much of it as surgery needs.

Event: 1 wall_time, 2 step, 3 file_version, 5 summary, 10 source_metadata, … · Summary: 1 value ·
Value: 1 tag, 9 metadata, … A reader's errors are ValueErrors; the caller knows file and offset.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

from ckptsurgeon.logs.tensorboard.wire import as_varint, delimited, fields, signed, varint

SUMMARY = 5
FILE_VERSION = 3

_DOUBLE = struct.Struct("<d")
_wall = struct.Struct("<xd").unpack_from

Tags = bytes | tuple[bytes, ...] | None
"""The tag of the only value, the tags of several values, or None when there is no value."""


def text(tag: bytes) -> str:
    """A tag as it is shown; bytes that are not UTF-8 survive the way back."""
    return tag.decode("utf-8", "surrogateescape")


def encoded(tag: str) -> bytes:
    """The inverse of `text`."""
    return tag.encode("utf-8", "surrogateescape")


def version(wall: float) -> bytes:
    """The first event of a file: `brain.Event:2`, written by ckptsurgeon."""
    metadata = delimited(0x0A, b"ckptsurgeon")
    return (
        b"\x09" + _DOUBLE.pack(wall) + delimited(0x1A, b"brain.Event:2") + delimited(0x52, metadata)
    )


def text_event(wall: float, step: int, tag: str, content: str) -> bytes:
    """An event that the text dashboard shows at `step` under `tag`, as Markdown."""
    plugin = delimited(0x0A, delimited(0x0A, b"text"))
    shape = delimited(0x12, delimited(0x12, b"\x08\x01"))  # one string
    tensor = b"\x08\x07" + shape + delimited(0x42, content.encode(errors="replace"))
    value = delimited(0x0A, encoded(tag)) + delimited(0x42, tensor) + delimited(0x4A, plugin)
    position = b"\x10" + as_varint(step) if step else b""
    return b"\x09" + _DOUBLE.pack(wall) + position + delimited(0x2A, delimited(0x0A, value))


class Reader:
    """Reads events: called with a message it returns wall time, step, the field number of what the
    event holds, and its tags."""

    def __init__(self) -> None:
        self._heads: dict[bytes, tuple[int, bytes]] = {}

    def __call__(self, event: bytes) -> tuple[float, int, int, Tags]:
        # Events of the common shape (see `plain`) are known by the bytes from the summary's key
        # to the end of the tag, once these were met.
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
        where = plain(event)
        if where is None:
            return _read(event)
        tag, end = where
        self._heads[event[tag - 6 : end]] = size - tag + 6, event[tag:end]
        step = varint(event, 10, size)[0] if event[9] == 0x10 else 0
        return _wall(event)[0], step, SUMMARY, event[tag:end]


def _read(event: bytes) -> tuple[float, int, int, Tags]:
    wall, step, kind = 0.0, 0, 0
    tags: list[bytes] = []
    for key, _, start, end in fields(event, 0, len(event)):
        if key == 0x09:
            wall = _DOUBLE.unpack_from(event, start)[0]
        elif key == 0x10:
            step = signed(varint(event, start, end)[0])
        elif 3 <= key >> 3 <= 9:
            kind = key >> 3
            if key == 0x2A:
                tags += _tags(event, start, end)
    if kind == SUMMARY and tags:
        return wall, step, kind, tags[0] if len(tags) == 1 else tuple(tags)
    return wall, step, kind, None


def plain(event: bytes) -> tuple[int, int] | None:
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
    for key, _, begin, stop in fields(event, start, end):
        if key == 0x0A:
            where = tag_of(event, begin, stop)
            yield event[where[1] : where[2]] if where else b""


def tag_of(event: bytes, start: int, end: int) -> tuple[int, int, int] | None:
    """The field of the first tag in the Value at [start, end): its offset, where the tag starts and
    ends. The rest of the value is not looked at."""
    for key, begin, content, stop in fields(event, start, end):
        if key == 0x0A:
            return begin, content, stop
    return None


def metadata_of(event: bytes, tag: str) -> bytes | None:
    """The metadata of the first value with this tag, None when it has none."""
    name = encoded(tag)
    for key, _, start, end in fields(event, 0, len(event)):
        for inner, _, begin, stop in fields(event, start, end) if key == 0x2A else ():
            where = tag_of(event, begin, stop) if inner == 0x0A else None
            if where is not None and event[where[1] : where[2]] == name:
                own = [event[a:b] for k, _, a, b in fields(event, begin, stop) if k == 0x4A]
                return own[-1] if own else None
    return None


def with_metadata(event: bytes, tag: str, metadata: bytes) -> bytes | None:
    """The event with this metadata on its first value with this tag; None when it has its own."""
    if metadata_of(event, tag) is not None:
        return None
    name = encoded(tag)
    out: list[bytes] = []
    missing = True
    for key, begin, start, end in fields(event, 0, len(event)):
        if key != 0x2A:
            out.append(event[begin:end])
            continue
        values: list[bytes] = []
        for inner, first, content, stop in fields(event, start, end):
            where = tag_of(event, content, stop) if inner == 0x0A else None
            if missing and where is not None and event[where[1] : where[2]] == name:
                missing = False
                value = event[content:stop] + delimited(0x4A, metadata)
                values.append(delimited(inner, value))
            else:
                values.append(event[first:stop])
        out.append(delimited(key, b"".join(values)))
    return b"".join(out)
