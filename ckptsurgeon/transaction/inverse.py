"""The edits that take edits back."""

from __future__ import annotations

from collections.abc import Iterable

from ckptsurgeon.edits import Append, Edit, Move, Replace, Truncate


def inverse(edits: Iterable[Edit]) -> tuple[Edit, ...]:
    """The edits that bring back the state before, in order; none for a plan that truncates, since
    the bytes it cuts off are not kept: such a plan is an undo, and is undone by its recipe."""
    out: list[Edit] = []
    for edit in edits:
        if isinstance(edit, Truncate):
            return ()
        if isinstance(edit, Append):
            out.append(
                Truncate(
                    edit.file,
                    old_size=edit.old_size,
                    new_size=edit.new_size,
                    digest=edit.digest,
                    spans=edit.spans,
                    mtime_ns=edit.mtime_ns,
                )
            )
        elif isinstance(edit, Replace):
            out.append(Replace(edit.file, staged=edit.kept, kept=edit.staged))
        else:
            out.append(Move(edit.dst, edit.src))
    return tuple(reversed(out))
