"""What a cut leaves of a table or of JSON lines, byte for byte."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from ckptsurgeon.logs.marks import Marks
from ckptsurgeon.logs.row_file import RowFile
from ckptsurgeon.logs.source import Cut
from ckptsurgeon.plans.edits import AnyChange, Content, Rewrite, Span


def made(root: Path, changes: Iterable[AnyChange]) -> dict[str, bytes]:
    """The new bytes of each file."""
    out = {}
    for change in changes:
        assert isinstance(change, Rewrite)
        assert isinstance(change.content, Content)
        data = b""
        for piece in change.content.pieces:
            if isinstance(piece, Span):
                piece = (root / piece.file).read_bytes()[piece.start : piece.end]
            assert isinstance(piece, bytes)
            data += piece
        out[change.file] = data
    return out


def cut(path: Path, step: int, *, saved: float | None = None, keep: str | None = None) -> bytes:
    """What a cut leaves of the file."""
    changes, _ = RowFile(path, path.parent).cut(Cut(Marks(step, saved_at=saved), keep))
    return made(path.parent, changes).get(path.name, path.read_bytes())
