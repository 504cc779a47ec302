"""The header of a safetensors file: eight bytes of length, then JSON, then the tensors' bytes.

Source: the format's own description. Offsets count from the end of the header; tensors lie one
after the other without gaps, and the header ends at a multiple of 8.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from ckptsurgeon.errors import DamagedFile
from ckptsurgeon.files.dtypes import ITEM_BYTES, SAFETENSORS
from ckptsurgeon.files.pickles.tree import Tensor

LENGTH = 8
MAX_BYTES = 100_000_000
"""The longest header that the safetensors library reads."""
DTYPES = {name: dtype for dtype, name in SAFETENSORS.items()}


class Header(NamedTuple):
    """What is in one file: each tensor with its first byte, by name."""

    size: int
    tensors: Mapping[str, tuple[Tensor, int]]


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


def read(path: Path) -> Header:
    """The tensors of a file whose header agrees with its size; a dtype that torch has no plain
    numbers for keeps its own name. Raises DamagedFile, or OSError."""
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(0)
        start = file.read(LENGTH)
        length = struct.unpack("<Q", start)[0] if len(start) == LENGTH else 0
        if not 0 < length <= min(MAX_BYTES, size - LENGTH):
            raise DamagedFile(str(path), 0, f"a header of {length} bytes, in a file of {size}")
        data = file.read(length)
    try:
        document = json.loads(data)
        tensors = {
            str(name): _tensor(name, entry, LENGTH + length)
            for name, entry in document.items()
            if name != "__metadata__"
        }
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        what = f"the header is none of safetensors ({type(error).__name__}: {error})"
        raise DamagedFile(str(path), LENGTH, what[:200]) from None
    at = LENGTH + length
    for name, (tensor, first) in sorted(tensors.items(), key=lambda item: item[1][1]):
        if first != at:
            raise DamagedFile(str(path), at, f"{name!r} begins at byte {first}")
        at += tensor.numel * ITEM_BYTES.get(tensor.dtype, 1)
    if at != size:
        raise DamagedFile(str(path), size, f"the tensors end at byte {at}")
    return Header(size, tensors)


def _tensor(name: str, entry: Mapping[str, Any], base: int) -> tuple[Tensor, int]:
    """As a torch tensor that is alone in its storage; of an unknown dtype, as so many bytes."""
    begin, end = entry["data_offsets"]
    shape, dtype = tuple(entry["shape"]), DTYPES.get(entry["dtype"], "")
    if not dtype:
        dtype, shape = str(entry["dtype"]), (end - begin,)
    whole = all(type(number) is int and number >= 0 for number in (begin, end, *shape))
    if not whole or end - begin != prod(shape) * ITEM_BYTES.get(dtype, 1):
        raise ValueError(f"{name!r} has the shape {shape} in bytes {begin} to {end}")
    steps = tuple(prod(shape[axis + 1 :]) for axis in range(len(shape)))
    return Tensor(dtype, name, prod(shape), 0, shape, steps), base + begin
