"""The bytes of a `Content`, read piece by piece."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.plans.edits import Checksum, Computed, Content, Hole, Piece, Span, length

CHUNK = 1 << 20
"""Bytes that are in memory at once."""
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
    """Its spans by the file that they are in, each with its offset."""
    found: dict[str, list[tuple[int, Span]]] = {}
    for at, piece in placed(content):
        if isinstance(piece, Span):
            found.setdefault(piece.file, []).append((at, piece))
    return list(found.values())


def between(file: BinaryIO, start: int, end: int) -> Iterator[bytes]:
    """The bytes [start, end) of an open file. Raises SurgeryError when it is too short."""
    file.seek(start)
    while start < end:
        data = file.read(min(end - start, CHUNK))
        if not data:
            raise SurgeryError(f"{file.name} shrank while it was being read", next="try again")
        yield data
        start += len(data)
