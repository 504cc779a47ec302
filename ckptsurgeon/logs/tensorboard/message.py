"""The Event message of TensorBoard in protobuf's wire format: as much of it as surgery needs.

Event: 1 wall_time, 2 step, 3 file_version, 5 summary, 10 source_metadata, … · Summary: 1 value ·
Value: 1 tag, 9 metadata, … A reader's errors are ValueErrors; the caller knows file and offset.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator

from ckptsurgeon.logs.tensorboard.mentions import has_mentions, rename_mentions
from ckptsurgeon.logs.tensorboard.wire import delimited, fields, signed, varint
from ckptsurgeon.logs.tensorboard.wire import encoded as varint_of

SUMMARY = 5
FILE_VERSION = 3

_DOUBLE = struct.Struct("<d")
_wall = struct.Struct("<xd").unpack_from

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
    position = b"\x10" + varint_of(step) if step else b""
    return b"\x09" + _DOUBLE.pack(wall) + position + delimited(0x2A, delimited(0x0A, value))


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
        step = varint(event, 10, size)[0] if event[9] == 0x10 else 0
        return _wall(event)[0], step, SUMMARY, event[tag:end]


def _read(event: bytes) -> tuple[float, int, int, Found]:
    wall, step, kind = 0.0, 0, 0
    found: list[bytes] = []
    for key, _, start, end in fields(event, 0, len(event)):
        if key == 0x09:
            wall = _DOUBLE.unpack_from(event, start)[0]
        elif key == 0x10:
            step = signed(varint(event, start, end)[0])
        elif 3 <= key >> 3 <= 9:
            kind = key >> 3
            if key == 0x2A:
                found += _tags(event, start, end)
    if kind == SUMMARY and found:
        return wall, step, kind, found[0] if len(found) == 1 else tuple(found)
    return wall, step, kind, None


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
    for key, _, begin, stop in fields(event, start, end):
        if key == 0x0A:
            where = _tag(event, begin, stop)
            yield event[where[1] : where[2]] if where else b""


def _tag(event: bytes, start: int, end: int) -> tuple[int, int, int] | None:
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
            where = _tag(event, begin, stop) if inner == 0x0A else None
            if where is not None and event[where[1] : where[2]] == name:
                found = [event[a:b] for k, _, a, b in fields(event, begin, stop) if k == 0x4A]
                return found[-1] if found else None
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
            where = _tag(event, content, stop) if inner == 0x0A else None
            if missing and where is not None and event[where[1] : where[2]] == name:
                missing = False
                value = event[content:stop] + delimited(0x4A, metadata)
                values.append(delimited(inner, value))
            else:
                values.append(event[first:stop])
        out.append(delimited(key, b"".join(values)))
    return b"".join(out)


class Renaming:
    """Gives events their new tags: called with a message it returns the new one, or None when
    nothing changes. `target` is asked once per tag and answers None for a tag that stays; `counts`
    are the events per tag. Tags that layouts and hparams mention follow; `patterns` are those
    regular expressions in layouts that could not."""

    def __init__(self, target: Callable[[bytes], bytes | None]) -> None:
        self.target = target
        self.counts: dict[bytes, int] = {}
        self.patterns: set[bytes] = set()
        self._names: dict[bytes, bytes | None] = {}
        self._heads: dict[bytes, tuple[bytes, bytes] | None] = {}

    def __call__(self, event: bytes) -> bytes | None:
        # As in `Reader`: known bytes from the summary's key to the end of the tag tell the shape.
        size = len(event)
        if size > 24 and event[0] == 0x09 and event[9] == 0x10:
            at = 10
            while event[at] > 127 and at < 18:
                at += 1
            start = at + 1
            head = event[start : start + 6 + event[start + 5]]
            if head in self._heads and event[at] < 128 and start + 2 + head[1] == size:
                return self._put(event, start, head)
        where = _plain(event)
        if where is None or has_mentions(event[where[0] : where[1]]):
            return self._general(event)
        tag, end = where
        head = event[tag - 6 : end]
        if head not in self._heads:
            self._heads[head] = self._head(event, tag, end)
        return self._put(event, tag - 6, head)

    def _put(self, event: bytes, start: int, head: bytes) -> bytes | None:
        known = self._heads[head]
        if known is None:
            return None
        new, old = known
        self.counts[old] += 1
        return event[:start] + new + event[start + len(head) :]

    def _head(self, event: bytes, tag: int, end: int) -> tuple[bytes, bytes] | None:
        """The bytes from the summary's key to the end of the tag, with the new tag; and the old."""
        old = event[tag:end]
        new = self._name(old)
        if new is None:
            return None
        field = delimited(0x0A, new)
        value = len(field) + len(event) - end
        inner = b"\x0a" + varint_of(value)
        return b"\x2a" + varint_of(len(inner) + value) + inner + field, old

    def _name(self, tag: bytes) -> bytes | None:
        if tag not in self._names:
            self._names[tag] = self.target(tag)
            self.counts[tag] = 0
        return self._names[tag]

    def _general(self, event: bytes) -> bytes | None:
        out: list[bytes] = []
        changed = False
        for key, begin, start, end in fields(event, 0, len(event)):
            new = self._summary(event, start, end) if key == 0x2A else None
            changed = changed or new is not None
            out.append(event[begin:end] if new is None else delimited(key, new))
        return b"".join(out) if changed else None

    def _summary(self, event: bytes, start: int, end: int) -> bytes | None:
        out: list[bytes] = []
        changed = False
        for key, begin, content, stop in fields(event, start, end):
            new = self._value(event, content, stop) if key == 0x0A else None
            changed = changed or new is not None
            out.append(event[begin:stop] if new is None else delimited(key, new))
        return b"".join(out) if changed else None

    def _value(self, event: bytes, start: int, end: int) -> bytes | None:
        where = _tag(event, start, end)
        if where is None:
            return None
        begin, content, stop = where
        tag = event[content:stop]
        new = self._name(tag)
        if has_mentions(tag):
            inside = rename_mentions(event[start:end], tag, self.target, self.patterns)
            if inside is not None and new is None:
                return inside
            if inside is not None:
                event, start, end = inside, 0, len(inside)
                begin, content, stop = _tag(event, start, end) or (0, 0, 0)
        if new is None:
            return None
        self.counts[tag] += 1
        return event[start:begin] + delimited(0x0A, new) + event[stop:end]
