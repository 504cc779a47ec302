"""Gives the tags in the event files of one log folder new names."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path

from ckptsurgeon.errors import UsageError, count
from ckptsurgeon.files.expressions import bounded
from ckptsurgeon.logs.new_names import Counts, namer, two_into_one
from ckptsurgeon.logs.tensorboard import event_file, renaming
from ckptsurgeon.logs.tensorboard.renaming import Piece, Renamed
from ckptsurgeon.plans.edits import AnyChange, Content, Rewrite, Span, relative
from ckptsurgeon.plans.log_fields import TENSORBOARD


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
    name, used = namer(pairs, regex)
    changes: list[AnyChange] = []
    totals: dict[tuple[str, str], int] = {}
    patterns: set[str] = set()
    tags: set[str] = set()
    for path in event_file.files(logdir):
        pieces: list[Piece] = []
        renamed = renaming.rename(path, name, pieces.append)
        patterns |= renamed.patterns
        tags |= renamed.tags
        if not any(isinstance(piece, bytes) for piece in pieces):
            continue
        for pair, number in renamed.counts.items():
            if not pair[1]:
                raise UsageError(
                    f"{path}: the new name of {pair[0]!r} would be empty", next="give it a name"
                )
            totals[pair] = totals.get(pair, 0) + number
        if not allow_merge:
            _check_merge(path, renamed, name)
        file = relative(path, root)
        parts = (piece if isinstance(piece, bytes) else Span(file, *piece) for piece in pieces)
        many = sum(renamed.counts.values())
        note = count(many, "event gets a new tag", "events get new tags")
        content = Content(tuple(parts), path.stat().st_mtime_ns)
        changes.append(Rewrite(file, TENSORBOARD, content, note))
    if not allow_merge:
        sources: dict[str, str] = {}
        for old, new in totals:
            if sources.setdefault(new, old) != old:
                raise two_into_one(
                    f"{sources[new]!r} and {old!r} would both become {new!r} in {logdir}"
                )
    left = tuple(sorted(pattern for pattern in patterns if _matches(pattern, totals)))
    unmatched = tuple(key for key in pairs if key not in used)
    return changes, Counts(totals, unmatched, left, frozenset(tags))


def _matches(pattern: str, totals: Mapping[tuple[str, str], int]) -> bool:
    try:
        with bounded(pattern):
            return any(re.fullmatch(pattern, old) for old, _ in totals)
    except re.error:
        return False


def _check_merge(path: Path, renamed: Renamed, name: Callable[[str], str]) -> None:
    sources: dict[str, str] = {}
    for tag in sorted(renamed.tags):
        new = name(tag)
        if sources.setdefault(new, tag) != tag:
            raise two_into_one(f"{path}: {sources[new]!r} and {tag!r} would both be {new!r}")
