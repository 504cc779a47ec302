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


class Claim(NamedTuple):
    """What the section `key` makes of the elements [start, end) under a path; `whole` is whether it
    decides all that is there, and no number alone."""

    start: float
    end: float
    key: str
    field: str
    whole: bool


def refuse_conflicts(by_section: Iterable[tuple[str, Sequence[AnyChange]]]) -> None:
    """Raise UsageError where two sections, each by its key, make something of the same elements of
    a tensor, of a value and of what holds it, or of the trainer's config."""
    places: dict[str, dict[Path, list[Claim]]] = {}
    configs: dict[str, str] = {}
    sections = [(key, changes) for key, changes in by_section if changes]
    for key, changes in sections if len(sections) > 1 else ():
        for change in changes:
            if isinstance(change, Change) and change.path:
                start, end = change.elements or (0, math.inf)
                claim = Claim(start, end, key, change.field, _is_whole(change.new))
                within = places.setdefault(change.file, {})
                for path in change.paths():
                    within.setdefault(path, []).append(claim)
            elif isinstance(change, Rewrite) and change.field == "config":
                other = configs.setdefault(change.file, key)
                if other != key:
                    raise _both(other, key, change.file)
    for paths in places.values():
        for path, claims in paths.items():
            _refuse_overlap(claims)
            for outer in (paths.get(path[:n], ()) for n in range(1, len(path))):
                for claim in outer:
                    if claim.key != claims[0].key:
                        raise _both(claim.key, claims[0].key, claim.field)


def _refuse_overlap(claims: Sequence[Claim]) -> None:
    keys = list(dict.fromkeys(claim.key for claim in claims))  # in the order of the sections
    if len(keys) < 2:
        return
    before: dict[str, Claim] = {}
    for claim in sorted(claims):
        for other in before.values():
            apart = other.key == claim.key or claim.start >= other.end
            if not apart and (claim.whole or other.whole):
                first, second = sorted((other.key, claim.key), key=keys.index)
                raise _both(first, second, claim.field)
        if claim.key not in before or claim.end > before[claim.key].end:
            before[claim.key] = claim


def _is_whole(new: object) -> bool:
    if isinstance(new, str):
        return new in (ZEROS, ABSENT)
    return isinstance(new, (Computed, Elements, Fill, Renamed))


def _both(first: str, second: str, what: str) -> UsageError:
    return UsageError(
        f"both `{first}` and `{second}` change {what}",
        next=f"apply a recipe with `{first}` alone, and then one with `{second}`",
    )
