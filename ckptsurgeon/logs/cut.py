"""TensorBoard logs: cut a run's event files at a step, and give tags other names."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from ckptsurgeon.edits import AnyChange, Aside, Content, Rewrite, Span
from ckptsurgeon.errors import UsageError
from ckptsurgeon.logs import lineage
from ckptsurgeon.logs.lineage import Lineage
from ckptsurgeon.logs.marks import Marks
from ckptsurgeon.logs.tensorboard import event_file, message
from ckptsurgeon.logs.tensorboard.event_file import Index, Piece, Renamed
from ckptsurgeon.logs.tensorboard.frame import frame
from ckptsurgeon.logs.tensorboard.graft import grafts
from ckptsurgeon.logs.tensorboard.message import FILE_VERSION

if TYPE_CHECKING:
    from ckptsurgeon.logs.segment import Flags

FIELD = "tensorboard"
TEXT = "/text_summary"
"""What torch appends to the tag of a text."""
NOTE = "ckptsurgeon/surgery" + TEXT
"""The tag of the notes."""
_BORN = re.compile(r"(?<=tfevents\.)\d+")
"""In a file's name: when its writer was opened, in seconds."""


def files(logdir: Path) -> list[Path]:
    """The event files directly in `logdir`, in TensorBoard's order."""
    return event_file.files(logdir)


def truncate(
    logdir: Path,
    root: Path,
    marks: Marks,
    *,
    keep_as: str | None,
    salvage: bool = False,
    branch: Collection[str] = (),
    order: str | None = None,
    axes: Mapping[str, str] | None = None,
) -> tuple[list[AnyChange], list[str]]:
    """Changes after which the event files directly in `logdir` hold iterations up to N only, and
    warnings. With `keep_as`, what is cut becomes a run of its own in that new folder; branches that
    overlap a newer one get folders of their own (`keep_as`-2, …).

    Whole records are copied; only a TF1 event that becomes the first of its tag gets the metadata
    of the one before it (event_graft.py). A second call finds nothing to change. Raises
    SurgeryError when the lineage can't be proven and DamagedFile on a bad record (see `lineage`
    and `event_file.scan` for `branch`, `order`, `axes` and `salvage`)."""
    if keep_as is not None:
        _check_name(keep_as)
    indexes = [event_file.scan(path, salvage=salvage) for path in files(logdir)]
    traced = lineage.trace(indexes, marks, branch=branch, order=order, axes=axes)
    names, warnings = _names(indexes, traced)
    changes: list[AnyChange] = []
    for index, kept, name in zip(indexes, traced.kept, names, strict=True):
        same_name = name == index.path.name
        if kept.all() and not index.torn and same_name:
            continue
        file = _relative(index.path, root)
        stays = bool(kept.any()) or not len(index)
        if not stays or not same_name:
            changes.append(Aside(file, FIELD))
        if stays:
            note = f"{int(kept.sum())} of {len(index)} events stay, to step {marks.iteration}"
            new = _relative(logdir / name, root)
            content = _content(file, index, kept)
            changes.append(Rewrite(new, FIELD, content, note, new_file=not same_name))
        warnings += _damage(index)
    if keep_as is not None:
        changes += _cut_branches(indexes, traced, logdir / keep_as, root)
    return changes, [*traced.warnings, *warnings]


def _names(indexes: Sequence[Index], traced: Lineage) -> tuple[list[str], list[str]]:
    """The names under which TensorBoard, which reads by name, reads the files of each training in
    the order in which they were written; and warnings where it will not.

    Only a file whose writer had a wrong clock gets another name: the same with the right time."""
    names = [index.path.name for index in indexes]
    warnings = []
    for training in traced.trainings:
        order = [i for i in training.order if traced.kept[i].any()]
        if all(names[a] < names[b] for a, b in pairwise(order)):
            continue
        right = list(names)
        for i in order:
            seconds = round(training.behind[i])
            if seconds:
                right[i] = _BORN.sub(lambda m: str(int(m[0]) + seconds), names[i], count=1)  # noqa: B023
        if len(set(right)) == len(right) and all(right[a] < right[b] for a, b in pairwise(order)):
            names = right
        else:
            told = ", ".join(names[i] for i in order)
            warnings.append(f"TensorBoard reads by name, but these were written in order: {told}")
    return names, warnings


