"""A run before and after one surgery, from the bytes that its receipt keeps. Reads only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ckptsurgeon import disk
from ckptsurgeon.errors import SurgeryError, UsageError
from ckptsurgeon.files.collector import collector_paused
from ckptsurgeon.files.dcp import METADATA
from ckptsurgeon.hints import command
from ckptsurgeon.look.diff import tensors as of_tensors
from ckptsurgeon.look.diff.diff import Diff, field_of, logs, texts
from ckptsurgeon.look.diff.files import compare
from ckptsurgeon.look.diff.tensors import Tensors
from ckptsurgeon.look.diff.versions import TREES, Version
from ckptsurgeon.plans.edits import (
    AnyChange,
    Aside,
    Move,
    NewText,
    Relink,
    Replace,
    Rewrite,
    Truncate,
)
from ckptsurgeon.plans.edits import Content as NewBytes
from ckptsurgeon.plans.plan import Receipt
from ckptsurgeon.progress import Progress
from ckptsurgeon.run.run import Run
from ckptsurgeon.transaction.home import in_attic, is_log
from ckptsurgeon.transaction.kept import found, rewritten, saved_again
from ckptsurgeon.transaction.receipts import numbered, standing, taken_back
from ckptsurgeon.workers import Workers


@collector_paused()
def of_receipt(
    run: Run,
    id: str,
    *,
    tensors: bool = False,
    jobs: Workers = 8,
    progress: Progress | None = None,
) -> Diff:
    """What surgery `id` changed, read from the files as they were and as they are; of pointers and
    links what the receipt says. A file that a later surgery edited again is taken as it was before
    that. Raises UsageError for a surgery that is not in force, SurgeryError where its attic was
    pruned or a file is gone."""
    receipt, later = _chosen(run, numbered(id))
    found = _Found(
        receipt, notes={c.file: c.note for c in receipt.changes if isinstance(c, Rewrite)}
    )
    pointers = {item.file: item for item in receipt.changes if _is_pointer(item)}
    found.changes += pointers.values()
    for edit in _effective(receipt):
        if (edit.src if isinstance(edit, Move) else edit.file) not in pointers:
            found.edit(run, edit, later)
    ones = {name: one for name, (one, _) in found.shards.items()}
    others = {name: other for name, (_, other) in found.shards.items()}
    difference = compare(ones, others)
    changes = [
        *found.changes,
        *difference.changes,
        *texts(*_sides(found.texts)),
        *logs(*_sides(found.events)),
    ]
    seen = Tensors() if tensors else None
    if seen is not None:
        of_tensors.of_twins(seen, difference, jobs, progress)
    ends = f"before {receipt.id}", f"after {receipt.id}"
    return Diff(*ends, tuple(changes), seen, tuple(found.not_compared), of_surgery=True)


def _sides(pairs: Mapping[str, Pair]) -> tuple[dict[str, Version], dict[str, Version]]:
    before = {name: one for name, (one, _) in pairs.items() if one is not None}
    after = {name: other for name, (_, other) in pairs.items() if other is not None}
    return before, after


def _chosen(run: Run, id: str) -> tuple[Receipt, Sequence[Receipt]]:
    """The receipt, and those in force that came after it, oldest first."""
    done = run.receipts()
    receipt = next((item for item in done if item.id == id), None)
    if receipt is None:
        raise UsageError(f"there is no receipt {id}", next=command("log"))
    in_force = standing(done)
    if receipt not in in_force:
        undo = taken_back(done).get(id)
        what = f"receipt {id} was undone by {undo}" if undo else f"receipt {id} is an undo"
        raise UsageError(f"{what}: the run is as it was before", next=command("log"))
    return receipt, [item for item in in_force if item.id > id]


def _effective(receipt: Receipt) -> list[Move | Replace | Truncate]:
    """The inverse edits, in the order of the surgery."""
    edits = [edit for edit in receipt.inverse if isinstance(edit, (Move, Replace, Truncate))]
    return edits[::-1]


Pair = tuple[Version | None, Version | None]


@dataclass
class _Found:
    """Files by what they are, each as it was before and after; what else happened to files."""

    receipt: Receipt
    shards: dict[str, tuple[Version, Version]] = field(default_factory=dict)
    texts: dict[str, Pair] = field(default_factory=dict)
    events: dict[str, Pair] = field(default_factory=dict)
    changes: list[AnyChange] = field(default_factory=list)
    notes: dict[str, str] = field(default_factory=dict)
    """What the receipt says of new files."""
    not_compared: list[str] = field(default_factory=list)

    def edit(self, run: Run, edit: Move | Replace | Truncate, later: Sequence[Receipt]) -> None:
        """Add what the surgery did that `edit` takes back."""
        if isinstance(edit, Move):
            self._moved(run, edit, later)
            return
        if isinstance(edit, Replace) and edit.staged.endswith(".empty"):
            return
        now = _after(run, edit.file, later)
        here = now.path == run.root / edit.file
        if here and _is_tree(edit.file) and _saved_since(run, edit.file, (self.receipt, *later)):
            self.changes += [item for item in self.receipt.changes if item.file == edit.file]
            self.not_compared.append(f"{edit.file}: saved again since; this is what the plan said")
            return
        if isinstance(edit, Truncate):
            self.shards[edit.file] = (
                Version(now.path, edit.old_size),
                Version(now.path, edit.new_size),
            )
            return
        before = Version(_kept(run, edit.staged), None, _home(run, edit.file), _name(edit.file))
        if _is_tree(edit.file):
            self.shards[edit.file] = (before, now)
        elif is_log(edit.file):
            self.events[edit.file] = (before, now)
        else:
            self.texts[edit.file] = (before, now)

    def _moved(self, run: Run, edit: Move, later: Sequence[Receipt]) -> None:
        """A new file, or one that went to the attic."""
        if in_attic(edit.src):
            name = edit.dst
            kind = field_of(name) if is_log(name) else "checkpoint"
            self.changes.append(Aside(name, kind))
            return
        name = edit.src
        if name.endswith(".distcp"):  # holds values that `.metadata` names, and is compared there
            return
        if is_log(name):
            note = self.notes.get(name, "new")
            self.changes.append(Rewrite(name, field_of(name), NewBytes(()), note, new_file=True))
        else:
            self.texts[name] = (None, _after(run, name, later))


def _is_pointer(change: AnyChange) -> bool:
    """Whether it says alone what it made of its file: of a pointer, which the trainer sets anew at
    each save, and of a link. A pointer that stays as it is was not changed."""
    if isinstance(change, NewText):
        return change.old != change.new
    return isinstance(change, Relink) or (isinstance(change, Rewrite) and change.field == "latest")


def _is_tree(file: str) -> bool:
    return file.endswith((*TREES, ".json")) or _name(file) == METADATA


def _home(run: Run, file: str) -> Path | None:
    path = run.root / file
    return path.parent if path.name == METADATA else None


def _after(run: Run, file: str, later: Sequence[Receipt]) -> Version:
    """The file as the surgery left it: as the next surgery that touched it found it, or as is."""
    name = _name(file)
    for i, receipt in enumerate(later):
        for edit in receipt.inverse:
            if isinstance(edit, Replace) and edit.file == file:
                return Version(_kept(run, edit.staged), called=name)
            if isinstance(edit, Truncate) and edit.file == file:
                path = _after(run, file, later[i + 1 :]).path
                return Version(path, edit.old_size, called=name)
            if isinstance(edit, Move) and _inside(file, edit.dst):
                return Version(_kept(run, edit.src + file[len(edit.dst) :]), called=name)
    return Version(_kept(run, file))


def _name(file: str) -> str:
    return file.rpartition("/")[2]


def _saved_since(run: Run, file: str, done: Sequence[Receipt]) -> bool:
    """Whether somebody wrote the file after the last of these surgeries that did."""
    for receipt in reversed(done):
        for edit in receipt.inverse:
            if isinstance(edit, Truncate) and edit.file == file:
                return saved_again(run.root, receipt.id, edit, found(run.root, [edit])[file])
            if isinstance(edit, Replace) and edit.file == file:
                return bool(rewritten(run.root, receipt.id, [file]))
    return False


def _inside(file: str, folder: str) -> bool:
    return file == folder or file.startswith(f"{folder}/")


def _kept(run: Run, file: str) -> Path:
    """Where a file is that the answer is read from."""
    path = run.root / file
    if not disk.exists(path):
        raise SurgeryError(
            f"{file} is gone" + (": its attic was pruned" if in_attic(file) else ""),
            next=command("log"),
        )
    return path
