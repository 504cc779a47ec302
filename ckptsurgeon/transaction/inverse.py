"""The edits that take edits back."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from ckptsurgeon import disk
from ckptsurgeon.plans.edits import Append, Edit, Inverse, Move, Replace, Span, Tail, Truncate
from ckptsurgeon.transaction.home import ATTIC, HOME


def kept_tails(id: str) -> str:
    """Where an undo keeps the bytes that it cuts off, those of all files one after the other."""
    return f"{HOME}/{ATTIC}/{id}/{HOME}.tails"


def staged_tails(id: str) -> str:
    """Where they are before that."""
    return kept_tails(id).replace(f"/{ATTIC}/", "/staging/")


def cut_off(root: Path, id: str) -> Path:
    """Where those bytes are now: in the attic, or in the staging before that."""
    path = root / kept_tails(id)
    return path if disk.is_there(path) else root / staged_tails(id)


def kept(edits: Iterable[Edit], id: str) -> list[tuple[Truncate, Tail]]:
    """What is cut off each file, and where it is kept, one after the other; nothing where it is not
    copied to there."""
    edits = tuple(edits)
    contents = [e.content for e in edits if isinstance(e, Move) and e.dst == kept_tails(id)]
    pieces = [piece for content in contents if content for piece in content.pieces]
    if not pieces or not all(isinstance(piece, Span) for piece in pieces):
        return []
    cut = {edit.file: edit for edit in edits if isinstance(edit, Truncate)}
    tails = [edit for edit in inverse(edits, id) if isinstance(edit, Tail)]
    return [(cut[tail.file], tail) for tail in sorted(tails, key=lambda tail: tail.at)]


def inverse(edits: Iterable[Edit], id: str) -> tuple[Inverse, ...]:
    """The edits that bring back the state before surgery `id`, in order; none for a plan that cuts
    off bytes and does not keep them (`kept_tails`)."""
    edits = tuple(edits)
    tails = any(isinstance(edit, Move) and edit.dst == kept_tails(id) for edit in edits)
    out: list[Inverse] = []
    at = 0
    for edit in edits:
        if isinstance(edit, Truncate):
            if not tails:
                return ()
            tail = Tail(
                edit.file,
                old_size=edit.old_size,
                spans=edit.spans,
                at=at,
                digest=edit.digest,
                anchor="",
                mtime_ns=edit.mtime_ns,
                new_mtime_ns=edit.new_mtime_ns,
            )
            at += tail.size
            out.append(tail)
        elif isinstance(edit, Append):
            out.append(
                Truncate(
                    edit.file,
                    old_size=edit.old_size,
                    new_size=edit.new_size,
                    digest=edit.digest,
                    spans=edit.spans,
                    mtime_ns=edit.mtime_ns,
                    new_mtime_ns=edit.new_mtime_ns,
                )
            )
        elif isinstance(edit, Replace):
            out.append(Replace(edit.file, staged=edit.kept, kept=edit.staged))
        elif edit.dst != kept_tails(id):
            out.append(Move(edit.dst, edit.src))
    return tuple(reversed(out))