def _content(file: str, index: Index, kept: Flags, start: bytes = b"") -> Content:
    """The records with a flag. The mtime goes back with the last event, so that the distance
    between both clocks, by which skew is found, stays what it was."""
    where = kept.nonzero()[0]
    back = index.walls[-1] - index.walls[int(where[-1])] if len(where) else 0.0
    pieces: list[bytes | Span] = [start] if start else []
    at = 0
    for record, data in sorted(grafts(index, kept).items()):
        begin, end = index.span(record)
        pieces += _spans(file, index, kept, at, begin)
        pieces.append(data)
        at = end
    pieces += _spans(file, index, kept, at, index.end)
    return Content(tuple(pieces), index.mtime_ns - max(0, int(back * 1e9)))


def _spans(file: str, index: Index, kept: Flags, start: int, stop: int) -> list[Span]:
    """The records with a flag between two record borders."""
    return [
        Span(file, max(a, start), min(b, stop))
        for a, b in event_file.spans(index, kept)
        if a < stop and b > start
    ]


def _damage(index: Index) -> list[str]:
    name = index.path.name
    told = [
        f"{name}: {end - start} damaged bytes at {start} are left out"
        for start, end in index.dropped()
    ]
    if index.torn:
        told.append(f"{name}: {index.torn} bytes of an unfinished event at the end are cut")
    return told


def _cut_branches(
    indexes: Sequence[Index], traced: Lineage, folder: Path, root: Path
) -> list[AnyChange]:
    """Files of the kept branches, with the records that the run loses. TensorBoard shows one of two
    branches that overlap in one run, so the newest gets `folder` and each older one its own."""
    import numpy as np

    folders = dict.fromkeys(range(len(indexes)), folder)
    for training in traced.trainings:
        begins: list[int] = []
        for i in reversed(training.order):
            if i not in training.lost:
                continue
            lo, hi = training.lost[i]
            number = next((k for k, first in enumerate(begins) if hi < first), len(begins))
            begins[number : number + 1] = [lo]
            folders[i] = folder if not number else folder.with_name(f"{folder.name}-{number + 1}")
    changes: list[AnyChange] = []
    for i, (index, kept) in enumerate(zip(indexes, traced.kept, strict=True)):
        kinds = np.frombuffer(bytes(index.kinds), np.uint8)
        cut = ~kept & (kinds != event_file.DROPPED)
        if not (cut & (kinds != FILE_VERSION)).any():
            continue
        if folders[i].exists():
            raise UsageError(
                f"{folders[i]} exists, so a cut branch can't be kept there",
                next="give another name: --keep-tb NAME",
            )
        first = int(cut.argmax())
        headed = kinds[first] == FILE_VERSION
        start = b"" if headed else event_file.version_record(index.walls[first])
        content = _content(_relative(index.path, root), index, cut, start)
        file = _relative(folders[i] / index.path.name, root)
        note = f"the cut branch, {int(cut.sum())} events"
        changes.append(Rewrite(file, FIELD, content, note, new_file=True))
    return changes


def _check_name(keep_as: str) -> None:
    if keep_as in ("", ".", "..") or "/" in keep_as or "tfevents" in keep_as:
        raise UsageError(
            f"{keep_as!r} is not the name of a folder for the cut branch",
            next="give one plain name, such as tb-7k-glitch",
        )


def _relative(path: Path, root: Path) -> str:
    return Path(os.path.relpath(path, root)).as_posix()


def note(logdir: Path, root: Path, step: int, text: str, when: float) -> Rewrite:
    """A small event file that shows `text` (Markdown) at `step` in TensorBoard's text dashboard, as
    `ckptsurgeon/surgery`: whoever looks at the curves sees what was done to them. It is cut like
    everything else when the run goes back to before that step.

    By name it comes after the files that are there and before those of the next trainer, whose
    clock may be behind: TensorBoard never shows what a file gets whose name is not the last."""
    names = (_BORN.search(path.name) for path in files(logdir))
    born = max((int(name[0]) for name in names if name), default=int(when))
    number = 1
    while (path := logdir / f"events.out.tfevents.{born}.~{number}.ckptsurgeon").exists():
        number += 1
    event = message.text_event(when, step, NOTE, text)
    data = event_file.version_record(when) + frame(event)
    content = Content((data,), int(when * 1e9))
    return Rewrite(_relative(path, root), FIELD, content, f"a note at step {step}", new_file=True)


