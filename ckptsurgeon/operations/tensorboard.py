"""TensorBoard logs: cut a run's event files at a step, and give tags other names."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ckptsurgeon.edits import AnyChange, Aside, Content, Rewrite, Span
from ckptsurgeon.errors import UsageError
from ckptsurgeon.files import event_file
from ckptsurgeon.files.event_file import Index, Piece, Renamed
from ckptsurgeon.files.event_message import FILE_VERSION
from ckptsurgeon.operations import lineage
from ckptsurgeon.operations.axis import ITERATION, axis
from ckptsurgeon.operations.lineage import Marks

if TYPE_CHECKING:
    from ckptsurgeon.operations.segment import Flags

FIELD = "tensorboard"
TEXT = "/text_summary"
"""What torch appends to the tag of a text."""


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
    warnings. With `keep_as`, what is cut becomes a run of its own in that new folder.

    Whole records are copied, none is encoded anew. A second call finds nothing to change. Raises
    SurgeryError when the lineage can't be proven and DamagedFile on a bad record (see `lineage`
    and `event_file.scan` for `branch`, `order`, `axes` and `salvage`)."""
    if keep_as is not None:
        _check_name(keep_as)
    indexes = [event_file.scan(path, salvage=salvage) for path in files(logdir)]
    if not indexes:
        return [], []
    traced = lineage.trace(indexes, marks, branch=branch, order=order, axes=axes)
    changes: list[AnyChange] = []
    warnings = list(traced.warnings)
    archive: list[AnyChange] = []
    for index, kept in zip(indexes, traced.kept, strict=True):
        whole = bool(kept.all())
        if whole and not index.torn:
            continue
        file = _relative(index.path, root)
        if len(index) and not kept.any():
            changes.append(Aside(file, FIELD))
        else:
            note = f"{int(kept.sum())} of {len(index)} events stay, to step {marks.iteration}"
            changes.append(Rewrite(file, FIELD, _content(file, index, kept), note))
        warnings += _damage(index)
        if keep_as is not None and not whole:
            archive += _cut_branch(index, kept, root, logdir / keep_as, file)
    if archive and keep_as is not None and (logdir / keep_as).exists():
        raise UsageError(
            f"{logdir / keep_as} exists, so the cut branch can't be kept there",
            next="give another name: --keep-tb NAME",
        )
    return changes + archive, warnings


def _content(file: str, index: Index, kept: Flags, start: bytes = b"") -> Content:
    """The records with a flag. The mtime goes back with the last event, so that the distance
    between both clocks, by which skew is found, stays what it was."""
    where = kept.nonzero()[0]
    back = index.walls[-1] - index.walls[int(where[-1])] if len(where) else 0.0
    spans = (Span(file, a, b) for a, b in event_file.spans(index, kept))
    pieces = (*((start,) if start else ()), *spans)
    return Content(pieces, index.mtime_ns - max(0, int(back * 1e9)))


def _damage(index: Index) -> list[str]:
    name = index.path.name
    told = [
        f"{name}: {end - start} damaged bytes at {start} are left out"
        for start, end in index.dropped()
    ]
    if index.torn:
        told.append(f"{name}: {index.torn} bytes of an unfinished event at the end are cut")
    return told


def _cut_branch(index: Index, kept: Flags, root: Path, folder: Path, file: str) -> list[AnyChange]:
    """The file of the kept branch, with the records that `index` loses."""
    import numpy as np

    kinds = np.frombuffer(bytes(index.kinds), np.uint8)
    cut = ~kept & (kinds != event_file.DROPPED)
    if not (cut & (kinds != FILE_VERSION)).any():
        return []
    first = int(cut.argmax())
    start = b"" if kinds[first] == FILE_VERSION else event_file.version_record(index.walls[first])
    content = _content(file, index, cut, start)
    note = f"the cut branch, {int(cut.sum())} events"
    new = _relative(folder / index.path.name, root)
    return [Rewrite(new, FIELD, content, note, new_file=True)]


def _check_name(keep_as: str) -> None:
    if keep_as in ("", ".", "..") or "/" in keep_as or "tfevents" in keep_as:
        raise UsageError(
            f"{keep_as!r} is not the name of a folder for the cut branch",
            next="give one plain name, such as tb-7k-glitch",
        )


def _relative(path: Path, root: Path) -> str:
    return Path(os.path.relpath(path, root)).as_posix()


def last_step(logdir: Path) -> int | None:
    """The highest iteration in the last events of the files in `logdir`, without reading all of
    them; None when no event there counts iterations."""
    found: list[int] = []
    for path in files(logdir):
        found += [
            step
            for _, step, _, tags in event_file.last_events(path)
            if any(axis(tag, {}) == ITERATION for tag in tags)
        ]
    return max(found, default=None)


# --- rename --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Counts:
    """Events per (old tag, new tag), and the keys of the map that met no event."""

    events: Mapping[tuple[str, str], int]
    unmatched: tuple[str, ...]

    def sentences(self) -> list[str]:
        """What a plan says about the rename."""
        lines = [f"{old} → {new}: {count} events" for (old, new), count in self.events.items()]
        if self.unmatched:
            lines.append("no event has the tag " + ", ".join(repr(key) for key in self.unmatched))
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
    for path in files(logdir):
        pieces: list[Piece] = []
        renamed = event_file.rename(path, name, pieces.append)
        if not any(renamed.counts.values()):
            continue
        for pair, count in renamed.counts.items():
            if not pair[1]:
                raise UsageError(f"{path}: the new name of {pair[0]!r} would be empty")
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
    return changes, Counts(totals, tuple(key for key in pairs if key not in used))


def _namer(pairs: Mapping[str, str], regex: bool) -> tuple[Callable[[str], str], set[str]]:
    """The function from old to new tag, and the set of keys that it has used so far."""
    used: set[str] = set()
    if regex:
        try:
            patterns = [(re.compile(key), key, new) for key, new in pairs.items()]
        except re.error as error:
            raise UsageError(f"{error.pattern!r} is not a regular expression: {error}") from None

        def by_pattern(tag: str) -> str:
            for pattern, key, new in patterns:
                match = pattern.fullmatch(tag)
                if match:
                    used.add(key)
                    return match.expand(new)
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
