"""The element types of tensors: their names, their sizes in bytes, and their values as bytes."""

from __future__ import annotations

import struct

from ckptsurgeon.transaction.arithmetic import ITEM
from ckptsurgeon.transaction.arithmetic import floats as floats
from ckptsurgeon.transaction.arithmetic import from_floats as from_floats

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

NUMPY = {
    "f8": "float64", "f4": "float32", "f2": "float16", "i8": "int64", "i4": "int32", "i2": "int16",
    "i1": "int8", "u1": "uint8", "b1": "bool",
}  # fmt: skip
"""numpy's name → torch's."""

FLOATS = tuple(ITEM)
"""What `floats` can read. A bfloat16 is the upper half of a float32."""

SAFETENSORS = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64",
    "int32": "I32", "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip
"""torch's name → that of the safetensors format."""

_NUMBERS = {
    "float64": "d", "float32": "f", "float16": "e", "int64": "q", "int32": "i", "int16": "h",
    "int8": "b", "uint8": "B", "uint16": "H", "uint32": "I", "uint64": "Q", "bool": "?",
}  # fmt: skip
NUMBERS = frozenset((*_NUMBERS, "bfloat16"))
"""What `number` can read."""


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
