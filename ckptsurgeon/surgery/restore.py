"""The edits that bring back what was before a receipt, whatever the trainer wrote since."""

from __future__ import annotations

import os
import stat
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath

from ckptsurgeon import disk, whole_file
from ckptsurgeon.errors import SurgeryError, count, first_few
from ckptsurgeon.hints import again
from ckptsurgeon.operations import rollback
from ckptsurgeon.plans.edits import (
    AnyChange,
    Append,
    Aside,
    Content,
    Edit,
    Inverse,
    Move,
    NewText,
    Relink,
    Replace,
    Rewrite,
    Span,
    Tail,
    Truncate,
)
from ckptsurgeon.plans.log_fields import LOGS
from ckptsurgeon.plans.plan import Plan, Receipt
from ckptsurgeon.plans.spans import rows
from ckptsurgeon.run.run import Run
from ckptsurgeon.surgery import written_since
from ckptsurgeon.surgery.render import make_unreadable, relinked, replaced, rewrite, touched
from ckptsurgeon.surgery.saved_again import without_saved_again
from ckptsurgeon.transaction import assumptions, kept, receipts
from ckptsurgeon.transaction.digests import tail_digest
from ckptsurgeon.transaction.home import ATTIC, HOME, is_log
from ckptsurgeon.transaction.inverse import kept_tails, staged_tails
from ckptsurgeon.transaction.names import refuse_foreign
from ckptsurgeon.workers import side_by_side


def plan_restore(
    run: Run, receipt: Receipt, title: str, found: kept.Found, *, as_they_are: bool = False
) -> Plan:
    """The plan that takes `receipt` back, a surgery or an undo, and keeps what it takes away: what
    was written since goes to the attic, and so do the bytes that are cut off. `found` is what is
    there of the files that it edited in place.

    Raises SurgeryError where somebody changed what was kept, and where a trainer saved again what
    was edited in place; with `as_they_are` such files are taken, or left, as they are, and a
    warning names them."""
    whole = receipt
    receipt, left, anew = without_saved_again(run, receipt, found, as_they_are=as_they_are)
    known = kept.compared(run.root, receipt.id, receipt.inverse, found)
    if not as_they_are:
        _refuse_changed(receipt.id, known)
    restored = known.verdict
    warnings = []
    if known.changed:
        names = first_few(known.changed)
        warnings.append(f"changed since {receipt.id}, and taken as they are: {names}")
    if known.copied:
        names = first_few(known.copied)
        what = f"written since {receipt.id}, or copied without their times"
        warnings.append(f"{what}, and taken as they are: {names}")
    left_since = sorted({*whole.steps} - {*run.steps()} - _renumbered(run, receipt))
    if left or receipt.step in left_since:
        restored = kept.CHANGED
    if left_since:
        names = " ".join(map(str, left_since))
        warnings.append(f"removed since {receipt.id}, and not brought back: step {names}")
    new = receipts.next_id(run.root)
    gone, links = _since(run, whole)
    since = [Move(file, run.attic(file, new)) for file in gone]
    inverse, linked = _inverse(run, receipt, found, new, gone)
    first, last = _replaced(run, linked, new)
    changes, pointers = _pointers(run, receipt, new, inverse, left)
    copies = [change.file for change in changes if isinstance(change, Rewrite)]
    if left := [file for file in left if file not in copies]:
        warnings.append(f"saved again since {receipt.id}, and left as saved: {', '.join(left)}")
    if copies:
        what = f"saved again since {receipt.id}, and now a copy of step {receipt.step}"
        warnings.append(f"{what}: {', '.join(copies)}")
    if anew:
        warnings.append(f"saved again since {receipt.id}, to the attic: {', '.join(anew)}")
    if gone:
        warnings.append(f"written since {receipt.id}, to the attic: {', '.join(gone)}")
    tails = _tails(run, inverse, new)
    edits = [*first, *since, *relinked(run, links, new), *tails, *inverse, *last, *pointers]
    assumed = dict.fromkeys(touched(edits))
    refuse_foreign(run.root, run.logs.named(), edits, f"receipt {receipt.id}", assumed.keys())
    return Plan(
        id=new,
        run=str(run.root),
        title=title,
        recipe={},
        changes=(*changes, *links, *(Aside(file, _kind(file)) for file in gone)),
        edits=tuple(edits),
        assumes=tuple(side_by_side(run.fingerprint, assumed)),
        promise=None,
        warnings=tuple(warnings),
        undoes=receipt.id,
        step=receipt.step,
        steps=receipt.steps,
        logs=receipt.logs,
        restored=restored,
        saved=tuple(run.steps()),
        sizes=run.logs.sizes(),
    )


