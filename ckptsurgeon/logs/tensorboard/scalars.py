"""The numbers that an event file holds under certain tags."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from ckptsurgeon.logs.tensorboard import message
from ckptsurgeon.logs.tensorboard.event_file import Index, scan
from ckptsurgeon.logs.tensorboard.frame import OVERHEAD, Data, Opened
from ckptsurgeon.logs.tensorboard.wire import fields
from ckptsurgeon.plans.frozen import frozen

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Floats: TypeAlias = "NDArray[np.float64]"
_HEADER = 12
_NUMBERS = {4: struct.Struct("<f"), 8: struct.Struct("<d")}
_CONTENT = (0x22, 0x2A, 0x32, 0x2D, 0x31)
"""Keys of a tensor's numbers: as bytes, packed, or one that is not."""
_CHUNK = 1 << 16
"""Records whose bytes are looked at together."""
_PATTERNS = 8
"""Of one tag in one file; what has more is read field by field."""


@frozen
class Point:
    """One value of one tag; `wall` is when it was logged."""

    tag: str
    step: int
    wall: float
    value: float


def scalars(path: Path, matches: Callable[[str], bool]) -> Iterator[Point]:
    """The points of every tag that `matches`, in file order; damaged records are left out.

    Values are float32 where torch wrote them. A point that holds no number is passed over."""
    index = scan(path, salvage=True)
    hits = {i for i, tags in enumerate(index.names) if any(map(matches, tags))}
    with Opened(path) as (data, _):
        for record, series in enumerate(index.tags):
            if series not in hits:
                continue
            for tag, value in numbers(data, index, record):
                if matches(tag):
                    yield Point(tag, int(index.steps[record]), float(index.walls[record]), value)


def numbers(data: Data, index: Index, record: int) -> Iterator[tuple[str, float]]:
    """Tag and number of each value in one record. `data` are the bytes of the file."""
    start, end = index.span(record)
    return _values(bytes(data[start + _HEADER : end - (OVERHEAD - _HEADER)]))


def few(index: Index, data: Data, tag: str, records: Iterable[int]) -> Iterator[tuple[int, float]]:
    """Each of these records that holds a number under the tag, and the number: what `column` reads,
    without NumPy, whose loading takes longer than some thousand records."""
    pattern: _Pattern | None = None
    for record in records:
        start, end = index.span(record)
        event = bytes(data[start + _HEADER : end - (OVERHEAD - _HEADER)])
        value = None if pattern is None else pattern.number(event)
        if value is not None:
            yield record, value
            continue
        yield from ((record, number) for name, number in _values(event) if name == tag)
        pattern = _Pattern.of(event)


def column(index: Index, data: Data, tag: str, rows: Any) -> Floats:
    """The number that each of these records of one tag holds, NaN where it holds none. `data` are
    the bytes of the file.

    Under one tag a writer changes only wall time, step and value: the bytes from the summary on are
    equal but for the value. A record that differs from all that were met is read field by field."""
    import numpy as np

    out = np.full(len(rows), np.nan)
    offsets = np.asarray(index.offsets, np.uint64)
    whole = np.frombuffer(data, np.uint8)
    patterns: list[_Pattern] = []
    for start in range(0, len(rows), _CHUNK):
        part = np.asarray(rows[start : start + _CHUNK])
        after = np.minimum(part + 1, len(offsets) - 1)
        ends = np.where(part + 1 < len(offsets), offsets[after], np.uint64(index.end))
        stops = ends.astype(np.int64) - (OVERHEAD - _HEADER)
        lengths = stops - offsets[part].astype(np.int64) - _HEADER
        left = np.arange(len(part))
        for pattern in patterns:
            left = pattern.read(whole, stops, lengths, left, out[start:])
        while len(left):  # no pattern has the first one: its own may fit those after it
            stop, length = int(stops[left[0]]), int(lengths[left[0]])
            event = bytes(data[stop - length : stop])
            values = [number for name, number in _values(event) if name == tag]
            out[start + left[0]] = values[0] if values else np.nan
            left = left[1:]
            made = _Pattern.of(event) if len(patterns) < _PATTERNS else None
            if made is not None:
                patterns.append(made)
                left = made.read(whole, stops, lengths, left, out[start:])
    return out


@frozen
class _Pattern:
    """The bytes of an event from its summary on, and where in them its one number is."""

    tail: bytes
    at: int
    width: int

    @classmethod
    def of(cls, event: bytes) -> _Pattern | None:
        """None for an event with several values, or with none that is a number."""
        begins = [begin for key, begin, _, _ in fields(event, 0, len(event)) if key == _SUMMARY]
        places = list(_places(event))
        if len(begins) != 1 or len(places) != 1 or places[0][2] == 0:
            return None
        _, at, width = places[0]
        return cls(event[begins[0] :], at - begins[0], width)

    def number(self, event: bytes) -> float | None:
        """The number of an event that has this pattern, or None."""
        begin = len(event) - len(self.tail)
        place, after = begin + self.at, begin + self.at + self.width
        if begin < 0 or event[begin:place] != self.tail[: self.at]:
            return None
        if event[after:] != self.tail[self.at + self.width :]:
            return None
        return float(_NUMBERS[self.width].unpack_from(event, place)[0])

    def read(self, whole: Any, stops: Any, lengths: Any, rows: Any, out: Any) -> Any:
        """Fill `out` at those of `rows` that have this pattern; the others."""
        import numpy as np

        size = len(self.tail)
        fits = lengths[rows] >= size
        block = whole[(stops[rows[fits]] - size)[:, None] + np.arange(size)]
        same = np.ones(size, bool)
        same[self.at : self.at + self.width] = False
        hits = (block[:, same] == np.frombuffer(self.tail, np.uint8)[same]).all(axis=1)
        raw = np.ascontiguousarray(block[hits, self.at : self.at + self.width])
        out[rows[fits][hits]] = raw.view(f"<f{self.width}")[:, 0]
        return np.concatenate([rows[~fits], rows[fits][~hits]])


_SUMMARY = message.SUMMARY << 3 | 2


def _values(event: bytes) -> Iterator[tuple[str, float]]:
    for tag, at, width in _places(event):
        if width:
            yield tag, float(_NUMBERS[width].unpack_from(event, at)[0])


def _places(event: bytes) -> Iterator[tuple[str, int, int]]:
    """Tag of each value, and where its number is and how many bytes it has: 0 for no number."""
    for key, _, start, end in fields(event, 0, len(event)):
        for inner, _, begin, stop in fields(event, start, end) if key == _SUMMARY else ():
            if inner == 0x0A:
                yield _place(event, begin, stop)


def _place(event: bytes, start: int, end: int) -> tuple[str, int, int]:
    """Value: 1 tag, 2 simple_value, 8 tensor."""
    tag, at, width = "", 0, 0
    for key, _, begin, stop in fields(event, start, end):
        if key == 0x0A:
            tag = message.text(event[begin:stop])
        elif key == 0x15:
            at, width = begin, 4
        elif key == 0x42:
            at, width = _tensor(event, begin, stop)
    return tag, at, width


def _tensor(event: bytes, start: int, end: int) -> tuple[int, int]:
    """TensorProto: 1 dtype (1 float, 2 double), 4 content, 5 float_val, 6 double_val."""
    kind, at, size = 0, 0, 0
    for key, _, begin, stop in fields(event, start, end):
        if key == 0x08:
            kind = event[begin]
        elif key in _CONTENT:
            at, size = begin, stop - begin
    return (at, size) if {1: 4, 2: 8}.get(kind) == size else (0, 0)
