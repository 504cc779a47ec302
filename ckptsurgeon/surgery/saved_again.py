"""What a trainer has saved again since a surgery edited it in place: the bytes from before are gone
and no undo brings them back.

A file that was replaced whole is in the attic as it was: it comes back where all of its step does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ckptsurgeon.errors import SurgeryError, first_few
from ckptsurgeon.formats.layout import SavesOver
from ckptsurgeon.hints import Hint, again, command
from ckptsurgeon.plans.edits import Append, Change, Edit, Inverse, Move, Replace, Tail, Truncate
from ckptsurgeon.plans.plan import Receipt
from ckptsurgeon.run.run import Run
from ckptsurgeon.transaction import kept
from ckptsurgeon.transaction.kept import saved_again
from ckptsurgeon.workers import side_by_side

AS_THEY_ARE = "--as-they-are"
BETAS = {"beta1": 0, "beta2": 1}


def without_saved_again(
    run: Run, receipt: Receipt, found: kept.Found, *, as_they_are: bool
) -> tuple[Receipt, list[str], list[str]]:
    """The receipt without what was saved again, the files that were, and the `rewritten` ones that
    it still brings back. Raises SurgeryError for what was saved again; with `as_they_are` only
    where nothing else is left to bring back.

    A step stays whole: where one of its files was saved again, all of them stay as they are."""
    steps = [set(map(run.relative, run.format.files(run.root, step))) for step in run.steps()]
    anew = _rewritten(run, receipt, steps)
    files = _lost(run, receipt, found, anew, steps)
    if not files:
        return receipt, [], anew
    of_files = (step for step in steps if not step.isdisjoint(files))
    stay = {*files, *(name for step in of_files for name in step)}
    rest = tuple(edit for edit in receipt.inverse if place(edit) not in stay)
    if as_they_are and rest:
        return replace(receipt, inverse=rest), files, [file for file in anew if file not in stay]
    surgery = next((each for each in run.receipts() if each.id == receipt.undoes), receipt)
    hints = _by_values(run, surgery, undone=surgery is not receipt)
    if rest:
        why = "brings back the rest, and leaves this step"
        if {run.root / file for file in files} <= _copies(run, files):
            why = "brings back the step, and makes this a copy of it"
        hints.append(again(AS_THEY_ARE, why=why))
    raise SurgeryError(
        f"{first_few(files)}: saved again, or changed, since {receipt.id}; what was there before "
        "is gone",
        next=hints or [command("log", why="what was done")],
    )


def kept_until_the_next_save(run: Run, step: int, edits: Sequence[Edit], id: str) -> list[str]:
    """A sentence on what surgery `id` edits in place and the trainer's next save writes over: it
    ends the undo of the step, which `without_saved_again` refuses then."""
    over = _saved_over(run, step)
    files = [edit.file for edit in edits if isinstance(edit, Append) and edit.file in over]
    if not files:
        return []
    rest = any(isinstance(edit, Append) and edit.file not in over for edit in edits)
    then = f"; from then on it takes {AS_THEY_ARE}" if rest else ""
    return [f"undo {id} works until the trainer saves over {first_few(files)}{then}"]


def _saved_over(run: Run, step: int) -> set[str]:
    """The files of `step` that the save of another step writes over: those of one name for all,
    and copies that a restart loads."""
    files = run.format.files(run.root, step)
    over = _copies(run, map(run.relative, files))
    if isinstance(run.format, SavesOver):
        over |= {*run.format.saved_over(run.root, step)}
    return set(map(run.relative, over))


def _copies(run: Run, files: Iterable[str]) -> set[Path]:
    """Those of `files` that are, or lie in, a copy of a step which a restart loads."""
    copies = set(run.format.pointer_files(run.root))
    paths = (run.root / file for file in files)
    return {path for path in paths if not copies.isdisjoint([path, *path.parents])}


def place(edit: Inverse) -> str:
    """The file, or the folder, that the edit brings back."""
    return edit.dst if isinstance(edit, Move) else edit.file


Files = set[str]


def _lost(
    run: Run, receipt: Receipt, found: kept.Found, anew: Sequence[str], steps: Sequence[Files]
) -> list[str]:
    """The files of the step that were saved again, where the step can't come back as a whole."""
    edited = [edit for edit in receipt.inverse if isinstance(edit, (Truncate, Tail))]
    saved = side_by_side(lambda e: saved_again(run.root, receipt.id, e, found[e.file]), edited)
    lost = [edit.file for edit, is_so in zip(edited, saved, strict=True) if is_so]
    back = {place(edit) for edit in receipt.inverse if isinstance(edit, (Move, Replace))}
    return lost + [f for f in anew if any(f in step and not step <= back for step in steps)]


def _rewritten(run: Run, receipt: Receipt, steps: Sequence[Files]) -> list[str]:
    """The files of steps that the surgery replaced whole and that a trainer wrote since."""
    replaced = {edit.file for edit in receipt.inverse if isinstance(edit, Replace)}
    replaced -= set(map(run.relative, run.format.pointer_files(run.root)))
    files = kept.rewritten(run.root, receipt.id, sorted(replaced))
    return [file for file in files if any(file in step for step in steps)]


def _by_values(run: Run, surgery: Receipt, *, undone: bool) -> list[Hint]:
    """The command that sets, in what is saved now, what the surgery set back to what it was, and
    the one that does so at its step; where it was undone, those that set it again. None where it
    did more than to set values."""
    settings = surgery.recipe.get("set")
    if not isinstance(settings, Mapping) or surgery.recipe.keys() - {"set", "why"}:
        return []
    values = [value if undone else _before(surgery, key, value) for key, value in settings.items()]
    if not values or None in values:
        return []
    pairs = [f"{key}={value}" for key, value in zip(settings, values, strict=True)]
    why = "does it again" if undone else f"as it was before {surgery.id}"
    hints: list[Hint] = []
    if "iteration" not in settings or run.latest() == surgery.step:  # no number of a later step
        hints.append(command("set", *pairs, why=f"{why}, in what is saved now"))
    if surgery.step in run.steps() and surgery.step != run.latest():
        there = [word for pair in pairs for word in ("--set", pair)]
        back = f"{why}, without what was trained since"
        hints.append(command("rollback", "--to", surgery.step, *there, why=back))
    return hints


def _before(receipt: Receipt, key: str, value: object) -> object | None:
    """The one value that was in all places that got this one; None where there were several."""
    found = set()
    for change in receipt.changes:
        if not isinstance(change, Change):
            continue
        if key in BETAS and change.field == "betas" and isinstance(change.old, (list, tuple)):
            found.add(change.old[BETAS[key]])
        elif change.field == key and change.new == value and isinstance(change.old, (int, float)):
            found.add(change.old)
    return found.pop() if len(found) == 1 else None
