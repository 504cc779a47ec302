"""Gives the tags of an event file new names, in one pass; every other byte stays.

The native module `_events` does the work where it was built; what is written is the same without.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ckptsurgeon.logs.tensorboard import event_file, message
from ckptsurgeon.logs.tensorboard.frame import (
    OVERHEAD,
    Data,
    Opened,
    Records,
    check,
    damaged,
    header,
)
from ckptsurgeon.logs.tensorboard.mentions import has_mentions, rename_mentions
from ckptsurgeon.logs.tensorboard.message import plain, tag_of
from ckptsurgeon.logs.tensorboard.wire import as_varint, delimited, fields
from ckptsurgeon.plans.frozen import frozen

CHUNK = 1 << 20
"""Bytes of a file that are renamed at once."""

Piece = bytes | tuple[int, int]
"""New bytes, or (start, end) of bytes that stay."""


@frozen
class Renamed:
    """What a rename met: events per (old, new) tag, all tags of the file, and the regular
    expressions in layouts that did not follow."""

    counts: dict[tuple[str, str], int]
    tags: set[str]
    patterns: set[str]


def rename(path: Path, name: Callable[[str], str], emit: Callable[[Piece], None]) -> Renamed:
    """All tags of `path` through `name`, in one pass and simultaneously; every other byte stays.

    `emit` gets the pieces of the new file in order, `name` is called once per tag. A torn tail
    stays as it is. Raises DamagedFile on a bad record; what was emitted is then worth nothing."""
    with Opened(path) as (data, _):
        return rename_data(data, path, name, emit)


def rename_data(
    data: Data, path: Path, name: Callable[[str], str], emit: Callable[[Piece], None]
) -> Renamed:
    """`rename` on the bytes `data` of `path`."""
    pairs: dict[bytes, tuple[str, str]] = {}

    def target(tag: bytes) -> bytes | None:
        old = message.text(tag)
        pairs[tag] = old, name(old)
        return None if pairs[tag][1] == old else message.encoded(pairs[tag][1])

    # The native renaming halts before an event that mentions other tags, and at damage.
    ours = Renaming(target)
    fast = None if event_file.native is None else event_file.native.Renaming(target, has_mentions)
    at = same = 0
    while at < len(data):
        new, after = (None, at) if fast is None else fast.run(data, at, CHUNK)
        if after == at:
            new, after = _rename_chunk(data, path, ours, at, CHUNK if fast is None else 1)
        if after == at:
            break
        if new is not None:
            if same < at:
                emit((same, at))
            emit(new)
            same = after
        at = after
    if same < len(data):
        emit((same, len(data)))
    totals = dict(ours.counts)
    for tag, count in fast.counts.items() if fast is not None else ():
        totals[tag] = totals.get(tag, 0) + count
    counts = {pairs[tag]: count for tag, count in totals.items() if pairs[tag][0] != pairs[tag][1]}
    return Renamed(
        counts,
        {message.text(tag) for tag in totals},
        {message.text(pattern) for pattern in ours.patterns},
    )


def _rename_chunk(
    data: Data, path: Path, renaming: Renaming, start: int, limit: int
) -> tuple[bytes | None, int]:
    """The new bytes of the records that start in the next `limit` bytes, None when nothing changes,
    and where the next chunk starts: `start` at a torn tail."""
    out: list[bytes] = []
    same = start
    headers: dict[int, bytes] = {}
    records = Records(path, data, False, start)
    for offset, payload in records:
        if offset - start >= limit:
            break
        assert payload is not None
        try:
            new = renaming(payload)
        except ValueError as error:
            raise damaged(path, offset, f"not an event: {error}") from None
        if new is not None:
            if same < offset:
                out.append(data[same:offset])
            if len(new) not in headers:
                headers[len(new)] = header(len(new))
            out += (headers[len(new)], new, check(new))
            same = offset + OVERHEAD + len(payload)
    if not out:
        return None, records.end
    out.append(data[same : records.end])
    return b"".join(out), records.end


# --- one event ----------------------------------------------------------------------------------


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
        # As in `Reader`: known bytes from the summary's key to the end of the tag give the shape.
        size = len(event)
        if size > 24 and event[0] == 0x09 and event[9] == 0x10:
            at = 10
            while event[at] > 127 and at < 18:
                at += 1
            start = at + 1
            head = event[start : start + 6 + event[start + 5]]
            if head in self._heads and event[at] < 128 and start + 2 + head[1] == size:
                return self._put(event, start, head)
        where = plain(event)
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
        inner = b"\x0a" + as_varint(value)
        return b"\x2a" + as_varint(len(inner) + value) + inner + field, old

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
        where = tag_of(event, start, end)
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
                begin, content, stop = tag_of(event, start, end) or (0, 0, 0)
        if new is None:
            return None
        self.counts[tag] += 1
        return event[start:begin] + delimited(0x0A, new) + event[stop:end]
