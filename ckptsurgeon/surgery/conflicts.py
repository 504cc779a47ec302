"""Two sections of a recipe that change one thing: each reads the run as it is, one would be lost.

Numbers of a setting are not among it: sections that share one ask each other.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ckptsurgeon.errors import UsageError
from ckptsurgeon.plans.edits import (
    ABSENT,
    ZEROS,
    AnyChange,
    Change,
    Computed,
    Elements,
    Fill,
    Key,
    Renamed,
    Rewrite,
)

Path = tuple[Key, ...]


class Comparison(NamedTuple):
    """What the section `key` says of the elements [start, end) under a path; `whole` is whether it
    decides all that is there, and no number alone."""

    start: float
    end: float
    key: str
    field: str
    whole: bool


def refuse_two_words(by_section: Iterable[tuple[str, Sequence[AnyChange]]]) -> None:
    """Raise UsageError where two sections, each by its key, make something of the same elements of
    a tensor, of a value and of what holds it, or of the trainer's config."""
    places: dict[str, dict[Path, list[Comparison]]] = {}
    configs: dict[str, str] = {}
    sections = [(key, changes) for key, changes in by_section if changes]
    for key, changes in sections if len(sections) > 1 else ():
        for change in changes:
            if isinstance(change, Change) and change.path:
                start, end = change.elements or (0, math.inf)
                word = Comparison(start, end, key, change.field, _is_whole(change.new))
                within = places.setdefault(change.file, {})
                for path in change.paths():
                    within.setdefault(path, []).append(word)
            elif isinstance(change, Rewrite) and change.field == "config":
                other = configs.setdefault(change.file, key)
                if other != key:
                    raise _both(other, key, change.file)
    for paths in places.values():
        for path, words in paths.items():
            _refuse_overlap(words)
            for outer in (paths.get(path[:n], ()) for n in range(1, len(path))):
                for word in outer:
                    if word.key != words[0].key:
                        raise _both(word.key, words[0].key, word.field)


def _refuse_overlap(words: Sequence[Comparison]) -> None:
    keys = list(dict.fromkeys(word.key for word in words))  # in the order of the sections
    if len(keys) < 2:
        return
    before: dict[str, Comparison] = {}
    for word in sorted(words):
        for other in before.values():
            apart = other.key == word.key or word.start >= other.end
            if not apart and (word.whole or other.whole):
                first, second = sorted((other.key, word.key), key=keys.index)
                raise _both(first, second, word.field)
        if word.key not in before or word.end > before[word.key].end:
            before[word.key] = word


def _is_whole(new: object) -> bool:
    if isinstance(new, str):
        return new in (ZEROS, ABSENT)
    return isinstance(new, (Computed, Elements, Fill, Renamed))


def _both(first: str, second: str, what: str) -> UsageError:
    return UsageError(
        f"both `{first}` and `{second}` change {what}",
        next=f"apply a recipe with `{first}` alone, and then one with `{second}`",
    )
