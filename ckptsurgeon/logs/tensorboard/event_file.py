"""TensorBoard event files: an index of the events, byte ranges to keep, and tags under new names.

The native module `_events` does the work where it was built; what is read and written is the same
without it. Damage is always judged here.
"""

from __future__ import annotations

import importlib
import os
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ckptsurgeon.logs.tensorboard import mentions
from ckptsurgeon.logs.tensorboard import message as event_message
from ckptsurgeon.logs.tensorboard.frame import (
    OVERHEAD,
    Data,
    Opened,
    Records,
    check,
    damaged,
    frame,
    header,
)

native: Any
try:
    native = importlib.import_module("ckptsurgeon.files._events")
except ImportError:
    native = None

DROPPED = 255
"""`Index.kinds` of bytes that are no record: what salvage leaves out."""
KINDS: Any = "QqdiB"
"""Type codes of the columns of an index."""
CHUNK = 1 << 20
"""Bytes of a file that are renamed at once."""
LATEST = float(1 << 37)
"""The wall time that no event reaches: the year 6325."""
FURTHEST = 1 << 60
"""The step that no event reaches: what is computed from two of them stays an int64."""

Piece = bytes | tuple[int, int]
"""New bytes, or (start, end) of bytes that stay."""


@dataclass(frozen=True)
class Index:
    """Where each record of one file is, and what it says.

    Record i is the bytes [offsets[i], offsets[i + 1]), the last one ends at `end`. `tags[i]` is an
    index into `names`, or -1 for an event without values; an event may carry several values, so an
    entry of `names` is a tuple of tags. `kinds[i]` is the field number of what the event holds
    (3 file_version, 5 summary, 7 session_log, …; 0 nothing). The columns are buffers of uint64,
    int64, float64, int32 and uint8. Bytes from `end` to `size` are a torn tail: an unfinished last
    record."""

    path: Path
    size: int
    mtime_ns: int
    end: int
    offsets: Sequence[int]
    steps: Sequence[int]
    walls: Sequence[float]
    tags: Sequence[int]
    kinds: Sequence[int]
    names: tuple[tuple[str, ...], ...]

    def __len__(self) -> int:
        return len(self.offsets)

    @property
    def torn(self) -> int:
        """Bytes of the unfinished record at the end."""
        return self.size - self.end

    def span(self, record: int) -> tuple[int, int]:
        """First byte of a record and the byte after its last."""
        after = record + 1
        return self.offsets[record], self.offsets[after] if after < len(self) else self.end

    def dropped(self) -> list[tuple[int, int]]:
        """Byte ranges that salvage left out."""
        if DROPPED not in bytes(self.kinds):
            return []
        return [self.span(i) for i, kind in enumerate(self.kinds) if kind == DROPPED]


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


def version_record(wall: float) -> bytes:
    """The first record of every event file. Without it TensorBoard drops points it takes for
    out of order."""
    return frame(event_message.version(wall))


# --- index ---------------------------------------------------------------------------------------


def scan(path: Path, *, salvage: bool = False) -> Index:
    """Read and check every record of `path`, whole file, both checksums.

    Raises DamagedFile with the offset of a bad record that is not the last one. With `salvage` it
    is left out instead: alone when its length can be trusted, else up to the next good record. An
    event of a time or step that no clock and no counter gives is bad, too."""
    with Opened(path) as (data, mtime_ns):
        found = index(data, path, mtime_ns, salvage=salvage)
    return _believed(found, salvage)


def _believed(found: Index, salvage: bool) -> Index:
    import numpy as np

    steps, walls = np.asarray(found.steps, np.int64), np.asarray(found.walls, np.float64)
    good = (np.abs(walls) < LATEST) & (np.abs(steps.clip(-FURTHEST)) < FURTHEST)
    if good.all():
        return found
    bad = np.flatnonzero(~good)
    first = int(bad[0])
    if not salvage:
        what = f"an event of step {steps[first]} and time {walls[first]:g}"
        raise damaged(found.path, found.offsets[first], what)
    steps, walls = steps.copy(), walls.copy()
    tags, kinds = np.array(found.tags, np.int32), np.array(found.kinds, np.uint8)
    for i in bad.tolist():
        walls[i], steps[i], tags[i], kinds[i] = walls[i - 1] if i else 0.0, 0, -1, DROPPED
    return replace(found, steps=steps.data, walls=walls.data, tags=tags.data, kinds=kinds.data)


