"""The way back out of a committed surgery that can't be finished, from whatever point it reached.

For each file it is told from the disk whether it still is what was there before the surgery, what
the surgery made of it, or something in between; what is none of these somebody else wrote, and it
is left. Reads only.

Limits. A file that is longer than `kept.SMALL` and was replaced whole is known by its size and
time. A shard that is edited in place is known by its size, the bytes right before the edit, its
own bytes, and before the edit its time: what somebody wrote further up and left these alone is
not seen, and stays. A file that the surgery gave another name gets the old one, whatever was
written to it since. A shard that an undo has cut, and that lost the time which the undo gave it,
counts as somebody else's.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from ckptsurgeon import disk
from ckptsurgeon.errors import InterruptedSurgery
from ckptsurgeon.hints import command
from ckptsurgeon.plans.edits import Inverse, Move, Replace, Tail, Truncate
from ckptsurgeon.transaction import given_up, kept, renames, staging
from ckptsurgeon.transaction.digests import anchored, digest_of
from ckptsurgeon.transaction.entry import Entry, Step
from ckptsurgeon.transaction.home import ATTIC, STAGING, in_attic, staged_name
from ckptsurgeon.transaction.inverse import cut_off, kept_tails
from ckptsurgeon.transaction.redo import GONE
from ckptsurgeon.transaction.staged import Staged

AGAIN = command("recover", "--give-up", why="after that")


def find(root: Path, entry: Entry) -> Entry:
    """The entry with which `recover` takes the surgery back, as far as its files are its own.
    Raises InterruptedSurgery where that can't be told."""
    receipt = given_up.staged_receipt(root, entry.id)
    record = root / staged_name(entry.id, "kept.json")
    known = kept.read(record) or kept.read(root / kept.record_file(entry.id))
    steps = [step for step in entry.steps if not _keeps_tails(step, entry.id)]
    pairs = list(zip(reversed(steps), receipt.inverse, strict=False))
    fits = len(steps) == len(receipt.inverse) and all(_fits(*pair) for pair in pairs)
    if not fits or (not known and any(isinstance(step, (Move, Replace)) for step in steps)):
        raise InterruptedSurgery(
            f"{record.parent}: the records of surgery {entry.id} don't say what brings back the "
            "state before it",
            untouched="nothing was touched by this command",
            next=("put the file back as the surgery left it", command("recover")),
        )
    freed = {step.src for step in steps if isinstance(step, Move)}
    way = _Way(root, entry.id, known, freed)
    for step, back in pairs:
        way.add(step, back)
    files = dict.fromkeys([*entry.files, given_up.staged_record(entry.id), *way.dropped])
    folders = dict.fromkeys([*entry.directories, *staging.folders_of(way.dropped)])
    return replace(
        entry,
        files=tuple(files),
        directories=tuple(folders),
        back=tuple(way.steps),
        left=way.left,
    )


def _keeps_tails(step: Step, id: str) -> bool:
    return isinstance(step, Move) and step.dst == kept_tails(id)


def _fits(step: Step, back: Inverse) -> bool:
    """Whether it is the inverse of that step."""
    if isinstance(step, Move):
        return isinstance(back, Move) and (back.src, back.dst) == (step.dst, step.src)
    kinds = {Tail: Truncate, Truncate: Tail, Replace: Replace}
    return type(back) is kinds[type(step)] and not isinstance(back, Move) and back.file == step.file


def _is_staged(name: str) -> bool:
    return f"{STAGING}/" in name


def _is_torn(found: bytes, ours: bytes) -> bool:
    """Whether each byte is ours, or a zero that was not written yet."""
    return all(was in (0, our) for was, our in zip(found, ours, strict=False))


