"""The header of a safetensors file: eight bytes of length, then JSON, then the tensors' bytes.

Source: the format's own description. Offsets count from the end of the header; tensors lie one
after the other without gaps, and the header ends at a multiple of 8.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable
from typing import Any

from ckptsurgeon.errors import DamagedFile

DTYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64",
    "int32": "I32", "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip
"""torch's name → the format's."""
MAX_HEADER = 100_000_000
"""Bytes of the longest header that the library itself reads."""


def encode(tensors: Iterable[tuple[str, str, tuple[int, ...], int]]) -> bytes:
    """Length and header for tensors (name, torch dtype, shape, bytes) in the order of their bytes.

    Raises KeyError for a dtype that the format does not have."""
    document: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, dtype, shape, size in tensors:
        document[name] = {
            "dtype": DTYPES[dtype],
            "shape": list(shape),
            "data_offsets": [at, at + size],
        }
        at += size
    text = json.dumps(document, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def decode(path: str, size: int, head: bytes, rest: bytes) -> dict[str, Any]:
    """The document of a header, `head` its eight bytes and `rest` what follows them. Raises
    DamagedFile if it is none, or if a tensor leaves the file of `size` bytes."""
    (length,) = struct.unpack("<Q", head)
    try:
        if not 2 <= length <= min(MAX_HEADER, size - 8) or len(rest) < length:
            raise ValueError(f"a header of {length} bytes")
        document = json.loads(rest[:length])
        for name, entry in document.items():
            if name == "__metadata__":
                continue
            start, end = entry["data_offsets"]
            inside = isinstance(start, int) and isinstance(end, int)
            if not (inside and 0 <= start <= end <= size - 8 - length):
                raise ValueError(f"the tensor {name!r} leaves the file")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedFile(path, 8, f"no safetensors header: {error}") from None
    return dict(document)
