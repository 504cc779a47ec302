"""Folders that a surgery moved to its attic: nothing there is a run, and who asks for one is shown
where it is now, and the way back."""

from __future__ import annotations

import contextlib
from pathlib import Path

from ckptsurgeon import disk
from ckptsurgeon.errors import UsageError
from ckptsurgeon.hints import Hint, again, command
from ckptsurgeon.plans.edits import Move, relative
from ckptsurgeon.plans.plan import Receipt
from ckptsurgeon.transaction import receipts
from ckptsurgeon.transaction.home import ATTIC, HOME, has_receipts, in_attic, kept_by


def refuse_moved(start: Path) -> None:
    """Raise UsageError for a folder inside an attic, and for one that is gone because a surgery
    moved it there. Both know the surgery by its receipt."""
    here = start.resolve()
    kept = kept_by(here)
    if kept is not None:
        root = _root(kept[0]) or kept[0]
        receipt, name = _taken(root, relative(here, root))
        if receipt is None:
            raise UsageError(
                f"{here} is in the attic of surgery {kept[1]}: no run is in there",
                next=again("-C", root),
            )
        raise _away(root, receipt, name)
    above = None if disk.is_folder(here) else _root(here)
    if above is not None:
        name = relative(here, above)
        receipt = _taker(above, name)
        if receipt is not None:
            raise _away(above, receipt, name)


def nearest(named: Path) -> Path:
    """`named`, or the nearest folder above it that is still in the run."""
    with contextlib.suppress(OSError):
        kept = kept_by(named.resolve())
        if kept is not None:
            return _root(kept[0]) or kept[0]
    while named != named.parent:
        with contextlib.suppress(OSError):  # a name that is too long for any folder
            if disk.is_folder(named):
                break
        named = named.parent
    return named


def _away(root: Path, receipt: Receipt, name: str) -> UsageError:
    hints: list[Hint] = [again("-C", root, why="the run that it was in")]
    standing = receipts.standing(receipts.read(root))
    if standing and standing[-1].id == receipt.id:
        hints.append(command("undo", receipt.id, why="brings it back"))
    return UsageError(
        f"{name} is no longer in the run: surgery {receipt.id} ({receipt.title}) moved it to "
        f"{root / HOME / ATTIC / receipt.id}",
        next=hints,
    )


def _root(path: Path) -> Path | None:
    """The nearest folder at or above it that has receipts."""
    return next((p for p in (path, *path.parents) if has_receipts(p)), None)


def _taken(root: Path, kept: str) -> tuple[Receipt | None, str]:
    """The surgery that keeps what lies at `kept`, and what that was called in the run."""
    for receipt in reversed(receipts.read(root)):
        for edit in receipt.inverse:
            if isinstance(edit, Move) and f"{kept}/".startswith(f"{edit.src}/"):
                return receipt, edit.dst + kept[len(edit.src) :]
    return None, ""


def _taker(root: Path, gone: str) -> Receipt | None:
    """The surgery in force that moved `gone`, or a folder that it lies in, to its attic."""
    for receipt in reversed(receipts.standing(receipts.read(root))):
        for edit in receipt.inverse:
            if (
                isinstance(edit, Move)
                and in_attic(edit.src)
                and f"{gone}/".startswith(f"{edit.dst}/")
            ):
                return receipt
    return None