@dataclass
class _Way:
    """What takes back the steps so far, the last one first."""

    root: Path
    id: str
    known: Mapping[str, kept.Known]
    freed: Collection[str]
    """Names that a step moves something away from: what bears one is that step's."""
    steps: list[Step] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    left: dict[str, str] = field(default_factory=dict)
    _bears: dict[str, str | None] = field(default_factory=dict)
    """Name → what lies there once `steps` are done: the name it has now, None for nothing."""
    _kept: dict[str, str] = field(default_factory=dict)
    """File → where the step that replaces it next keeps what it is before that."""

    def add(self, step: Step, back: Inverse) -> None:
        if isinstance(step, Move):
            self._move(step)
        elif isinstance(step, Replace):
            self._replace(step)
        elif isinstance(step, Tail) and isinstance(back, Truncate):
            self._cut(step, back)
        elif isinstance(step, Truncate) and isinstance(back, Tail):
            self._append(step, back)

    def _path(self, name: str) -> Path | None:
        """What lies there once `steps` are done."""
        there = self._bears.get(name, name)
        return self.root / there if there is not None and disk.is_there(self.root / there) else None

    def _is(self, name: str, record: str) -> bool:
        """Whether it is what the record has under that name."""
        path, expected = self._path(name), self.known.get(record)
        return path is not None and expected is not None and kept.same(path, expected)

    # --- moved and replaced ----------------------------------------------------------------------

    def _move(self, step: Move) -> None:
        new, source, target = _is_staged(step.src), self._path(step.src), self._path(step.dst)
        if target is None:
            if source is None and not new:
                self.left[step.src] = ""
        elif source is not None:
            if renames.is_taken(source, target, step):
                if step.dst not in self.freed:
                    self.left[step.dst] = ""
            elif not new:  # somebody has given its name to another file
                self.left[step.src] = step.dst if in_attic(step.dst) else ""
        elif new and not self._is(step.dst, step.dst):
            self.left[step.dst] = ""
        else:
            self._rename(step.dst, step.src)

    def _rename(self, src: str, dst: str) -> None:
        path = self._path(src)
        assert path is not None
        self.steps.append(renames.known(path, Move(src, dst)))
        self._bears[dst], self._bears[src] = self._bears.get(src, src), None

    def _replace(self, step: Replace) -> None:
        new = self._kept.get(step.file, step.file)
        self._kept[step.file] = step.kept
        if self._path(step.kept) is None:
            if self._path(step.staged) is None or self._path(step.file) is None:
                self.left[step.file] = ""
        elif self._is(step.file, new):
            self.steps.append(Replace(step.file, staged=step.kept, kept=step.staged))
            self._bears[step.file], self._bears[step.kept] = step.kept, None
        elif self._is(step.file, step.kept):
            self.dropped.append(step.kept.replace(f"/{ATTIC}/", "/staging/") + ".kept")
            self._rename(step.kept, self.dropped[-1])
        else:
            self.left[step.file] = step.kept

    # --- edited in place -------------------------------------------------------------------------

    def _cut(self, step: Tail, back: Truncate) -> None:
        with self._opened(step.file) as descriptor:
            if descriptor is None:
                return
            status = os.fstat(descriptor)
            size, end = status.st_size, step.spans[-1][1]
            anchor = digest_of(descriptor, anchored(step.old_size))
            if size == step.old_size:
                ours = kept.at(status.st_mtime_ns, back.mtime_ns)
            else:
                ours = step.old_size < size <= end and self._wrote(descriptor, step, step)
            if not ours or anchor != step.anchor:
                self.left[step.file] = ""
            elif size != step.old_size:
                self._refuse_other_names(step.file, status)
                spans = ((min(step.cut, size), size),)
                digest = digest_of(descriptor, spans)
                self.steps.append(replace(back, new_size=size, spans=spans, digest=digest))

    def _append(self, step: Truncate, back: Tail) -> None:
        """What an undo cut off is written again."""
        with self._opened(step.file) as descriptor:
            if descriptor is None:
                return
            status = os.fstat(descriptor)
            size = status.st_size
            if size == step.new_size and digest_of(descriptor, step.spans) == step.digest:
                return
            if size == step.old_size:
                ours = kept.at(status.st_mtime_ns, step.mtime_ns)
            else:
                ours = step.old_size < size <= step.new_size
            if not ours or not self._wrote(descriptor, step, back):
                self.left[step.file] = ""
                return
            self._refuse_other_names(step.file, status)
            anchor = digest_of(descriptor, anchored(step.old_size))
            self.steps.append(replace(back, anchor=anchor))

    @contextmanager
    def _opened(self, name: str) -> Iterator[int | None]:
        """The file, open to be read; None, and it is left, where there is none."""
        try:
            descriptor = os.open(self.root / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            if error.errno not in GONE:
                raise
            self.left[name] = ""
            yield None
            return
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def _wrote(self, descriptor: int, step: Tail | Truncate, tail: Tail) -> bool:
        """Whether what it has after the old size is of these staged bytes, or zeros: what a write
        leaves that was cut off by a kill, or by a power cut."""
        written = step is tail
        path = self.root / staging.tails_file(self.id) if written else cut_off(self.root, self.id)
        if not disk.is_there(path):
            return written  # its last bytes from before say so alone
        with Staged(path) as staged:
            if staged.digest(tail.at, tail.at + tail.size) != tail.digest:
                return written
            at = tail.at
            for start, end in tail.spans:
                ours = staged.read(at, at + end - start)
                found = os.pread(descriptor, end - start, start)
                if found != ours[: len(found)] and not _is_torn(found, ours):
                    return False
                at += end - start
        return True

    def _refuse_other_names(self, name: str, status: os.stat_result) -> None:
        if status.st_nlink > 1:
            raise InterruptedSurgery(
                f"{self.root / name}: it has {status.st_nlink} names (hard links), and an edit "
                "would change them all",
                untouched="nothing was touched by this command",
                next=("remove its other names, or make copies of them", AGAIN),
            )
