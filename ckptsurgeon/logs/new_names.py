"""Old names of what is logged become new ones: by a map, or by patterns; and what that met."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache

from ckptsurgeon.errors import UsageError, count, first_few
from ckptsurgeon.files.expressions import bounded
from ckptsurgeon.hints import command
from ckptsurgeon.plans.frozen import frozen

TEXT = "/text_summary"
"""What torch appends to the tag of a text."""


@frozen
class Counts:
    """Events per (old tag, new tag), the keys of the map that met no event, the patterns in
    custom_scalars layouts that still look for an old tag, and all tags by their old names."""

    events: Mapping[tuple[str, str], int]
    unmatched: tuple[str, ...]
    patterns: tuple[str, ...] = ()
    tags: frozenset[str] = frozenset()

    def sentences(self) -> list[str]:
        """What a plan says about the rename."""
        lines = [
            f"{old} → {new}: {count(number, 'event')}" for (old, new), number in self.events.items()
        ]
        if self.unmatched:
            lines.append("no event has the tag " + ", ".join(repr(key) for key in self.unmatched))
        for pattern in self.patterns:
            lines.append(
                f"a chart of custom_scalars still looks for {pattern!r}: change its layout"
            )
        return lines


def merged(counts: Sequence[Counts]) -> Counts:
    """The counts of several folders as those of one."""
    events: dict[tuple[str, str], int] = {}
    for each in counts:
        for pair, number in each.events.items():
            events[pair] = events.get(pair, 0) + number
    unmatched = [k for k in counts[0].unmatched if all(k in each.unmatched for each in counts)]
    patterns = sorted({pattern for each in counts for pattern in each.patterns})
    tags = frozenset(tag for each in counts for tag in each.tags)
    return Counts(events, tuple(unmatched), tuple(patterns), tags)


def refuse_nowhere(
    counts: Counts,
    pairs: Mapping[str, str],
    where: Sequence[object],
    *,
    regex: bool,
    by: str = "rename-tb-events",
) -> None:
    """Raise UsageError when no event has any of the tags, by its old name or its new one; `where`
    is the rest of a command `by` that works on the same logs."""
    if counts.events or any(new in counts.tags for new in pairs.values()):
        return
    old, new = next(iter(pairs.items()))
    known = sorted(counts.tags)
    near = [] if regex else difflib.get_close_matches(old, known, n=3, cutoff=0.4)
    near += [tag for tag in known if not regex and old.lower() in tag.lower() and tag not in near]
    some = first_few(known)
    raise UsageError(
        f"no {'tag matches' if regex else 'event has the tag'} {', '.join(map(repr, pairs))}",
        next=[command(by, tag, new, *where) for tag in near[:3]]
        or (f"the tags are: {some}" if known else command("status", why="where the logs are")),
    )


def namer(pairs: Mapping[str, str], regex: bool) -> tuple[Callable[[str], str], set[str]]:
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

        @cache
        def by_pattern(tag: str) -> str:
            for pattern, key, new in patterns:
                with bounded(key):
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
            f"{new!r} can't be the new name of what {match.re.pattern!r} matches: {error}",
            next=f"groups in the pattern: {match.re.groups}; \\1 is the first, and \\\\ is one \\",
        ) from None


def each(
    names: Iterable[str], name: Callable[[str], str], where: object, allow_merge: bool
) -> dict[str, str]:
    """Old → new name of all that one log has. Raises UsageError where one would be empty, or two
    would become one and may not."""
    new = {old: name(old) for old in names}
    sources: dict[str, str] = {}
    for old, to in new.items():
        if not to:
            raise UsageError(
                f"{where}: the new name of {old!r} would be empty", next="give it a name"
            )
        if sources.setdefault(to, old) != old and not allow_merge:
            raise two_into_one(f"{where}: {sources[to]!r} and {old!r} would both be {to!r}")
    return new


def noted(numbers: int) -> str:
    """What the plan says of a log of which so many numbers are renamed."""
    return count(numbers, "number gets a new name", "numbers get new names")


def two_into_one(what: str) -> UsageError:
    """The refusal of two names that would become one."""
    return UsageError(what, next="give them different names, or allow it: --allow-merge")
