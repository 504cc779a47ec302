"""Reads the numbers of a `Woven`: rows that lie in several files, each row some bytes of each.

They are read through the page cache: what one range of columns passes over, the next one wants.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

from ckptsurgeon.plans.sources import Columns, Woven

NEAR = 4
"""Columns that are at least so small a part of their rows are read row by row; of others, what lies
between them is read with them."""


class Weaver:
    """The bytes of a `Woven`, ascending, in memory that it is given: at least as much as the
    largest part that is asked for."""

    def __init__(self, root: Path, woven: Woven, room: memoryview) -> None:
        self._woven, self._room, self._at = woven, room, woven.start
        self._open: dict[str, int] = {}
        with contextlib.ExitStack() as opened:
            for name in dict.fromkeys(each.file for each in woven.columns):
                self._open[name] = os.open(root / name, os.O_RDONLY | os.O_CLOEXEC)
                opened.callback(os.close, self._open[name])
            self._close = opened.pop_all()

    def __enter__(self) -> Weaver:
        return self

    def __exit__(self, *_: object) -> None:
        self._close.close()

    def next(self, size: int) -> memoryview:
        """So many bytes more, until the next call; fewer where they end, or where a file does."""
        row = self._woven.row
        done, size = 0, min(size, self._woven.end - self._at)
        while done < size:
            number, inside = divmod(self._at + done, row)
            rows = 0 if inside else (size - done) // row
            more = rows * row if rows else min(row - inside, size - done)
            room = self._room[done : done + more]
            whole = self._rows(room, number, rows) if rows else self._piece(room, number, inside)
            if not whole:
                break
            done += more
        self._at += done
        return self._room[:done]

    def _rows(self, room: memoryview, first: int, count: int) -> bool:
        """So many whole rows, each column in its place; whether all of them were there."""
        import numpy

        out = numpy.frombuffer(room, "u1").reshape(count, self._woven.row)
        left = 0
        for each in self._woven.columns:
            found = self._columns(each, first, count)
            if found is None:
                return False
            out[:, left : left + each.row] = found
            left += each.row
        return True

    def _columns(self, each: Columns, first: int, count: int) -> Any:
        """So many rows of these columns as an array; None where the file ends before."""
        import numpy

        file, start = self._open[each.file], each.start + first * each.stride
        if each.cells > 1:
            return self._turned(each, first, count, range(each.cells))
        if each.stride > NEAR * each.width:
            starts = range(start, start + count * each.stride, each.stride)
            data = b"".join(os.pread(file, each.width, at) for at in starts)
            if len(data) < count * each.width:
                return None
            return numpy.frombuffer(data, "u1").reshape(count, each.width)
        data = os.pread(file, (count - 1) * each.stride + each.width, start)
        if len(data) < (count - 1) * each.stride + each.width:
            return None
        flat = numpy.frombuffer(data, "u1")
        return numpy.lib.stride_tricks.as_strided(flat, (count, each.width), (each.stride, 1))

    def _turned(self, each: Columns, first: int, count: int, cells: range) -> Any:
        """These cells of so many rows, where the rows of the file are the columns of the matrix;
        None where the file ends before."""
        import numpy

        file, length = self._open[each.file], (count - 1) * each.stride + each.width
        start = each.start + first * each.stride
        data = b"".join(os.pread(file, length, start + cell * each.step) for cell in cells)
        if len(data) < len(cells) * length:
            return None
        if each.stride == each.width and each.width in (1, 2, 4, 8):
            whole = numpy.frombuffer(data, f"u{each.width}").reshape(len(cells), count)
            return numpy.ascontiguousarray(whole.T).view("u1")
        flat, width = numpy.frombuffer(data, "u1"), each.width
        shape, strides = (count, len(cells), width), (each.stride, length, 1)
        found = numpy.lib.stride_tricks.as_strided(flat, shape, strides)
        return found.reshape(count, len(cells) * width)

    def _piece(self, room: memoryview, number: int, inside: int) -> bool:
        """A part of one row, from the byte `inside` it on; whether all of it was there."""
        done = left = 0
        for each in self._woven.columns:
            begin, end = max(inside, left), min(inside + len(room), left + each.row)
            if begin < end and each.cells > 1:
                cells = range((begin - left) // each.width, -(-(end - left) // each.width))
                found = self._turned(each, number, 1, cells)
                if found is None:
                    return False
                at = begin - left - cells[0] * each.width
                room[done : done + end - begin] = found.tobytes()[at : at + end - begin]
                done += end - begin
            elif begin < end:
                at = each.start + number * each.stride + begin - left
                part = room[done : done + end - begin]
                if os.preadv(self._open[each.file], [part], at) < len(part):
                    return False
                done += len(part)
            left += each.row
        return True
