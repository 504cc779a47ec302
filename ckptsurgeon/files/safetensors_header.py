"""The header of a safetensors file: eight bytes of length, then JSON, then the tensors' bytes.

Source: the format's own description. Offsets count from the end of the header; tensors lie one
after the other without gaps, and the header ends at a multiple of 8.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable
from typing import Any

from ckptsurgeon.files.dtypes import SAFETENSORS


def encode(tensors: Iterable[tuple[str, str, tuple[int, ...], int]]) -> bytes:
    """Length and header for tensors (name, torch dtype, shape, bytes) in the order of their bytes.

    Raises KeyError for a dtype that the format does not have."""
    document: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, dtype, shape, size in tensors:
        document[name] = {
            "dtype": SAFETENSORS[dtype],
            "shape": list(shape),
            "data_offsets": [at, at + size],
        }
        at += size
    text = json.dumps(document, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text
