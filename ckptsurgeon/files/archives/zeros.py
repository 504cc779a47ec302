"""A torch file of one tensor that is all zeros, in about a kilobyte whatever its size.

Its storage has one element, and all strides are 0: torch.load gives a tensor of the right dtype
and size, which a loader copies from.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence

from ckptsurgeon.files.archives.zip_directory import ENTRY, STORED
from ckptsurgeon.files.archives.zip_tail import end_records, local_header
from ckptsurgeon.files.dtypes import ITEM_BYTES, STORAGES

FOLDER = "archive"
UTF_8 = 0x0800
_CLASSES = {dtype: name for name, dtype in STORAGES.items() if name != "UntypedStorage"}


def is_possible(dtype: str) -> bool:
    """Whether torch has a storage class of this dtype."""
    return dtype in _CLASSES


def zeros(dtype: str, size: Sequence[int]) -> bytes:
    """The bytes that `torch.save` might have written. Raises KeyError unless `is_possible`."""
    records = {
        "data.pkl": _pickle(_CLASSES[dtype], size),
        "data/0": bytes(ITEM_BYTES[dtype]),
        "version": b"3\n",
    }
    out, entries = b"", b""
    for name, data in records.items():
        crc, full = zlib.crc32(data), f"{FOLDER}/{name}".encode()
        head = (b"PK\1\2", 0, 0, UTF_8, STORED, 0, 0, crc, len(data), len(data), len(full))
        entries += ENTRY.pack(*head, 0, 0, 0, 0, 0, len(out)) + full
        out += local_header(FOLDER, name, crc, len(data), len(out)) + data
    return out + entries + b"".join(end_records(len(records), len(entries), len(out)))


def _pickle(storage: str, size: Sequence[int]) -> bytes:
    """Protocol 2, by opcodes that `weights_only=True` knows."""
    place = b"(" + _text("storage") + _global("torch", storage) + _text("0") + _text("cpu")
    place += _number(1) + b"tQ"
    shape = b"(" + b"".join(map(_number, size)) + b"t"
    strides = b"(" + _number(0) * len(size) + b"t"
    hooks = _global("collections", "OrderedDict") + b")R"
    arguments = b"(" + place + _number(0) + shape + strides + b"\x89" + hooks + b"t"
    return b"\x80\2" + _global("torch._utils", "_rebuild_tensor_v2") + arguments + b"R."


def _global(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


def _text(text: str) -> bytes:
    return b"X" + struct.pack("<I", len(text)) + text.encode()


def _number(value: int) -> bytes:
    if value < 1 << 31:
        return b"J" + struct.pack("<i", value)
    return b"\x8a\x08" + struct.pack("<q", value)