def _renumbered(run: Run, receipt: Receipt) -> set[int]:
    """The step that was edited, where a file of it is of another step by now: it gets its number
    back with its bytes."""
    if receipt.step is None or receipt.step in run.steps():
        return set()
    edited = {edit.file for edit in receipt.inverse if not isinstance(edit, Move)}
    edited -= set(map(run.relative, run.format.pointer_files(run.root)))
    now = (run.relative(f) for step in run.steps() for f in run.format.files(run.root, step))
    return set() if edited.isdisjoint(now) else {receipt.step}


def _refuse_changed(id: str, known: kept.Compared) -> None:
    """Raise SurgeryError where surgery `id` would not be taken back byte for byte, or nobody knows
    whether it would."""
    back = "put it back from a copy of the run, with its time (cp -p)"
    if known.changed:
        what = f"{first_few(known.changed)}: changed since surgery {id}"
    elif len(known.copied) > 1 and not known.dated:
        what = (
            f"none of the {count(len(known.copied), 'file')} to bring back has the time that "
            f"surgery {id} "
            "kept of it, as in a copy of a run: whether their bytes are the same is not known"
        )
        back = "if this is a copy: copy the run again, with its times (cp -a)"
    elif known.copied:
        what = (
            f"{first_few(known.copied)}: written since surgery {id}, or copied without its time: "
            "whether it is what it was before is not known"
        )
    else:
        return
    raise SurgeryError(what, next=(back, again("--as-they-are", why="takes them as they are now")))


def _inverse(
    run: Run, receipt: Receipt, found: kept.Found, id: str, gone: Collection[str]
) -> tuple[list[Edit], list[Truncate | Append]]:
    """The receipt's inverse as it is done now; and what must not be done in place, as the file has
    other names by now.

    What the surgery had staged is not needed again, but it is kept: this plan's attic gets it. A
    file in `gone` is in the attic already."""
    staging, attic = f"{HOME}/staging/{receipt.id}/", f"{HOME}/{ATTIC}/{id}/"
    edits: list[Edit] = []
    linked: list[Truncate | Append] = []

    def now(old: Inverse) -> tuple[Move | Replace | Truncate | Append, int]:
        edit = _appended(run, receipt, old) if isinstance(old, Tail) else old
        if not isinstance(edit, (Truncate, Append)):
            return edit, 0
        return edit, _names(run, edit, found[edit.file])

    for edit, names in side_by_side(now, receipt.inverse):
        if isinstance(edit, (Truncate, Append)):
            (linked if names > 1 else edits).append(edit)
        elif isinstance(edit, Replace):
            edits.append(replace(edit, kept=edit.kept.replace(staging, attic)))
        elif edit.src not in gone:
            edits.append(replace(edit, dst=edit.dst.replace(staging, attic)))
    return edits, linked


def _names(run: Run, edit: Truncate | Append, status: os.stat_result | None) -> int:
    """How many names the file has. Raises SurgeryError if it has another size than the edit needs;
    the bytes are compared right before the commit."""
    if status is None or not stat.S_ISREG(status.st_mode):  # refused for that
        return 0
    expected = edit.new_size if isinstance(edit, Truncate) else edit.old_size
    if status.st_size != expected:
        assumptions.check_size(run.root / edit.file, edit)
    return status.st_nlink


def _appended(run: Run, receipt: Receipt, tail: Tail) -> Append:
    """What an undo cut off, to be written again."""
    path = run.root / kept_tails(receipt.id)
    spans = [(tail.at, tail.at + tail.size)]
    if not disk.is_file(path) or tail_digest(path, spans) != tail.digest:
        raise SurgeryError(
            f"{path}: the bytes that {receipt.id} cut off {tail.file} are gone",
            next=f"restore {path} from a copy of the run",
        )
    with path.open("rb") as file:
        file.seek(tail.at)
        data = file.read(tail.size)
    before = tail.mtime_ns or (run.root / tail.file).stat().st_mtime_ns
    return Append(tail.file, tail.old_size, data, tail.spans, before, tail.new_mtime_ns)


