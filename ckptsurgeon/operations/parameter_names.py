"""What the parameters of another run are called in this one: a page of rules, in YAML, and the
order of those that an optimizer numbers.

A name may have `{i}` in it, a number, and `{i+2}` is that number and 2. A longer word, `{rest}`, is
any text. The first rule that fits is taken.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ckptsurgeon.errors import SurgeryError, UsageError
from ckptsurgeon.files import plain_yaml
from ckptsurgeon.files.plain_yaml import unknown_key
from ckptsurgeon.formats import Part
from ckptsurgeon.formats.fields.values import NUMBER

KEYS = ("rename", "fuse", "split")
PAGE = "docs/transplant.md"
HOLE = re.compile(r"\{([a-z]+)([+-]\d+)?\}")


@dataclass(frozen=True)
class Origin:
    """The parameters of the source whose rows, one after another, are those of one here. Of one
    that is split, this one's are at `index` among those of `siblings`."""

    sources: tuple[str, ...]
    siblings: tuple[str, ...] = ()
    index: int = 0


@dataclass(frozen=True)
class Names:
    """The rules of a page. Without any, names are the same in both runs."""

    rename: Mapping[str, str] = field(default_factory=dict)
    fuse: Mapping[str, Sequence[str]] = field(default_factory=dict)
    split: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def origins(self, names: Collection[str]) -> dict[str, Origin]:
        """Each parameter here that one of the source's `names` leads to. Raises SurgeryError where
        two lead to one."""
        out: dict[str, Origin] = {}
        for new, origin in self._all(names):
            if new in out and out[new] != origin:
                both = " and ".join(", ".join(each.sources) for each in (out[new], origin))
                raise SurgeryError(
                    f"both {both} would be {new} here",
                    next=f"name each parameter once under rename, fuse and split: {PAGE}",
                )
            out[new] = origin
        return out

    def _all(self, names: Collection[str]) -> Iterator[tuple[str, Origin]]:
        for name in names:
            rules = (self._fused(name, names), self._split(name), self._renamed(name))
            yield from next((found for found in rules if found), [(name, Origin((name,)))])

    def _renamed(self, name: str) -> list[tuple[str, Origin]]:
        for old, new in self.rename.items():
            if (holes := _holes(old, name)) is not None:
                return [(_filled(new, holes), Origin((name,)))]
        return []

    def _fused(self, name: str, names: Collection[str]) -> list[tuple[str, Origin]]:
        for new, olds in self.fuse.items():
            for old in olds:
                if (holes := _holes(old, name)) is not None:
                    sources = tuple(_filled(each, holes) for each in olds)
                    if lost := [each for each in sources if each not in names]:
                        raise SurgeryError(
                            f"{name} would be fused with {lost[0]}, which the source has not",
                            next=f"mend the rule for {new} under fuse: {PAGE}",
                        )
                    return [(_filled(new, holes), Origin(sources))]
        return []

    def _split(self, name: str) -> list[tuple[str, Origin]]:
        for old, news in self.split.items():
            if (holes := _holes(old, name)) is not None:
                made = tuple(_filled(each, holes) for each in news)
                return [(new, Origin((name,), made, i)) for i, new in enumerate(made)]
        return []


def _holes(pattern: str, name: str) -> dict[str, int | str] | None:
    """What the words in braces of a pattern stand for in this name; None if it is another."""
    parts, at = [], 0
    for hole in HOLE.finditer(pattern):
        parts += [re.escape(pattern[at : hole.start()]), r"(\d+)" if len(hole[1]) == 1 else "(.+)"]
        at = hole.end()
    match = re.fullmatch("".join([*parts, re.escape(pattern[at:])]), name)
    if match is None:
        return None
    out: dict[str, int | str] = {}
    for hole, text in zip(HOLE.finditer(pattern), match.groups(), strict=True):
        value = int(text) - int(hole[2] or 0) if len(hole[1]) == 1 else text
        if out.setdefault(hole[1], value) != value or (isinstance(value, int) and value < 0):
            return None
    return out


def _filled(pattern: str, holes: Mapping[str, int | str]) -> str:
    def text(hole: re.Match[str]) -> str:
        value = holes[hole[1]]
        return str(value + int(hole[2] or 0) if isinstance(value, int) else value)

    return HOLE.sub(text, pattern)


def read(path: str) -> Names:
    """The rules of the page at `path`; none without one. Raises UsageError with the key that is
    wrong."""
    if not path:
        return Names()
    try:
        data = plain_yaml.read(Path(path))
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}", next=f"--names FILE    {PAGE}") from None
    for key in data:
        if key not in KEYS:
            raise unknown_key(str(key), KEYS, path)
    for key in KEYS:
        rules = data.get(key, {})
        kind = str if key == "rename" else list
        if not isinstance(rules, dict) or not all(isinstance(v, kind) for v in rules.values()):
            raise UsageError(
                f"{path}: {key} is no table of names to {'names' if kind is str else 'lists'}",
                next=PAGE,
            )
        for old, new in rules.items():
            _check(path, key, str(old), [new] if isinstance(new, str) else new)
    return Names(*(data.get(key, {}) for key in KEYS))


def _check(path: str, key: str, old: str, news: Sequence[Any]) -> None:
    """Each word in braces of one side is on the other; there is something to stack."""
    words = [{hole[1] for hole in HOLE.finditer(str(name))} for name in (old, *news)]
    if not news or any(each != words[0] for each in words):
        raise UsageError(
            f"{path}: {key}: {old}: both sides must have the same words in braces",
            next=PAGE,
        )


# --- numbered parameters -------------------------------------------------------------------------


def named(parts: Sequence[Part], order: Sequence[str], where: str) -> list[Part]:
    """The parts, with the names that `order` has for numbers. Raises SurgeryError where a number
    has none, or another size than the weights of that name."""
    weights: dict[str, list[Part]] = {}
    for part in parts:
        if part.kind == "weights":
            weights.setdefault(part.parameter, []).append(part)
    return [_named(part, order, weights, where) for part in parts]


def _named(
    part: Part, order: Sequence[str], weights: Mapping[str, Sequence[Part]], where: str
) -> Part:
    digits = part.parameter.removeprefix(NUMBER)
    if not part.parameter.startswith(NUMBER) or not digits.isdigit():
        return part
    number = int(digits)
    name = order[number] if number < len(order) else ""
    own = weights.get(name, ())
    if len(own) == 1 and own[0].end - own[0].start == part.end:
        return part._replace(parameter=name, cut=own[0].cut, box=own[0].box)
    sizes = " and ".join(str(each.end - each.start) for each in own) or "no weights"
    raise SurgeryError(
        f"{where}: {part.parameter} has {part.end} elements, and {name or 'nothing'}, which is "
        f"number {number} by the order, has {sizes}",
        next=f"write the names in the order of the param groups: {PAGE}",
    )


def order_of(path: str) -> list[str]:
    """The names in a file, one a line."""
    try:
        lines = Path(path).read_text("utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: {error}", next=f"--order FILE    {PAGE}") from None
    return [line.strip() for line in lines if line.strip()]
