"""sha256 of stretches of a file, by which a surgery knows the bytes that it wrote, and those that
it writes after."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

from ckptsurgeon.plans.edits import Append
from ckptsurgeon.plans.spans import rows
from ckptsurgeon.remote import reads
from ckptsurgeon.workers import side_by_side

ANCHOR = 4096
"""Bytes before `old_size` that are compared before a tail is written after them."""


def anchored(old_size: int) -> list[tuple[int, int]]:
    """Where those are."""
    return [(max(0, old_size - ANCHOR), old_size)]


def read_anchors(root: Path, edits: Iterable[Append]) -> dict[str, str]:
    """The digest of those of each file that grows."""

    def read(edit: Append) -> tuple[str, str]:
        return edit.file, tail_digest(root / edit.file, anchored(edit.old_size))

    return dict(side_by_side(read, edits))


PIECE = 1 << 16
"""Bytes that are read at once to be digested: for fewer than 128 KiB malloc asks the kernel for no
pages of their own, each of which would be a page fault."""


def tail_digest(path: Path, spans: Iterable[tuple[int, int]]) -> str:
    """sha256 of the bytes [start, end) of each span, in order."""
    descriptor = reads.opened(path)
    try:
        spans = tuple(spans)
        reads.need(descriptor, spans)
        return digest_of(descriptor, spans)
    finally:
        os.close(descriptor)


def digest_of(descriptor: int, spans: Iterable[tuple[int, int]]) -> str:
    """The same of an open file. Spans that touch are read at once."""
    digest = hashlib.sha256()
    for row in rows(tuple(spans), 0):
        start, end = row[0][0], row[-1][1]
        while start < end:
            piece = os.pread(descriptor, min(end - start, PIECE), start)
            if not piece:
                break
            digest.update(piece)
            start += len(piece)
    return digest.hexdigest()
