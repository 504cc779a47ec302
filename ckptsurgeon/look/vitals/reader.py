"""The open files of one thread, and the arrays that it reads elements into."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

from ckptsurgeon.errors import DamagedFile
from ckptsurgeon.files.archives.archive import Archive
from ckptsurgeon.files.dtypes import ITEM_BYTES
from ckptsurgeon.look.vitals import pairs
from ckptsurgeon.look.vitals.jobs import Range
from ckptsurgeon.remote import reads

BLOCK = 1 << 15
"""Elements that are worked on at once: four arrays of them fit into a second-level cache."""
OPEN = 16
"""Descriptors of one thread: a checkpoint may have a record for each of thousands of tensors."""
AHEAD = 8 << 20
"""Bytes that the kernel is asked for before they are read."""


class Reader:
    """The files of one thread, each record through a descriptor of its own, so that the kernel sees
    that it is read from its start to its end; and the arrays that elements are read into."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        import numpy

        stack.callback(self._close, 0)
        self._descriptors: dict[tuple[Path, int, str], tuple[contextlib.ExitStack, int]] = {}
        self._asked: dict[tuple[Path, int, str], int] = {}
        self.raw = [numpy.empty(BLOCK * 8, "u1") for _ in range(6)]
        self.fp32 = [numpy.empty(BLOCK, "f4") for _ in range(6)]
        self.rooms = {dtype: pairs.Room(BLOCK, dtype) for dtype in ("f4", "f8")}

    def block(self, item: Range, at: int, size: int, slot: int) -> tuple[Any, Any]:
        """`size` elements from the `at`-th on as floats, and as they are kept (16 bits as such)."""
        import numpy

        width = ITEM_BYTES[item.dtype]
        raw = self.raw[slot][: size * width]
        self._read(item.archive, item.record, item.start + at * width, raw)
        order = item.archive.byte_order()
        if item.dtype in ("float32", "float64"):
            kept = raw.view(f"{order}f{width}")
            values = kept if order == "<" else kept.astype(f"f{width}")
            return values, values
        kept = raw.view(f"{order}u2")
        values = self.fp32[slot][:size]
        if item.dtype == "bfloat16":
            bits = values.view("u4")
            numpy.copyto(bits, kept)
            numpy.left_shift(bits, 16, out=bits)
        else:
            with numpy.errstate(all="ignore"):
                numpy.copyto(values, raw.view(f"{order}f2"))
        return values, kept

    def whole(self, archive: Archive, record: str, start: int, length: int) -> Any:
        """So many bytes at once."""
        import numpy

        raw = numpy.empty(length, "u1")
        self._read(archive, record, start, raw)
        return raw

    def _read(self, archive: Archive, record: str, start: int, into: Any) -> None:
        key = (archive.path, archive.start, record)
        if key not in self._descriptors:
            self._close(OPEN - 1)
            inner = contextlib.ExitStack()
            self._descriptors[key] = inner, inner.enter_context(archive.opened())
        descriptor, at = self._descriptors[key][1], archive.start + start
        end = at + into.nbytes
        if end > self._asked.get(key, 0):
            reads.need(descriptor, [(at, end + AHEAD)])
            os.posix_fadvise(descriptor, end, AHEAD, os.POSIX_FADV_WILLNEED)
            self._asked[key] = end + AHEAD // 2
        view = memoryview(into).cast("B")
        done = 0
        while done < view.nbytes:
            more = os.preadv(descriptor, [view[done:]], at + done)
            if not more:
                raise DamagedFile(str(archive.path), at + done, "the file is cut short")
            done += more

    def _close(self, left: int) -> None:
        """Close the oldest descriptors until so many are left."""
        while len(self._descriptors) > left:
            key = next(iter(self._descriptors))
            self._descriptors.pop(key)[0].close()
            self._asked.pop(key, None)
