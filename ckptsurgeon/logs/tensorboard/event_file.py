"""TensorBoard event files: an index of the events, and the byte ranges of those to keep.

The native module `_events` does the work where it was built; what is read and written is the same
without it. Damage is always judged here.
"""

from __future__ import annotations

import importlib
import os
import re
from array import array
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ckptsurgeon.logs.tensorboard import message
from ckptsurgeon.logs.tensorboard.frame import Data, Opened, Records, damaged, frame
from ckptsurgeon.plans.frozen import frozen
from ckptsurgeon.transaction.home import EVENTS

native: Any
try:
    native = importlib.import_module("ckptsurgeon.logs.tensorboard._events")
except ImportError:
    native = None

BORN = re.compile(rf"(?<={EVENTS}\.)\d+")
"""In a file's name: when its writer was opened, in seconds."""
DROPPED = 255
"""`Index.kinds` of bytes that are no record: what salvage leaves out."""
KINDS: Any = "QqdiB"
"""Type codes of the columns of an index."""
LATEST = float(1 << 37)
"""The wall time that no event reaches: the year 6325."""
FURTHEST = 1 << 60
"""The step that no event reaches: what is computed from two of them stays an int64."""


@frozen
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
            if EVENTS in item.name and not item.name.endswith(".profile-empty") and item.is_file()
        ]
    return [directory / name for name in sorted(names)]


def version_record(wall: float) -> bytes:
    """The first record of every event file. Without it TensorBoard drops points it takes for
    out of order."""
    return frame(message.version(wall))


# --- index ---------------------------------------------------------------------------------------


def scan(path: Path, *, salvage: bool = False) -> Index:
    """Read and check every record of `path`, whole file, both checksums.

    Raises DamagedFile with the offset of a bad record that is not the last one. With `salvage` it
    is left out instead: alone when its length can be trusted, else up to the next good record. An
    event of a time or step that no clock and no counter gives is bad, too."""
    with Opened(path) as (data, mtime_ns):
        return _believed(index(data, path, mtime_ns, salvage=salvage), salvage)


def _believed(index: Index, salvage: bool) -> Index:
    import numpy as np

    steps, walls = np.asarray(index.steps, np.int64), np.asarray(index.walls, np.float64)
    good = (np.abs(walls) < LATEST) & (np.abs(steps.clip(-FURTHEST)) < FURTHEST)
    if good.all():
        return index
    bad = np.flatnonzero(~good)
    first = int(bad[0])
    if not salvage:
        what = f"an event of step {steps[first]} and time {walls[first]:g}"
        raise damaged(index.path, index.offsets[first], what)
    steps, walls = steps.copy(), walls.copy()
    tags, kinds = np.array(index.tags, np.int32), np.array(index.kinds, np.uint8)
    for i in bad.tolist():
        walls[i], steps[i], tags[i], kinds[i] = walls[i - 1] if i else 0.0, 0, -1, DROPPED
    return replace(index, steps=steps.data, walls=walls.data, tags=tags.data, kinds=kinds.data)


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
    shown = tuple(tuple(message.text(tag) for tag in group) for group in names)
    offsets, steps, walls, tags, kinds = columns
    return Index(
        path,
        size=len(data),
        mtime_ns=mtime_ns,
        end=end,
        offsets=offsets,
        steps=steps,
        walls=walls,
        tags=tags,
        kinds=kinds,
        names=shown,
    )


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
    read = message.Reader()

    def left_out() -> tuple[float, int, int, None]:
        return columns[2][-1] if columns[2] else 0.0, 0, DROPPED, None

    records = Records(path, data, salvage, start)
    for offset, payload in records:
        try:
            wall, step, kind, tags = read(payload) if payload is not None else left_out()
        except ValueError as error:
            if not salvage:
                raise damaged(path, offset, f"not an event: {error}") from None
            wall, step, kind, tags = left_out()
        if tags in single:
            number = single[tags]
        elif tags is None:
            number = -1
        else:
            group = (tags,) if isinstance(tags, bytes) else tags
            number = numbers.setdefault(group, len(numbers))
            if isinstance(tags, bytes):
                single[tags] = number
        add_offset(offset)
        add_step(step)
        add_wall(wall)
        add_tag(number)
        add_kind(kind)
    return records.end


def spans(index: Index, flags: Any) -> list[tuple[int, int]]:
    """Byte ranges of the records i with `flags[i]` (any sequence of truth values), neighbours
    joined. What salvage left out never."""
    import numpy as np

    chosen = np.asarray(flags, bool) & (np.frombuffer(bytes(index.kinds), np.uint8) != DROPPED)
    steps = np.diff(chosen.astype(np.int8), prepend=0, append=0)
    offsets = index.offsets

    def border(record: int) -> int:
        return offsets[record] if record < len(offsets) else index.end

    starts, ends = np.flatnonzero(steps == 1).tolist(), np.flatnonzero(steps == -1).tolist()
    return [(border(a), border(b)) for a, b in zip(starts, ends, strict=True)]
