"""The bytes of a `Content`, read piece by piece."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from ckptsurgeon import disk
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.plans.edits import Checksum, Computed, Content, Hole, Piece, Span, length
from ckptsurgeon.workers import side_by_side

CHUNK = 1 << 20
"""Bytes that are in memory at once."""
SHORT = 1 << 16
"""Bytes of a span that is read and written with its neighbours; a longer one the kernel copies, and
may share its blocks."""
_ZEROS = bytes(CHUNK)


def read(root: Path, content: Content) -> Iterator[bytes]:
    """All bytes, in order. Raises SurgeryError when a file that they are in is too short, or if
    some of them are yet to be computed."""
    for piece in joined(content.pieces):
        if isinstance(piece, bytes):
            yield piece
        elif isinstance(piece, Hole):
            whole, rest = divmod(piece.size, CHUNK)
            yield from (_ZEROS for _ in range(whole))
            yield bytes(rest)
        elif isinstance(piece, (Computed, Checksum)):
            raise SurgeryError(
                "a sum is asked for of bytes that are computed only when they are written",
                next="a checkpoint with integrity.json takes edits of its numbers, no new tensors",
            )
        else:
            with (root / piece.file).open("rb") as file:
                yield from between(file, piece.start, piece.end)


def joined(pieces: Iterable[Piece]) -> Iterator[Piece]:
    """The same content with neighbouring bytes in one piece, up to CHUNK: the appended bytes of
    10,000 tensors are 10,000 pieces."""
    few: list[bytes] = []
    size = 0
    for piece in pieces:
        if isinstance(piece, bytes) and size + len(piece) <= CHUNK:
            few.append(piece)
            size += len(piece)
            continue
        if few:
            yield b"".join(few)
            few, size = [], 0
        yield piece
    if few:
        yield b"".join(few)


def placed(content: Content) -> Iterator[tuple[int, Piece]]:
    """Its pieces, and the byte at which each begins."""
    at = 0
    for piece in joined(content.pieces):
        yield at, piece
        at += length(piece)


def spans(content: Content) -> list[list[tuple[int, Span]]]:
    """Its spans that `batches` leaves out, by the file that they are in, each with its offset."""
    found: dict[str, list[tuple[int, Span]]] = {}
    for at, piece in placed(content):
        if isinstance(piece, Span) and not _is_short(piece):
            found.setdefault(piece.file, []).append((at, piece))
    return list(found.values())


def batches(root: Path, target: Path, content: Content) -> Iterator[tuple[int, bytes]]:
    """Its bytes, and its short spans as bytes, with their offsets: neighbours in one, up to CHUNK.
    The files are read side by side. Raises OSError for a file that may not be copied into `target`
    (`disk.read_from`), and when it is too short."""
    few: list[bytes | Span] = []
    begin = end = 0
    for at, piece in placed(content):
        known = isinstance(piece, bytes) or (isinstance(piece, Span) and _is_short(piece))
        if few and not (known and at == end and at + length(piece) - begin <= CHUNK):
            yield begin, _read(root, target, few)
            few = []
        if known and isinstance(piece, (bytes, Span)):
            begin = begin if few else at
            few.append(piece)
            end = at + length(piece)
    if few:
        yield begin, _read(root, target, few)


def _is_short(span: Span) -> bool:
    return span.end - span.start <= SHORT


def _read(root: Path, target: Path, pieces: Sequence[bytes | Span]) -> bytes:
    by_file: dict[str, list[Span]] = {}
    for piece in pieces:
        if isinstance(piece, Span):
            by_file.setdefault(piece.file, []).append(piece)

    def read_file(name: str) -> list[bytes]:
        path = root / name
        descriptor = disk.read_from(path, target)
        try:
            each = [os.pread(descriptor, s.end - s.start, s.start) for s in by_file[name]]
        finally:
            os.close(descriptor)
        for span, data in zip(by_file[name], each, strict=True):
            if len(data) < span.end - span.start:
                raise OSError(errno.EIO, f"ends before byte {span.end}", str(path))
        return each

    found = {n: iter(e) for n, e in zip(by_file, side_by_side(read_file, by_file), strict=True)}
    return b"".join(next(found[p.file]) if isinstance(p, Span) else p for p in pieces)


def between(file: BinaryIO, start: int, end: int) -> Iterator[bytes]:
    """The bytes [start, end) of an open file. Raises SurgeryError when it is too short."""
    file.seek(start)
    while start < end:
        data = file.read(min(end - start, CHUNK))
        if not data:
            raise SurgeryError(f"{file.name} shrank while it was being read", next="try again")
        yield data
        start += len(data)
