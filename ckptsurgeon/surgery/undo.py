"""Which surgery an undo takes back, and which undo a redo; and why one can't be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ckptsurgeon import disk
from ckptsurgeon.errors import SurgeryError, UsageError
from ckptsurgeon.files.one_look import one_look
from ckptsurgeon.hints import again, command, shell
from ckptsurgeon.plans.edits import Move, NewText, Replace
from ckptsurgeon.plans.plan import Plan, Receipt
from ckptsurgeon.remote import reads
from ckptsurgeon.run.attic import pruned
from ckptsurgeon.run.run import Run
from ckptsurgeon.surgery.restore import plan_restore
from ckptsurgeon.surgery.saved_again import AS_THEY_ARE, place
from ckptsurgeon.transaction import kept, receipts
from ckptsurgeon.transaction.home import in_attic
from ckptsurgeon.transaction.names import refuse_foreign
from ckptsurgeon.workers import side_by_side

ROLLBACK = command("rollback", "--to", "STEP", why="to a saved step that `status` lists")


@one_look()
def plan_undo(
    run: Run, id: str | None = None, *, as_they_are: bool = False, jobs: int | None = None
) -> Plan:
    """The inverse of receipt `id`, or of the newest surgery that is not undone yet.

    What the trainer wrote since goes to the attic: nothing is lost, and the run is byte for byte
    what it was before that surgery. If that only renamed or compacted, what was trained since
    stays, and only the files that it changed are brought back. Files that somebody changed in the
    attic are refused, or with `as_they_are` taken so; so is an edited step that somebody removed,
    or left out. The plan is the same for any number of `jobs`, which look at the files."""
    with reads.files_at_once(run.root, jobs):
        run.refuse_interrupted()
        receipt = _chosen(run, run.receipts(), id)
        receipt, found = _found(run, receipt, as_they_are=as_they_are)
        title = f"undo {receipt.id} ({receipt.title})"
        return plan_restore(run, receipt, title, found, as_they_are=as_they_are)


@one_look()
def plan_redo(
    run: Run, id: str | None = None, *, as_they_are: bool = False, jobs: int | None = None
) -> Plan:
    """The inverse of an undo: of that of surgery `id`, or of the newest that was not redone yet.

    The surgery is in force again, bit for bit, and so is what was trained on it."""
    with reads.files_at_once(run.root, jobs):
        run.refuse_interrupted()
        done = run.receipts()
        receipt = _undone(run, done, id)
        receipt, found = _found(run, receipt, as_they_are=as_they_are)
        surgery = next((item for item in done if item.id == receipt.undoes), receipt)
        title = f"redo {surgery.id} ({surgery.title})"
        return plan_restore(run, receipt, title, found, as_they_are=as_they_are)


# --- which surgery -------------------------------------------------------------------------------


def _chosen(run: Run, done: Sequence[Receipt], id: str | None) -> Receipt:
    """The receipt to undo: nothing in force may stand on it."""
    in_force = receipts.standing(done)
    undone = receipts.taken_back(done)
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
        raise _why_not(number, done)
    _refuse_pruned(run, chosen, in_force)
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
            ROLLBACK,
        ),
    )


def _why_not(id: str, done: Sequence[Receipt]) -> UsageError:
    known = next((receipt for receipt in done if receipt.id == id), None)
    if known is None:
        return UsageError(f"there is no receipt {id}", next=command("log"))
    if known.undoes is None:
        by = receipts.taken_back(done)[id]
        return UsageError(
            f"receipt {id} is undone already, by {by}",
            next=command("redo", id, why="does it again"),
        )
    if (by := receipts.taken_back(done).get(id, "")) or known not in _undos(done):
        what = f"receipt {id} is itself an undo" + (f", redone by {by}" if by else "")
        return UsageError(what, next=command("log"))
    return UsageError(
        f"receipt {id} is itself an undo",
        next=command("redo", known.undoes, why="takes it back"),
    )


def _undos(done: Sequence[Receipt]) -> list[Receipt]:
    """The undos that a redo can take back: since then no surgery was done that is still in force,
    so the run is as they left it, but for what was trained."""
    by_id = {receipt.id: receipt for receipt in done}
    in_force = receipts.standing(done)
    back = receipts.taken_back(done)
    return [
        receipt
        for at, receipt in enumerate(done, 1)
        if receipt.undoes is not None and receipt.id not in back
        if (undone := by_id.get(receipt.undoes)) is None or undone.undoes is None
        if receipts.standing(done[:at]) == in_force
    ]


def _undone(run: Run, done: Sequence[Receipt], id: str | None) -> Receipt:
    """The undo to take back, named by its own id or by that of the surgery that it undid."""
    undos = _undos(done)
    number = None if id is None else receipts.numbered(id)
    asked = [item for item in undos if number in (None, item.id, item.undoes)]
    if not asked:
        undone = [r for r in done if r.undoes is not None and number in (None, r.id, r.undoes)]
        since = [r.id for r in receipts.standing(done) if undone and r.id > undone[-1].id]
        if number is not None and not undone:
            what = f"surgery {number} was not undone"
        elif since:
            what = f"surgery {since[-1]} was done since, on what {undone[-1].id} left"
        else:
            what = "there is no undo to take back"
        raise UsageError(what, next=command("log"))
    chosen = asked[-1]
    if not chosen.inverse:
        recipe = run.root / receipts.receipt_file(chosen.undoes or "")
        raise SurgeryError(
            f"undo {chosen.id} kept nothing of what it took away: an older ckptsurgeon made it",
            next=f"the surgery again, by the recipe in {recipe.with_name('recipe.json')}",
        )
    return chosen


def _refuse_pruned(run: Run, chosen: Receipt, in_force: Sequence[Receipt]) -> None:
    """Nothing comes back behind a surgery whose attic is gone."""
    for receipt in reversed(in_force):
        if receipt.id >= chosen.id and disk.is_there(run.root / pruned(receipt.id)):
            before = "" if receipt is chosen else f", and neither can {chosen.id} before it"
            raise SurgeryError(
                f"the attic of receipt {receipt.id} was pruned: what it moved aside or replaced is "
                f"gone, so it can't be undone{before}",
                next=ROLLBACK,
            )


def _found(run: Run, receipt: Receipt, *, as_they_are: bool) -> tuple[Receipt, kept.Found]:
    """The receipt, and what is there of the files that the surgery edited in place. They, and all
    others that it edited or moved aside, must be the run's and exist; with `as_they_are` those of a
    step that was removed since are left out, where something else comes back."""
    if run.bare and receipt.step is not None:
        raise UsageError(
            f"surgery {receipt.id} edited a checkpoint, and {run.root} has none that is known",
            next=again("--format", "FORMAT", why="as it was done"),
        )
    refuse_foreign(run.root, run.logs.named(), receipt.inverse, f"receipt {receipt.id}")
    if disk.is_there(run.root / pruned(receipt.id)):
        raise SurgeryError(
            f"the attic of receipt {receipt.id} was pruned: what it moved aside is gone",
            next=command("log"),
        )
    found = kept.found(run.root, receipt.inverse)
    replaced = [edit.file for edit in receipt.inverse if isinstance(edit, Replace)]
    there = side_by_side(lambda file: disk.is_there(run.root / file), replaced)
    lost = [file for file, status in found.items() if status is None]
    lost += [file for file, is_there in zip(replaced, there, strict=True) if not is_there]
    if lost and receipt.step is not None and receipt.step not in run.steps():
        rest = tuple(edit for edit in receipt.inverse if place(edit) not in lost)
        aside = any(isinstance(edit, Move) and in_attic(edit.src) for edit in rest)
        if as_they_are and aside:
            return replace(receipt, inverse=rest), found
        all_else = again(AS_THEY_ARE, why=f"brings back all but step {receipt.step}")
        raise SurgeryError(
            f"{lost[0]}, which receipt {receipt.id} changed, no longer exists (a trainer with "
            "keep_last removes old checkpoints)",
            next=[*([all_else] if aside else []), *([ROLLBACK] if run.steps() else [])]
            or [command("log", why="what was done")],
        )
    for change in receipt.changes:
        if isinstance(change, NewText) and change.file in lost:
            raise SurgeryError(
                f"{change.file}, which receipt {receipt.id} changed, no longer exists",
                next=shell(
                    ["printf", "%s", change.new],
                    into=run.root / change.file,
                    why="puts it back; then the same command again",
                ),
            )
    return receipt, found
