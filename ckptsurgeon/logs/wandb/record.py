"""What a record of a `.wandb` file says, as far as a cut and a rename need it.

The numbers are those of `wandb/proto/wandb_internal.proto`, 0.31. What is not understood is kept.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import field

from ckptsurgeon.logs.tensorboard.wire import delimited, fields, varint
from ckptsurgeon.plans.frozen import frozen

HISTORY, SUMMARY, STATS, METRIC, RUN = 2, 3, 7, 12, 17
"""Fields of a Record that say what it is; any other is `OTHER`."""
OTHER = 0
_LENGTH = 2
"""The wire type of a field of bytes, text or a message."""


# A field of `_NUMBER` is that of the items of history and summaries, with one key. A name in a text
# can't be taken for one: 0x82 goes on a character in UTF-8, and never begins one after ASCII.
_KIND = re.compile(rb"(?:\x08[\x80-\xff]*[\x00-\x7f])?([\x12\x1a\x3a])")
_NUMBER = re.compile(rb"\x0a.[\x0a\x12](.)([ -~]+)\x82\x01.([-+.0-9eE]+)", re.DOTALL)
_STEP, _TEXT = b"\x05_step\x82\x01", re.compile(rb"[-+.0-9eE]+")


def kind(data: bytes) -> int:
    """What `said` says of its kind, for most records by their first bytes."""
    match = _KIND.match(data)
    return match[1][0] >> 3 if match else said(data).kind


def numbers(data: bytes) -> tuple[tuple[bytes, ...], tuple[bytes, ...], tuple[bytes, ...]]:
    """The finite numbers under names in a record of history, fast: sizes, names and texts. One
    whose name has another size is none."""
    found = _NUMBER.findall(data)
    if not found:
        return (), (), ()
    sizes, names, texts = zip(*found, strict=True)
    return sizes, names, texts


def own_step(data: bytes) -> float:
    """The step that W&B counts of a summary, or NaN, faster."""
    at = data.find(_STEP)
    match = _TEXT.match(data, at + len(_STEP) + 1) if at >= 0 else None
    return number(match[0]) if match else math.nan


def number(text: bytes) -> float:
    """The number of such a text, or NaN."""
    try:
        return float(text)
    except ValueError:
        return math.nan


@frozen
class Said:
    """Its kind, the numbers that it logs by name, the step of its own that W&B counts, and the time
    of system metrics, or NaN."""

    kind: int
    values: dict[str, float] = field(default_factory=dict)
    time: float = math.nan


def said(data: bytes) -> Said:
    """What a record says; of one that is not understood, that it is `OTHER`."""
    try:
        for key, _, start, end in fields(data, 0, len(data)):
            kind = key >> 3
            if key & 7 != _LENGTH:
                continue
            if kind in (HISTORY, SUMMARY):
                values = dict(_items(data, start, end))
                if kind == HISTORY and "_step" not in values:
                    values["_step"] = float(_step(data, start, end))
                return Said(kind, values)
            if kind == STATS:
                return Said(kind, time=_time(data, start, end))
            if kind in (METRIC, RUN):
                return Said(kind)
    except (ValueError, UnicodeDecodeError, OverflowError):
        pass
    return Said(OTHER)


def _items(data: bytes, start: int, end: int) -> Iterator[tuple[str, float]]:
    """Name and value of each item that has a number."""
    for key, _, a, b in fields(data, start, end):
        if key != 1 << 3 | _LENGTH:
            continue
        names, value = [], b""
        for inner, _, c, d in fields(data, a, b):
            if inner in (1 << 3 | _LENGTH, 2 << 3 | _LENGTH):
                names.append(data[c:d].decode())
            elif inner == 16 << 3 | _LENGTH:
                value = data[c:d]
        try:
            yield ".".join(names), float(value)
        except ValueError:
            continue


def _step(data: bytes, start: int, end: int) -> int:
    for key, _, a, b in fields(data, start, end):
        if key == 2 << 3 | _LENGTH:
            for inner, _, c, d in fields(data, a, b):
                if inner == 1 << 3:
                    return varint(data, c, d)[0]
    return 0


def _time(data: bytes, start: int, end: int) -> float:
    for key, _, a, b in fields(data, start, end):
        if key == 2 << 3 | _LENGTH:
            seconds = nanos = 0
            for inner, _, c, d in fields(data, a, b):
                if inner == 1 << 3:
                    seconds = varint(data, c, d)[0]
                elif inner == 2 << 3:
                    nanos = varint(data, c, d)[0]
            return seconds + nanos / 1e9
    return math.nan


# --- anew ----------------------------------------------------------------------------------------


def renamed(data: bytes, new: Mapping[str, str]) -> bytes:
    """A record of history, of a summary or of a definition with new names of what is logged."""

    def name(old: str) -> str:
        return new.get(old, old)

    def item(inner: bytes) -> bytes:
        """A key, or the parts of a nested one: a name that is new becomes a key of one part."""
        parts = [(key, inner[c:d]) for key, _, c, d in fields(inner, 0, len(inner))
                 if key in (1 << 3 | _LENGTH, 2 << 3 | _LENGTH)]  # fmt: skip
        old = ".".join(part.decode() for _, part in parts)
        if not parts or name(old) == old:
            return inner
        rest = _without(inner, {key for key, _ in parts})
        return delimited(parts[0][0], name(old).encode()) + rest

    def text(inner: bytes) -> bytes:
        return name(inner.decode()).encode()

    def items(inner: bytes) -> bytes:
        return _with(inner, {1 << 3 | _LENGTH: item, 2 << 3 | _LENGTH: item})

    def metric(inner: bytes) -> bytes:
        return _with(inner, {1 << 3 | _LENGTH: text, 4 << 3 | _LENGTH: text})

    def history(inner: bytes) -> bytes:
        return _with(inner, {1 << 3 | _LENGTH: item})

    changed = {HISTORY: history, SUMMARY: items, METRIC: metric}
    try:
        return _with(data, {kind << 3 | _LENGTH: change for kind, change in changed.items()})
    except ValueError:  # not understood
        return data


def with_id(data: bytes, id: str) -> bytes:
    """The record of a run with another id, which is shown as its name."""

    def run(inner: bytes) -> bytes:
        name = delimited(8 << 3 | _LENGTH, id.encode())
        rest = _without(inner, {8 << 3 | _LENGTH})
        return _with(rest, {1 << 3 | _LENGTH: lambda _: id.encode()}) + name

    try:
        return _with(data, {RUN << 3 | _LENGTH: run})
    except ValueError:  # not understood
        return data


def _with(data: bytes, changed: dict[int, Callable[[bytes], bytes]]) -> bytes:
    """A message with some of its fields changed; every other byte stays."""
    out = bytearray()
    for key, begin, start, end in fields(data, 0, len(data)):
        change = changed.get(key)
        out += data[begin:end] if change is None else delimited(key, change(data[start:end]))
    return bytes(out)


def _without(data: bytes, keys: set[int]) -> bytes:
    out = bytearray()
    for key, begin, _, end in fields(data, 0, len(data)):
        if key not in keys:
            out += data[begin:end]
    return bytes(out)
