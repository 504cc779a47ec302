"""Reads back what was staged, from the device where the kernel allows, so that a disk that lies is
found before the commit. Reads only; whatever differs raises SurgeryError."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.plans.edits import Checksum, Content, Hole, Span, Tail, Truncate
from ckptsurgeon.transaction.assumptions import check_size
from ckptsurgeon.transaction.computing import Sum
from ckptsurgeon.transaction.content import batches, between, placed, read, spans
from ckptsurgeon.transaction.job_list import unlike
from ckptsurgeon.transaction.reading import ALIGN, ROOM, Reader, Rooms, forget
from ckptsurgeon.transaction.staged import Staged
from ckptsurgeon.workers import side_by_side

LEAP = 8 << 20
"""Bytes that are copied before the kernel is told to write them."""


def compare(path: Path, root: Path, content: Content, known: Mapping[int, bytes]) -> None:
    """Compare every byte of a staged file that was not computed; `known` are its checksums."""
    with path.open("rb") as staged:
        descriptor = staged.fileno()
        forget(descriptor, 0, 0)

        def compare(at: int, pieces: Iterable[bytes]) -> None:
            begin = at
            for data in pieces:
                if os.pread(descriptor, len(data), at) != data:
                    raise unlike(path, at)
                at += len(data)
                if (at - begin) % LEAP < len(data):
                    forget(descriptor, begin, at)

        def compare_spans(spans: Sequence[tuple[int, Span]]) -> None:
            with (root / spans[0][1].file).open("rb") as source:
                for at, span in spans:
                    compare(at, between(source, span.start, span.end))

        for at, piece in placed(content):
            if isinstance(piece, (Checksum, Hole)):
                whole = known[at] if isinstance(piece, Checksum) else piece
                compare(at, read(root, Content((whole,))))
        for at, data in batches(root, path, content):
            compare(at, (data,))
        side_by_side(compare_spans, spans(content))
        _refuse_longer(path, os.fstat(descriptor).st_size, content.size)


def check_sum(rooms: Rooms, path: Path, part: Sum) -> None:
    """Read back what was computed, and compare it by its CRC-32."""
    crc, end = 0, part.offset + part.size
    (room,) = rooms.get(1, min(ROOM, part.size + ALIGN))
    with Reader(path, part.offset, end, room) as staged:
        for data in staged.all():
            crc = zlib.crc32(data, crc)
    if crc != part.crc:
        raise unlike(path, part.offset)


def check_kept(path: Path, root: Path, kept: Sequence[tuple[Truncate, Tail]]) -> None:
    """Compare the bytes that an undo cuts off, and keeps in `path`, by their sha256 with those that
    the surgery wrote. So a file that got other bytes since is found too, and is named."""
    with path.open("rb") as file:
        forget(file.fileno(), 0, 0)
        _refuse_longer(path, os.fstat(file.fileno()).st_size, sum(tail.size for _, tail in kept))
    with Staged(path) as staged:
        for cut, tail in kept:
            if staged.digest(tail.at, tail.at + tail.size) != tail.digest:
                check_size(root / cut.file, cut)
                raise unlike(path, tail.at)


def _refuse_longer(path: Path, size: int, written: int) -> None:
    if size != written:
        raise SurgeryError(
            f"{path} is longer than what was written",
            next="check the disk and its kernel log before anything else",
        )
