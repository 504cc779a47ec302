"""Plain values of a pickle: read from the opcodes that make them, and written as opcodes."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

from ckptsurgeon.errors import count
from ckptsurgeon.files.pickles import opcodes
from ckptsurgeon.files.pickles.scan import Scan

_TEXT_WIDTH = {opcodes.SHORT_BINUNICODE: 1, opcodes.BINUNICODE: 4, opcodes.BINUNICODE8: 8}
_INTEGER_BYTES = {opcodes.BININT1: 1, opcodes.BININT2: 2}

NO_SCALAR = object()
"""What `scalar` gives for a value that is none."""


def scalar(scanned: Scan, value: int) -> Any:
    """A str, int, float, bool or None of the pickle; `NO_SCALAR` for all else."""
    at = scanned.made(value)
    data, opcode = scanned.data, scanned.data[at]
    if width := _TEXT_WIDTH.get(opcode, 0):
        start = at + 1 + width
        length = int.from_bytes(data[at + 1 : start], "little")
        try:
            return data[start : start + length].decode("utf-8", "surrogatepass")
        except UnicodeDecodeError:
            raise scanned.damaged(at, "a string is not UTF-8") from None
    if width := _INTEGER_BYTES.get(opcode, 0):
        return int.from_bytes(data[at + 1 : at + 1 + width], "little")
    if opcode == opcodes.BININT:
        return struct.unpack_from("<i", data, at + 1)[0]
    if opcode == opcodes.BINFLOAT:
        return struct.unpack_from(">d", data, at + 1)[0]
    if opcode in (opcodes.LONG1, opcodes.LONG4):
        start = at + (2 if opcode == opcodes.LONG1 else 5)
        length = int.from_bytes(data[at + 1 : start], "little")
        return int.from_bytes(data[start : start + length], "little", signed=True)
    plain = {opcodes.NONE: None, opcodes.NEWTRUE: True, opcodes.NEWFALSE: False}
    return plain.get(opcode, NO_SCALAR)


def like(scanned: Scan, value: int, new: Any) -> Any:
    """`new` in the type of the value that it replaces."""
    old = scanned.made(value)
    opcode = scanned.data[old]
    if opcode == opcodes.BINFLOAT and isinstance(new, int) and not isinstance(new, bool):
        return float(new) if float(new) == new else new
    if not isinstance(new, (list, tuple)):
        return new
    if opcode in opcodes.TUPLES:
        parts = scanned.parts.get(old, [])[int(opcode == opcodes.TUPLE) :]
        return tuple(_like_each(scanned, parts, new))
    if opcode == opcodes.EMPTY_LIST:
        parts = []
        for at, items in scanned.grown.get(old, ()):
            parts += items[int(scanned.data[at] == opcodes.APPENDS) :]
        return list(_like_each(scanned, parts, new))
    return new


def _like_each(scanned: Scan, parts: Sequence[int], new: Sequence[Any]) -> Sequence[Any]:
    if len(parts) != len(new):
        return new
    return [like(scanned, part, item) for part, item in zip(parts, new, strict=True)]


def dumped(value: Any, old: Any) -> bytes:
    """A pickle of `value` alone, a float where `old` is one."""
    if isinstance(old, float) and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    return b"\x80\2" + encode(value) + bytes([opcodes.STOP])


def encode(value: Any) -> bytes:
    """Opcodes that push `value`, of protocol 2, which all later ones have, and without a memo."""
    if value is None or isinstance(value, bool):
        constants = {None: opcodes.NONE, True: opcodes.NEWTRUE, False: opcodes.NEWFALSE}
        return bytes([constants[value]])
    if isinstance(value, int):
        if 0 <= value < 1 << 8:
            return struct.pack("<BB", opcodes.BININT1, value)
        if 0 <= value < 1 << 16:
            return struct.pack("<BH", opcodes.BININT2, value)
        if -(1 << 31) <= value < 1 << 31:
            return struct.pack("<Bi", opcodes.BININT, value)
        digits = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
        if len(digits) > 255:
            raise TypeError(f"an integer of {count(len(digits), 'byte')} is too long for a pickle")
        return struct.pack("<BB", opcodes.LONG1, len(digits)) + digits
    if isinstance(value, float):
        return struct.pack(">Bd", opcodes.BINFLOAT, value)
    if isinstance(value, str):
        text = value.encode("utf-8", "surrogatepass")
        return struct.pack("<BI", opcodes.BINUNICODE, len(text)) + text
    if isinstance(value, tuple) and not value:
        return bytes([opcodes.EMPTY_TUPLE])
    if isinstance(value, (list, tuple)):
        inside = bytes([opcodes.MARK]) + b"".join(encode(item) for item in value)
        if isinstance(value, tuple):
            return inside + bytes([opcodes.TUPLE])
        return bytes([opcodes.EMPTY_LIST]) + inside + bytes([opcodes.APPENDS])
    raise TypeError(f"{type(value).__name__} can't be set in a pickle")
