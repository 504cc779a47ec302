"""The plan that brings back the run from before a surgery, whatever the trainer wrote since."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ckptsurgeon.edits import (
    AnyChange,
    Aside,
    Change,
    Content,
    Edit,
    Move,
    Relink,
    Replace,
    Span,
    Truncate,
)
from ckptsurgeon.errors import SurgeryError, UsageError
from ckptsurgeon.hints import command, shell
from ckptsurgeon.operations import rollback
from ckptsurgeon.plans import Plan, Receipt
from ckptsurgeon.run.attic import pruned
from ckptsurgeon.run.run import Run
from ckptsurgeon.surgery.render import loud, relinked, replaced, rewrite, touched
from ckptsurgeon.transaction import assumptions, receipts
from ckptsurgeon.transaction.home import HOME
from ckptsurgeon.transaction.names import refuse_foreign


def plan_undo(run: Run, id: str | None = None) -> Plan:
    """The inverse of receipt `id`, or of the newest surgery that is not undone yet.

    What the trainer wrote since goes to the attic: nothing is lost, and the run is byte for byte
    what it was before that surgery. If that only renamed or compacted, what was trained since
    stays, and only the files that it changed are brought back."""
    run.refuse_interrupted()
    receipt = _chosen(run, run.receipts(), id)
    refuse_foreign(run.root, run.logs.named(), receipt.inverse, f"receipt {receipt.id}")
    _refuse_lost(run, receipt)
    new = receipts.next_id(run.root)
    since = _since(run, receipt, new)
    gone = [move.src for move in since]
    inverse, linked = _inverse(run, receipt, new, gone)
    first, last = _replaced(run, linked, new)
    changes, pointers = _pointers(run, receipt, new)
    edits = [*first, *since, *inverse, *last, *pointers]
    refuse_foreign(run.root, run.logs.named(), edits, f"receipt {receipt.id}")
    return Plan(
        id=new,
        run=str(run.root),
        title=f"undo {receipt.id} ({receipt.title})",
        recipe={},
        changes=(*changes, *(Aside(file, _kind(run, file)) for file in gone)),
        edits=tuple(edits),
        assumes=tuple(run.fingerprint(file) for file in dict.fromkeys(touched(edits))),
        promise=None,
        warnings=(f"written since {receipt.id}, to the attic: {', '.join(gone)}",) if gone else (),
        undoes=receipt.id,
        step=receipt.step,
        steps=receipt.steps,
    )


# --- which surgery -------------------------------------------------------------------------------


def _chosen(run: Run, done: Sequence[Receipt], id: str | None) -> Receipt:
    """The receipt to undo: nothing in force may stand on it."""
    in_force = receipts.standing(done)
    undone = {receipt.undoes for receipt in done}
    lost = {key: why for key, why in run.damaged_receipts().items() if key not in undone}
    newest_lost = max(lost, default="")
    newest = max([newest_lost, *(receipt.id for receipt in in_force)])
    asked = newest if id is None else receipts.numbered(id)
    if asked in lost:
        raise _cannot(run, asked, lost)
    if not in_force and id is None:
        raise UsageError(
            "there is no surgery to undo" + (": all of them are undone" if done else ""),
            next=command("log"),
        )
    number = receipts.numbered(id) if id is not None else in_force[-1].id
    chosen = next((receipt for receipt in in_force if receipt.id == number), None)
    if chosen is None:
        raise UsageError(_why_not(number, done), next=command("log"))
    if newest_lost > chosen.id:
        raise _cannot(run, newest_lost, lost, f"surgery {newest_lost} came after {chosen.id}, and ")
    if chosen is not in_force[-1]:
        newest = in_force[-1].id
        raise UsageError(
            f"receipt {newest} came after {chosen.id} and builds on it",
            next=command("undo", newest, why="first"),
        )
    return chosen


def _cannot(run: Run, id: str, lost: Mapping[str, str], since: str = "") -> SurgeryError:
    return SurgeryError(
        f"{since or f'surgery {id} '}can't be undone: {lost[id]}",
        next=(
            f"restore {run.root / receipts.receipt_file(id)} from a copy of the run",
            command("rollback", "--to", "STEP", why="to a saved step that `status` lists"),
        ),
    )


def _why_not(id: str, done: Sequence[Receipt]) -> str:
    for receipt in reversed(done):
        if receipt.undoes == id:
            return f"receipt {id} is undone already, by {receipt.id}"
        if receipt.id == id:
            return f"receipt {id} is itself an undo; do the surgery again instead"
    return f"there is no receipt {id}"


def _refuse_lost(run: Run, receipt: Receipt) -> None:
    """What the surgery moved aside, and the files that it edited, must still exist."""
    if (run.root / pruned(receipt.id)).exists():
        raise SurgeryError(
            f"the attic of receipt {receipt.id} was pruned: what it moved aside is gone",
            next=command("log"),
        )
    edited = [edit.file for edit in receipt.inverse if not isinstance(edit, Move)]
    lost = [file for file in edited if not os.path.lexists(run.root / file)]
    if lost and receipt.step is not None and receipt.step not in run.steps():
        raise SurgeryError(
            f"{lost[0]}, which receipt {receipt.id} changed, no longer exists (a trainer with "
            "keep_last removes old checkpoints)",
            next=command("rollback", "--to", "STEP", why="one of those that `status` lists"),
        )
    for change in receipt.changes:
        if isinstance(change, Change) and change.file in lost and isinstance(change.new, str):
            raise SurgeryError(
                f"{change.file}, which receipt {receipt.id} changed, no longer exists",
                next=shell(
                    ["printf", "%s", change.new],
                    into=run.root / change.file,
                    why="puts it back; then the same command again",
                ),
            )


# --- the edits -----------------------------------------------------------------------------------


def _inverse(
    run: Run, receipt: Receipt, id: str, gone: Collection[str]
) -> tuple[list[Edit], list[Truncate]]:
    """The receipt's inverse as this undo does it; and the truncations that it must not do, as their
    files have other names by now.

    What the surgery had staged is not needed again, but it is kept: this undo's attic gets it. A
    file in `gone` is in the attic already."""
    staging, attic = f"{HOME}/staging/{receipt.id}/", f"{HOME}/attic/{id}/"
    edits: list[Edit] = []
    linked: list[Truncate] = []
    for edit in receipt.inverse:
        if isinstance(edit, Truncate) and _has_links(run, edit):
            linked.append(edit)
        elif isinstance(edit, Replace):
            edits.append(replace(edit, kept=edit.kept.replace(staging, attic)))
        elif not isinstance(edit, Move):
            edits.append(edit)
        elif edit.src not in gone:
            edits.append(replace(edit, dst=edit.dst.replace(staging, attic)))
    return edits, linked


def _has_links(run: Run, edit: Truncate) -> bool:
    path = run.root / edit.file
    return path.is_file() and path.stat().st_nlink > 1


def _replaced(run: Run, linked: Sequence[Truncate], id: str) -> tuple[list[Replace], list[Replace]]:
    """A file that got another name since (a branch that shares it, a backup) is not cut, which
    would cut them all: one with its old bytes takes its place. What is first and what is last:
    until the last is done the first file is empty, so that no reader of all takes a mix."""
    news = []
    for edit in linked:
        assumptions.check_size(run.root / edit.file, edit)
        old = Content((Span(edit.file, 0, edit.old_size),), edit.mtime_ns)
        news.append(replaced(run, edit.file, old, id))
    if not news:
        return [], []
    first, last = loud(run, news, id)
    return first, [last]


def _kind(run: Run, file: str) -> str:
    return "checkpoint" if (run.root / file).is_dir() else "events"


def _since(run: Run, receipt: Receipt, id: str) -> list[Move]:
    """Moves of what a trainer wrote since: checkpoints and event files that were not there."""
    if not receipt.steps:
        return []
    newer = [step for step in run.steps() if step not in receipt.steps]
    out = [run.relative(path) for step in newer for path in run.entries(step)]
    known = {*receipt.logs, *_ours(receipt)}
    out += [file for file in run.logs.event_files() if file not in known]
    return [Move(file, run.attic(file, id)) for file in out]


def _pointers(run: Run, receipt: Receipt, id: str) -> tuple[list[AnyChange], list[Edit]]:
    """Pointers that named the edited step, and that only the trainer has set since."""
    if receipt.step is None or not receipt.steps:
        return [], []
    changes: list[AnyChange] = []
    edits: list[Edit] = []
    links: list[Relink] = []
    for path, text in run.format.pointers(run.root, receipt.step).items():
        file, named = run.relative(path), run.format.pointed(path)
        if named == receipt.step or file in _ours(receipt):
            continue
        if isinstance(text, Path):
            if path.is_symlink():
                links.append(rollback.relinked(run, path, text))
            continue
        old = path.read_text("utf-8", "replace") if path.exists() else None
        changes.append(Change(file, "latest", old, text))
        edits.append(rewrite(run, file, Content((text.encode(),)), id, new=old is None))
    return [*links, *changes], [*relinked(run, links, id), *edits]


def _ours(receipt: Receipt) -> set[str]:
    return {edit.src if isinstance(edit, Move) else edit.file for edit in receipt.inverse}
