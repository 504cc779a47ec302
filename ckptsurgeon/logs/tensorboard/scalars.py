"""The numbers that an event file holds under certain tags."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ckptsurgeon.logs.tensorboard import message
from ckptsurgeon.logs.tensorboard.event_file import scan
from ckptsurgeon.logs.tensorboard.frame import OVERHEAD, Opened
from ckptsurgeon.logs.tensorboard.wire import fields

_HEADER = 12
_FLOAT, _DOUBLE = struct.Struct("<f"), struct.Struct("<d")


@dataclass(frozen=True)
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
            start, end = index.span(record)
            event = bytes(data[start + _HEADER : end - (OVERHEAD - _HEADER)])
            for tag, value in _values(event):
                if matches(tag):
                    yield Point(tag, int(index.steps[record]), float(index.walls[record]), value)


def _values(event: bytes) -> Iterator[tuple[str, float]]:
    for key, _, start, end in fields(event, 0, len(event)):
        if key != message.SUMMARY << 3 | 2:
            continue
        for inner, _, begin, stop in fields(event, start, end):
            if inner == 0x0A:
                tag, value = _value(event, begin, stop)
                if value is not None:
                    yield tag, value


def _value(event: bytes, start: int, end: int) -> tuple[str, float | None]:
    """Value: 1 tag, 2 simple_value, 8 tensor."""
    tag, number = "", None
    for key, _, begin, stop in fields(event, start, end):
        if key == 0x0A:
            tag = message.text(event[begin:stop])
        elif key == 0x15:
            number = float(_FLOAT.unpack_from(event, begin)[0])
        elif key == 0x42:
            number = _tensor(event, begin, stop)
    return tag, number


def _tensor(event: bytes, start: int, end: int) -> float | None:
    """TensorProto: 1 dtype (1 float, 2 double), 4 content, 5 float_val, 6 double_val."""
    kind, content = 0, b""
    for key, _, begin, stop in fields(event, start, end):
        if key == 0x08:
            kind = event[begin]
        elif key in (0x22, 0x2A, 0x32, 0x2D, 0x31):  # packed, or one that is not
            content = event[begin:stop]
    number = {1: _FLOAT, 2: _DOUBLE}.get(kind)
    if number is None or len(content) != number.size:
        return None
    return float(number.unpack(content)[0])