def index(data: Data, path: Path, mtime_ns: int = 0, *, salvage: bool = False) -> Index:
    """The index of the bytes `data` of `path`."""
    columns: list[Any]
    if native is None:
        end, columns, names = 0, [b""] * 5, []
    else:
        end, *columns, names = native.index(data)
    if end == len(data):
        columns = [
            memoryview(column).cast(kind) for column, kind in zip(columns, KINDS, strict=True)
        ]
    else:  # damage, a torn tail, or no native module
        columns = [array(kind, column) for column, kind in zip(columns, KINDS, strict=True)]
        numbers = {tuple(group): i for i, group in enumerate(names)}
        end = _read_on(data, path, end, salvage, columns, numbers)
        names = list(numbers)
    shown = tuple(tuple(event_message.text(tag) for tag in group) for group in names)
    offsets, steps, walls, tags, kinds = columns
    return Index(path, len(data), mtime_ns, end, offsets, steps, walls, tags, kinds, shown)


def _read_on(
    data: Data,
    path: Path,
    start: int,
    salvage: bool,
    columns: Sequence[array[Any]],
    numbers: dict[tuple[bytes, ...], int],
) -> int:
    """Add the records from `start` on to the columns; the end of the last whole one."""
    add_offset, add_step, add_wall, add_tag, add_kind = (column.append for column in columns)
    single = {group[0]: number for group, number in numbers.items() if len(group) == 1}
    read = event_message.Reader()

    def left_out() -> tuple[float, int, int, None]:
        return columns[2][-1] if columns[2] else 0.0, 0, DROPPED, None

    records = Records(path, data, salvage, start)
    for offset, message in records:
        try:
            wall, step, kind, found = read(message) if message is not None else left_out()
        except ValueError as error:
            if not salvage:
                raise damaged(path, offset, f"not an event: {error}") from None
            wall, step, kind, found = left_out()
        if found in single:
            number = single[found]
        elif found is None:
            number = -1
        else:
            group = (found,) if isinstance(found, bytes) else found
            number = numbers.setdefault(group, len(numbers))
            if isinstance(found, bytes):
                single[found] = number
        add_offset(offset)
        add_step(step)
        add_wall(wall)
        add_tag(number)
        add_kind(kind)
    return records.end


def spans(index: Index, kept: Any) -> list[tuple[int, int]]:
    """Byte ranges of the records i with `kept[i]` (any sequence of truth values), neighbours
    joined. What salvage left out never."""
    import numpy as np

    flags = np.asarray(kept, bool) & (np.frombuffer(bytes(index.kinds), np.uint8) != DROPPED)
    steps = np.diff(flags.astype(np.int8), prepend=0, append=0)
    offsets = index.offsets

    def border(record: int) -> int:
        return offsets[record] if record < len(offsets) else index.end

    starts, ends = np.flatnonzero(steps == 1).tolist(), np.flatnonzero(steps == -1).tolist()
    return [(border(a), border(b)) for a, b in zip(starts, ends, strict=True)]


# --- rename --------------------------------------------------------------------------------------


@dataclass(frozen=True)
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
        old = event_message.text(tag)
        pairs[tag] = old, name(old)
        return None if pairs[tag][1] == old else event_message.encoded(pairs[tag][1])

    # The native renaming halts before an event that mentions other tags, and at damage.
    ours = event_message.Renaming(target)
    fast = None if native is None else native.Renaming(target, mentions.has_mentions)
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
        {event_message.text(tag) for tag in totals},
        {event_message.text(pattern) for pattern in ours.patterns},
    )


def _rename_chunk(
    data: Data, path: Path, renaming: event_message.Renaming, start: int, limit: int
) -> tuple[bytes | None, int]:
    """The new bytes of the records that start in the next `limit` bytes, None when nothing changes,
    and where the next chunk starts: `start` at a torn tail."""
    out: list[bytes] = []
    same = start
    headers: dict[int, bytes] = {}
    records = Records(path, data, False, start)
    for offset, message in records:
        if offset - start >= limit:
            break
        assert message is not None
        try:
            new = renaming(message)
        except ValueError as error:
            raise damaged(path, offset, f"not an event: {error}") from None
        if new is not None:
            if same < offset:
                out.append(data[same:offset])
            if len(new) not in headers:
                headers[len(new)] = header(len(new))
            out += (headers[len(new)], new, check(new))
            same = offset + OVERHEAD + len(message)
    if not out:
        return None, records.end
    out.append(data[same : records.end])
    return b"".join(out), records.end
