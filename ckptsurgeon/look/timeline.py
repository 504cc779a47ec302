"""The timeline of a run, for its picture: what was kept, abandoned (and why), and saved."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from ckptsurgeon import disk
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.logs import curves
from ckptsurgeon.logs.curves import Branch, Curves
from ckptsurgeon.logs.signals import LOSS
from ckptsurgeon.look import logged, soundness
from ckptsurgeon.look.advise import Advice, advise
from ckptsurgeon.plans.edits import Move, Rewrite
from ckptsurgeon.plans.frozen import frozen
from ckptsurgeon.plans.log_fields import LOGS, TENSORBOARD
from ckptsurgeon.plans.plan import Receipt
from ckptsurgeon.run.attic import folders, pruned
from ckptsurgeon.run.log_numbers import counts_steps
from ckptsurgeon.run.run import Run
from ckptsurgeon.transaction.home import EVENTS, KEPT_EVENTS, NOTE, is_log
from ckptsurgeon.transaction.receipts import standing

SOUND, UNSOUND, INCOMPLETE, ATTIC, PRUNED = (
    "sound",
    "unsound",
    "incomplete",
    "in the attic",
    "pruned",
)
CHECKED = 64
"""Saved steps that are verified, the newest; of those before only the file names are."""
LOST = 0.02
"""The share of the steps so far that a killed job may lose without a word in the picture."""
_KEPT = re.compile(r"stay, to step (\d+)")
"""What the note of a cut says, in receipts since 1.0.0."""
_NUMBER = re.compile(r"(\d+)(?:\.\w+)?$")


@frozen
class Left:
    """A branch that was trained and left. `to` is the step from which training went on after it;
    `receipt` and `why` are of the surgery that left it, None where a trainer did it by itself."""

    curves: Branch
    to: int | None
    receipt: str | None = None
    title: str = ""
    why: str = ""


@frozen
class Timeline:
    """`saved` is step → one of the words above; `skips` and `rewarms` are ranges of steps, both
    ends included; `edits` are surgeries that went nowhere: step and receipt."""

    name: str
    kept: Branch
    left: tuple[Left, ...]
    saved: Mapping[int, str]
    skips: tuple[tuple[int, int], ...]
    rewarms: tuple[tuple[int, int], ...]
    edits: tuple[tuple[int, str], ...]
    advice: Advice


def timeline_of(read: Curves, run: Run | None, rule: str | None = None) -> Timeline:
    """The timeline of a run by its curves, its receipts and its attic; without a run by the curves
    alone. Reads only."""
    diagnosis = advise(read, run, rule=rule, level=soundness.NAMES)
    by_themselves = [Left(branch, _before(branch)) for branch in read.left]
    if run is None or run.bare:
        name = ", ".join(path.name for path in read.sources)
        return Timeline(name, read.kept, tuple(by_themselves), {}, (), (), (), diagnosis)
    receipts = run.receipts()
    force = standing(receipts)
    loss = read.kept.get(LOSS)
    alike = loss is None or counts_steps(run, int(loss.steps[-1]), loss.spacing)
    return Timeline(
        run.name,
        read.kept,
        (*by_themselves, *_left(run, receipts)),
        _saved(run, receipts) if alike else {},
        tuple(dict.fromkeys(span for r in force if r.promise for span in r.promise.skip or ())),
        tuple(_rewarms(force)) if alike else (),
        tuple((_resumed(r), r.id) for r in force if not _goes_back(r) and r.promise)
        if alike
        else (),
        diagnosis,
    )


def _before(branch: Branch) -> int | None:
    """Where a trainer went on that left this branch by itself; None for the few steps that every
    killed job loses, whose arrows would hide those of surgeries."""
    steps = branch[LOSS].steps
    first, last = int(steps[0]), int(steps[-1])
    return first - 1 if last - first > LOST * last else None


def _resumed(receipt: Receipt) -> int:
    """The step from which the trainer goes on after a surgery."""
    assert receipt.promise is not None
    return receipt.promise.step - 1


def _goes_back(receipt: Receipt) -> bool:
    return receipt.undoes is not None or "rollback" in receipt.recipe


def _moved(receipt: Receipt) -> list[int]:
    """The steps that a surgery moved to the attic: the number in the name of a file or folder."""
    moves = (edit for edit in receipt.inverse if isinstance(edit, Move))
    names = (Path(edit.dst).name for edit in moves if not (is_log(edit.src) or is_log(edit.dst)))
    found = (_NUMBER.search(name) for name in names if "events" not in name)
    return [int(match[1]) for match in found if match]


def _left(run: Run, receipts: Sequence[Receipt]) -> Iterator[Left]:
    """What each surgery took out of the logs, in the order in which it was done."""
    known = {receipt.id: receipt for receipt in receipts}
    for receipt in receipts:
        surgery = known.get(receipt.undoes or "", receipt)
        if surgery.promise is None:
            continue
        paths, at = list(_cut(run, receipt)), _kept_to(surgery, TENSORBOARD)
        branch = curves.of_cut(paths, {}, at) if paths else {}
        if LOSS not in branch:
            at = _kept_to(surgery, LOGS)
            branch = logged.kept_by(run, receipt, surgery, at)
        if LOSS in branch:
            to: int | None = at
            if receipt.undoes is not None:
                alike = abs(at - _resumed(surgery)) <= 1  # the first update may be called 0
                to = max(_moved(surgery), default=None) if alike else None
            yield Left(branch, to, receipt.id, receipt.title, receipt.why)


def _kept_to(receipt: Receipt, field: str) -> int:
    """The last number that a surgery kept in the logs of a `field`, as its notes say; where none
    was cut that of the step. A log may count what the steps do not, or call the first update 0."""
    cuts = (c for c in receipt.changes if isinstance(c, Rewrite) and c.field == field)
    found = (_KEPT.search(change.note) for change in cuts if not change.new_file)
    return max((int(match[1]) for match in found if match), default=_resumed(receipt))


def _cut(run: Run, receipt: Receipt) -> Iterator[Path]:
    """The event files that a surgery keeps in the attic as they were, or, when that is gone, what
    it kept of them in a folder of its own."""
    found = [
        path
        for folder in folders(run, receipt.id)
        for path in sorted(disk.below(folder))
        if KEPT_EVENTS in path.name and not path.name.endswith(NOTE)
    ]
    own = {folder.name for folder in run.logs.branches()}
    found = [path for path in found if path.parent.name not in own]
    if found:
        yield from found
        return
    for edit in receipt.inverse:
        if isinstance(edit, Move) and EVENTS in edit.src and not edit.src.endswith(NOTE):
            path = run.root / edit.src
            if path.parent in run.logs.branches() and disk.is_file(path):
                yield path


def _rewarms(receipts: Sequence[Receipt]) -> Iterator[tuple[int, int]]:
    for receipt in receipts:
        window = receipt.recipe.get("rewarm")
        if isinstance(window, Mapping) and receipt.promise and window.get("iterations"):
            step = _resumed(receipt)
            yield step + 1, step + int(window["iterations"])


def _saved(run: Run, receipts: Sequence[Receipt]) -> dict[int, str]:
    """Every saved step; of one that was saved again, what is there now."""
    states: dict[int, str] = {}
    for receipt in standing(receipts):
        gone = disk.exists(run.root / pruned(receipt.id))
        states |= dict.fromkeys(_moved(receipt), PRUNED if gone else ATTIC)
    steps = run.steps()
    for step in steps:
        states[step] = _state(run, step, step in steps[-CHECKED:])
    return dict(sorted(states.items()))


def _state(run: Run, step: int, verified: bool) -> str:
    if not run.complete(step):
        return INCOMPLETE
    level = soundness.MEANING if verified else soundness.NAMES
    try:
        return UNSOUND if soundness.check(run.format, run.root, step, level).findings else SOUND
    except (SurgeryError, OSError):
        return UNSOUND
