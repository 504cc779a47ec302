"""Protobuf's wire format: the fields of a message, and how a field is written."""

from __future__ import annotations

from collections.abc import Iterator

Field = tuple[int, int, int, int]
"""Key (field number << 3 | wire type), and the offsets of the key, of the content, and after."""


def fields(data: bytes, at: int, end: int) -> Iterator[Field]:
    """The fields of the message at [at, end). Raises ValueError when the bytes are no message."""
    while at < end:
        begin = at
        key, at = varint(data, at, end)
        kind = key & 7
        if kind == 2:
            length, start = varint(data, at, end)
            at = start + length
        elif kind == 0:
            start = at
            _, at = varint(data, at, end)
        elif kind == 1:
            start, at = at, at + 8
        elif kind == 5:
            start, at = at, at + 4
        else:
            raise ValueError(f"wire type {kind}")
        if at > end:
            raise ValueError("a field ends after its message")
        yield key, begin, start, at


def varint(data: bytes, at: int, end: int) -> tuple[int, int]:
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


def signed(value: int) -> int:
    """An int64 of the bits of an unsigned integer."""
    return value - (1 << 64) if value >= 1 << 63 else value


def as_varint(value: int) -> bytes:
    """An unsigned integer as a varint."""
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def delimited(key: int, content: bytes) -> bytes:
    """A field of bytes, text or a message."""
    return as_varint(key) + as_varint(len(content)) + content
