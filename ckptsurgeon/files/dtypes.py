"""The element types of tensors: their names, their sizes in bytes, and their values as bytes."""

from __future__ import annotations

import struct
from typing import Any

ITEM_BYTES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4, "int16": 2,
    "int8": 1, "uint8": 1, "uint16": 2, "uint32": 4, "uint64": 8, "bool": 1, "complex32": 4,
    "complex64": 8, "complex128": 16, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1, "float8_e8m0fnu": 1,
}  # fmt: skip
"""Bytes of one element by dtype."""

STORAGES = {
    "DoubleStorage": "float64", "FloatStorage": "float32", "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16", "LongStorage": "int64", "IntStorage": "int32",
    "ShortStorage": "int16", "CharStorage": "int8", "ByteStorage": "uint8",
    "BoolStorage": "bool", "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128", "UntypedStorage": "uint8",
}  # fmt: skip

SAFETENSORS = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64",
    "int32": "I32", "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip
"""torch's name → that of the safetensors format."""

_NUMBERS = {
    "float64": "d", "float32": "f", "float16": "e", "int64": "q", "int32": "i", "int16": "h",
    "int8": "b", "uint8": "B", "uint16": "H", "uint32": "I", "uint64": "Q", "bool": "?",
}  # fmt: skip
_FLOATS = {"float64": "f8", "float32": "f4", "float16": "f2"}
FLOATS = (*_FLOATS, "bfloat16")
"""What `floats` can read. A bfloat16 is the upper half of a float32."""


def number(data: bytes, dtype: str, order: str) -> int | float | bool:
    """The value of one element; `order` is `<` or `>`. Raises KeyError for a dtype that is not a
    plain number."""
    if dtype == "bfloat16":
        data = b"\0\0" + data if order == "<" else data + b"\0\0"
        dtype = "float32"
    value: int | float | bool = struct.unpack(order + _NUMBERS[dtype], data)[0]
    return value


def element(value: int | float | bool, dtype: str, order: str) -> bytes:
    """The bytes of one element that holds `value`, as near as a rounded float is.

    Raises ValueError if `dtype` can't hold it."""
    try:
        if dtype == "bfloat16":
            data = struct.pack(order + "f", value)
            data = data[2:] if order == "<" else data[:2]
        else:
            data = struct.pack(order + _NUMBERS[dtype], value)
    except (KeyError, OverflowError, struct.error):
        data = b""
    if not data or not _close(number(data, dtype, order), value):
        raise ValueError(f"{dtype} can't hold {value!r}")
    return data


def _close(stored: float, value: float) -> bool:
    if stored == value or (stored != stored and value != value):
        return True
    return isinstance(stored, float) and abs(stored - value) <= abs(value) * 2**-8


def floats(data: bytes, dtype: str, order: str = "<") -> Any:
    """The elements as an array, bfloat16 as float32. Raises KeyError unless `dtype` is in
    `FLOATS`."""
    import numpy

    if dtype == "bfloat16":
        return (numpy.frombuffer(data, f"{order}u2").astype("u4") << 16).view("f4")
    return numpy.frombuffer(data, order + _FLOATS[dtype])


def from_floats(values: Any, dtype: str) -> bytes:
    """An array as elements, little-endian, each rounded to nearest, ties to even."""
    if dtype != "bfloat16":
        return bytes(values.astype("<" + _FLOATS[dtype]).tobytes())
    bits = values.astype("<f4").view("<u4")
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return bytes(rounded.astype("<u2").tobytes())