def _tails(run: Run, edits: Sequence[Edit], id: str) -> list[Move]:
    """The bytes that these edits cut off, kept in one file."""
    cut = [edit for edit in edits if isinstance(edit, Truncate)]
    spans = (Span(e.file, row[0][0], row[-1][1]) for e in cut for row in rows(e.spans, 0))
    return [Move(staged_tails(id), kept_tails(id), Content(tuple(spans)))] if cut else []


def _replaced(
    run: Run, linked: Sequence[Truncate | Append], id: str
) -> tuple[list[Replace], list[Replace]]:
    """A file that got another name since (a branch that shares it, a backup) is not edited in
    place, which would edit them all: one with the other bytes takes its place. What is first and
    what is last: until the last is done the first file is empty, so that no reader of all takes a
    mix."""
    news = []
    for edit in linked:
        assumptions.check_size(run.root / edit.file, edit)
        if isinstance(edit, Append):
            content = replace(edit.whole(), mtime_ns=edit.new_mtime_ns)
        else:
            content = Content((Span(edit.file, 0, edit.old_size),), edit.mtime_ns)
        news.append(replaced(run, edit.file, content, id))
    if not news:
        return [], []
    first, last = make_unreadable(run, news, id)
    return first, [last]


def _kind(file: str) -> str:
    return LOGS if is_log(file) else "checkpoint"


def _since(run: Run, receipt: Receipt) -> tuple[list[str], list[Relink]]:
    """What a trainer wrote since, checkpoints and logs that were not there, and its links that
    led to it. What the surgery itself edited or made is none of it, whichever step it is by now."""
    if not receipt.steps:
        return [], []
    ours = made(receipt.inverse)
    written = written_since.logs(run, {*receipt.logs, *ours})
    links, aside = written_since.links(run, written, receipt.logs, ours)
    copies = [] if receipt.step is None else written_since.copies(run, receipt, ours)
    steps = written_since.checkpoints(run, receipt.steps, ours)
    return [*dict.fromkeys([*steps, *copies]), *written, *aside], links


def _pointers(
    run: Run, receipt: Receipt, id: str, inverse: Sequence[Edit], left: Collection[str]
) -> tuple[list[AnyChange], list[Edit]]:
    """Pointers that named the edited step, and that only the trainer has set since. A copy that is
    `left`, as it was saved again, becomes one of the step as `inverse` brings it back."""
    if receipt.step is None or not receipt.steps:
        return [], []
    changes: list[AnyChange] = []
    edits: list[Edit] = []
    links: list[Relink] = []
    ours = made(receipt.inverse)
    over = {*left, *(str(parent) for file in left for parent in PurePosixPath(file).parents)}
    copies = {path for path in run.format.pointer_files(run.root) if run.relative(path) in over}
    for path, text in run.format.pointers(run.root, receipt.step).items():
        file, named = run.relative(path), run.format.pointed(path)
        if named == receipt.step or file in ours:
            continue
        if isinstance(text, Path):
            if disk.is_link(path):
                links.append(rollback.relinked(run, path, text))
                continue
            if copies.isdisjoint([path, *path.parents]):
                continue
            copy = rollback.copied(run, path, text)
            content = _as_restored(run, run.relative(text), inverse)
            changes.append(replace(copy, content=content))
            edits.append(rewrite(run, file, content, id, new=copy.new_file))
            continue
        old = whole_file.text(path)
        changes.append(NewText(file, "latest", old, text))
        edits.append(rewrite(run, file, Content((text.encode(),)), id, new=old is None))
    return [*links, *changes], [*relinked(run, links, id), *edits]


def _as_restored(run: Run, file: str, inverse: Sequence[Edit]) -> Content:
    """The whole of a shard as `inverse` leaves it."""
    source, size = file, (run.root / file).stat().st_size
    for edit in inverse:
        if isinstance(edit, Append) and edit.file == file:
            return edit.whole()
        if isinstance(edit, Truncate) and edit.file == file:
            size = edit.old_size
        elif isinstance(edit, Replace) and edit.file == file:
            source, size = edit.staged, (run.root / edit.staged).stat().st_size
    return Content((Span(source, 0, size),))


def made(inverse: Sequence[Inverse]) -> set[str]:
    """The files that a surgery edited or made, by its inverse."""
    return {edit.src if isinstance(edit, Move) else edit.file for edit in inverse}
