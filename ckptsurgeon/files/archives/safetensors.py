"""A safetensors file, read as torch's archives are: one storage for each tensor, and no pickle.

Its tree is a dict of the tensors by name. Source of the layout: see `files/safetensors_header.py`.
"""

from __future__ import annotations

import json
import os
import stat
import struct
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

from ckptsurgeon.errors import DamagedFile, count
from ckptsurgeon.files.archives.archive import Archive
from ckptsurgeon.files.archives.zip_directory import Record
from ckptsurgeon.files.dtypes import ITEM_BYTES, SAFETENSORS
from ckptsurgeon.files.pickles.tree import Tensor, axes, strides
from ckptsurgeon.plans.edits import Key
from ckptsurgeon.remote import reads

LENGTH = 8
SEPARATOR = "/"
PROBE = 1024
"""Elements that nearly always tell whether a tensor is zeros."""
SHARDING = "DCP_SHARDING_INFO"
MAX_HEADER = 100_000_000
"""The longest header that the safetensors library reads."""
DTYPES = {name: dtype for dtype, name in SAFETENSORS.items()} | {
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "U16": "uint16", "U32": "uint32",
    "U64": "uint64",
}  # fmt: skip


class SafetensorsFile(Archive):
    """A whole file whose header agrees with its size. There are no CRCs. `offsets` are where each
    tensor begins in the one that it is cut from, if torch's writer cut it."""

    offsets: Mapping[str, tuple[int, ...]]

    @classmethod
    def open(cls, path: Path, start: int = 0, length: int | None = None) -> SafetensorsFile:
        """Read the header of `path`. Tensors of a dtype that torch has no name for are so many
        bytes. Raises DamagedFile, or OSError if it can't be opened."""
        file = cls(path, start, str(path))
        descriptor = reads.opened(path, os.O_NONBLOCK)
        try:
            file._read_header(descriptor)
        finally:
            os.close(descriptor)
        return file

    def are_zeros(self, tensors: Sequence[Tensor]) -> list[bool]:
        """Of each what `is_zero` says."""
        with self.reading():
            return super().are_zeros(tensors)

    def is_zero(
        self, tensor: Tensor, elements: tuple[int, int] | None = None, byte: int = 0
    ) -> bool:
        """By the bytes, as there are no CRCs."""
        start, end = elements or (0, tensor.numel)
        inner = min(end, start + PROBE)
        return super().is_zero(tensor, (start, inner), byte) and super().is_zero(
            tensor, (inner, end), byte
        )

    def _read_header(self, descriptor: int) -> None:
        self.status = reads.status(descriptor)
        if not stat.S_ISREG(self.status.st_mode):
            raise DamagedFile(self.where, 0, "this is not a regular file")
        self.size, self.directory, self.folder = self.status.st_size, None, ""
        reads.need(descriptor, [(0, LENGTH)])
        first = os.pread(descriptor, LENGTH, 0)
        length = struct.unpack("<Q", first)[0] if len(first) == LENGTH else 0
        if not 0 < length <= min(MAX_HEADER, self.size - LENGTH):
            what = f"a header of {count(length, 'byte')}, in a file of {self.size}"
            raise DamagedFile(self.where, 0, what)
        reads.need(descriptor, [(LENGTH, LENGTH + length)])
        data = os.pread(descriptor, length, LENGTH)
        try:
            document = json.loads(data)
            entries = {str(k): v for k, v in document.items() if k != "__metadata__"}
            found = {name: _entry(name, entry) for name, entry in entries.items()}
            offsets = _offsets(document.get("__metadata__") or {})
        except (
            ArithmeticError,
            ValueError,
            LookupError,
            TypeError,
            AttributeError,
            RecursionError,
        ) as error:
            what = f"the header is none of safetensors ({type(error).__name__}: {error})"
            raise DamagedFile(self.where, LENGTH, what[:200]) from None
        at, records = LENGTH + length, {}
        for name, (_, begin, size) in sorted(found.items(), key=lambda item: item[1][1:]):
            if LENGTH + length + begin != at:
                raise DamagedFile(self.where, at, f"{name!r} begins at byte {begin} of the data")
            records[f"data/{name}"] = Record(f"data/{name}", at, size, 0, 0, 0, size, 0)
            at += size
        if at != self.size:
            raise DamagedFile(self.where, self.size, f"the tensors end at byte {at}")
        self.records, self.offsets = records, offsets
        self._tree = {name: tensor for name, (tensor, _, _) in found.items()}


def _offsets(metadata: Mapping[str, str]) -> dict[str, tuple[int, ...]]:
    """By `_write_item` of torch's `distributed/checkpoint/filesystem.py`."""
    cut = json.loads(metadata.get(SHARDING, "{}"))
    return {str(name): axes(tuple(map(int, info["saved_offsets"]))) for name, info in cut.items()}


def _entry(name: str, entry: Mapping[str, Any]) -> tuple[Tensor, int, int]:
    """A tensor, its first byte in the data, and how many it has."""
    begin, end = entry["data_offsets"]
    shape, dtype = axes(tuple(entry["shape"])), DTYPES.get(entry["dtype"], "")
    if not dtype:
        dtype, shape = "uint8", (end - begin,)
    whole = all(type(number) is int and number >= 0 for number in (begin, end, *shape))
    if not whole or end - begin != prod(shape) * ITEM_BYTES[dtype]:
        raise ValueError(f"{name!r} has the shape {shape} in bytes {begin} to {end}")
    return Tensor(dtype, name, prod(shape), 0, shape, strides(shape)), begin, end - begin


class FlattenedFile(SafetensorsFile):
    """One in which a dict of dicts was saved: each name is a key path, joined by SEPARATOR. Its
    tree is that dict; a key of digits alone is a number, as that of a parameter in torch's state
    is."""

    def _read_header(self, descriptor: int) -> None:
        super()._read_header(descriptor)
        tree: dict[Key, Any] = {}
        for name, tensor in self._tree.items():
            *folders, last = (int(k) if k.isdecimal() else k for k in name.split(SEPARATOR))
            inner: Any = tree
            for key in folders:
                inner = inner.setdefault(key, {}) if isinstance(inner, dict) else inner
            if not isinstance(inner, dict) or last in inner:
                what = f"{name!r} is a tensor, and what others lie in"
                raise DamagedFile(self.where, LENGTH, what)
            inner[last] = tensor
        self._tree = tree