# --- rename --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Counts:
    """Events per (old tag, new tag), the keys of the map that met no event, and the patterns in
    custom_scalars layouts that still look for an old tag."""

    events: Mapping[tuple[str, str], int]
    unmatched: tuple[str, ...]
    patterns: tuple[str, ...] = ()

    def sentences(self) -> list[str]:
        """What a plan says about the rename."""
        lines = [f"{old} → {new}: {count} events" for (old, new), count in self.events.items()]
        if self.unmatched:
            lines.append("no event has the tag " + ", ".join(repr(key) for key in self.unmatched))
        for pattern in self.patterns:
            lines.append(
                f"a chart of custom_scalars still looks for {pattern!r}: change its layout"
            )
        return lines


def rename(
    logdir: Path,
    root: Path,
    pairs: Mapping[str, str],
    *,
    regex: bool = False,
    allow_merge: bool = False,
) -> tuple[list[AnyChange], Counts]:
    """Changes that give the tags in `logdir` new names: one pass per file, all pairs at once, so
    that a → b and b → c do not chain. With `regex` a key is a pattern for a whole tag and its value
    a template; the first that matches wins. A key also names the text that torch logs under it.

    Raises UsageError when two tags of the run would become one, unless `allow_merge`. A tag that
    one file has by its old name and another by its new one is not a merge: it is the same curve."""
    name, used = _namer(pairs, regex)
    changes: list[AnyChange] = []
    totals: dict[tuple[str, str], int] = {}
    patterns: set[str] = set()
    for path in files(logdir):
        pieces: list[Piece] = []
        renamed = event_file.rename(path, name, pieces.append)
        patterns |= renamed.patterns
        if not any(isinstance(piece, bytes) for piece in pieces):
            continue
        for pair, count in renamed.counts.items():
            if not pair[1]:
                raise UsageError(
                    f"{path}: the new name of {pair[0]!r} would be empty", next="give it a name"
                )
            totals[pair] = totals.get(pair, 0) + count
        if not allow_merge:
            _check_merge(path, renamed, name)
        file = _relative(path, root)
        parts = (piece if isinstance(piece, bytes) else Span(file, *piece) for piece in pieces)
        note = f"{sum(renamed.counts.values())} events get new tags"
        content = Content(tuple(parts), path.stat().st_mtime_ns)
        changes.append(Rewrite(file, FIELD, content, note))
    if not allow_merge:
        sources: dict[str, str] = {}
        for old, new in totals:
            if sources.setdefault(new, old) != old:
                raise _merge(f"{sources[new]!r} and {old!r} would both become {new!r} in {logdir}")
    left = tuple(sorted(pattern for pattern in patterns if _matches(pattern, totals)))
    return changes, Counts(totals, tuple(key for key in pairs if key not in used), left)


def _matches(pattern: str, totals: Mapping[tuple[str, str], int]) -> bool:
    try:
        return any(re.fullmatch(pattern, old) for old, _ in totals)
    except re.error:
        return False


def _namer(pairs: Mapping[str, str], regex: bool) -> tuple[Callable[[str], str], set[str]]:
    """The function from old to new tag, and the set of keys that it has used so far."""
    used: set[str] = set()
    if regex:
        try:
            patterns = [(re.compile(key), key, new) for key, new in pairs.items()]
        except re.error as error:
            raise UsageError(
                f"{error.pattern!r} is not a regular expression: {error}",
                next="without --regex a tag is taken as it is written",
            ) from None

        def by_pattern(tag: str) -> str:
            for pattern, key, new in patterns:
                match = pattern.fullmatch(tag)
                if match:
                    used.add(key)
                    return _expanded(match, new)
            return tag

        return by_pattern, used

    def literal(tag: str) -> str:
        if tag in pairs:
            used.add(tag)
            return pairs[tag]
        base = tag.removesuffix(TEXT)
        if base != tag and base in pairs:
            used.add(base)
            return pairs[base] + TEXT
        return tag

    return literal, used


def _expanded(match: re.Match[str], new: str) -> str:
    try:
        return match.expand(new)
    except (re.error, IndexError) as error:
        raise UsageError(
            f"{new!r} is no new name for what {match.re.pattern!r} finds: {error}",
            next=f"groups in the pattern: {match.re.groups}; \\1 is the first, and \\\\ is one \\",
        ) from None


def _check_merge(path: Path, renamed: Renamed, name: Callable[[str], str]) -> None:
    sources: dict[str, str] = {}
    for tag in sorted(renamed.tags):
        new = name(tag)
        if sources.setdefault(new, tag) != tag:
            raise _merge(f"{path}: {sources[new]!r} and {tag!r} would both be {new!r}")


def _merge(what: str) -> UsageError:
    return UsageError(
        what, next="give them different names, or allow it: rename-tb-events --allow-merge"
    )
