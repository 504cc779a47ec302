"""What the parameters of another run are called in this one: a page of rules, in YAML.

A name may have `{i}` in it, a number, and `{i+2}` is that number and 2. A longer word, `{rest}`, is
any text. The first rule that fits is taken. A page serves both directions: its sides are taken as
more names of the two runs fit.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import field, replace
from pathlib import Path
from typing import Any

from ckptsurgeon import disk
from ckptsurgeon.errors import SurgeryError, UsageError
from ckptsurgeon.files import plain_yaml
from ckptsurgeon.files.plain_yaml import unknown_key
from ckptsurgeon.formats.tensors.row_order import HERE, THERE
from ckptsurgeon.hints import Hint, again
from ckptsurgeon.operations.refusals import Refusals
from ckptsurgeon.plans.frozen import held

PAGE = "docs/transplant.md"
FOLDER = Path(__file__).with_name("names")
HOLE = re.compile(r"\{([a-z]+)([+-]\d+)?\}")
NAMES = ("rename", "fuse", "split")
ROWS = ("groups", "halves_to_pairs", "pairs_to_halves", "stacked")
KEYS = (*NAMES, *ROWS, "transpose", "sizes", "use")
SIZES = ("heads", "kv_heads")

Size = str | int
"""How many, or one of SIZES."""


@held
class Origin:
    """The parameters of the source whose rows, one after another, are those of one here. Of one
    that is split, this one's are at `index` among those of `siblings`. Rows come in so many
    `groups`, each with those of every one. `heads` says of each that is not fused how many heads it
    has whose rows lie in halves in one of the runs and in pairs in the other one; 0 where their
    order is the same. `to_pairs` is whether the pairs are here. One parameter may have so many
    `stacks` of rows in the run `stacked`, and by groups in the other one. A matrix may be
    transposed: `turned` is in which run, HERE or THERE; EITHER where it has one name in both."""

    sources: tuple[str, ...]
    siblings: tuple[str, ...] = ()
    index: int = 0
    groups: Size = 1
    heads: tuple[Size, ...] = ()
    to_pairs: bool = True
    stacks: int = 0
    stacked: str = ""
    turned: str = ""

    @property
    def plain(self) -> bool:
        """Whether it is one parameter of the source as it is."""
        return self.in_order and not self.turned

    @property
    def in_order(self) -> bool:
        """Whether it is one parameter of the source, whose rows have the same order."""
        alone = len(self.sources) == 1 and not self.siblings
        return alone and not any(self.heads) and not self.stacks


EITHER = "either"


@held
class Names:
    """The rules of a page. Without any, names are the same in both runs."""

    rename: Mapping[str, str] = field(default_factory=dict)
    fuse: Mapping[str, Sequence[str]] = field(default_factory=dict)
    split: Mapping[str, Sequence[str]] = field(default_factory=dict)
    groups: Mapping[str, Size] = field(default_factory=dict)
    halves_to_pairs: Mapping[str, Size] = field(default_factory=dict)
    pairs_to_halves: Mapping[str, Size] = field(default_factory=dict)
    stacked: Mapping[str, int] = field(default_factory=dict)
    sizes: Mapping[str, int] = field(default_factory=dict)
    transpose: Sequence[str] = ()
    typed: str = ""
    """The page as it was named."""

    def another(self, why: str, page: str = "FILE") -> Hint:
        """The command once more, with a page, or with another one."""
        return again(
            *() if self.typed else ("--names", page),
            swapped=(self.typed, page) if self.typed else None,
            why=f"{why}: {PAGE}",
            setting=f"transplant.names={page}",
        )

    def between(self, names: Collection[str], own: Collection[str]) -> Hint:
        """The command once more, with the shipped page that leads from the source's `names` to most
        of the `own` ones here, or with one to write where none does."""
        best = self._best(names, own)
        if best:
            return self.another("what is called what in the two runs", best)
        return self.another("a page with both names")

    def lacking(self, names: Collection[str], own: Collection[str]) -> str:
        """The shipped page that leads to more of the `own` names than the source has, where no page
        was given; "" without one."""
        return "" if self.typed else self._best(names, own, len({*names} & {*own}))

    def _best(self, names: Collection[str], own: Collection[str], least: int = 0) -> str:
        fits = {
            page: len(read(page).origins(names, own, Refusals(kept=True)))
            for page in shipped()
            if page != self.typed
        }
        best = max(fits, key=lambda page: fits[page])
        return best if fits[best] > least else ""

    def origins(
        self, names: Collection[str], own: Collection[str], refusals: Refusals | None = None
    ) -> dict[str, list[Origin]]:
        """Each of the `own` names here that the source's `names` lead to, and the ways: a trainer
        may save weights apart and moments fused, or the reverse."""
        refusals = Refusals() if refusals is None else refusals
        other = self._reversed()
        if self._fitting(names) + other._fitting(own) < other._fitting(names) + self._fitting(own):
            return other._origins(names, own, refusals)
        return self._origins(names, own, refusals)

    def _origins(
        self, names: Collection[str], own: Collection[str], refusals: Refusals
    ) -> dict[str, list[Origin]]:
        out: dict[str, list[Origin]] = {}
        for new, origin in self._all(names):
            if new not in own:
                continue
            with refusals.of(new):
                if lost := [each for each in origin.sources if each not in names]:
                    raise SurgeryError(
                        f"{new} would be made of {lost[0]} as well, which the source has not",
                        next=f"mend the rule for {new} under fuse: {PAGE}",
                    )
                ordered = self._ordered(new, origin)
                if ordered not in (known := out.setdefault(new, [])):
                    known.append(ordered)
        return out

    def _fitting(self, names: Collection[str]) -> int:
        """How many of the names a left side fits."""
        olds = [*self.rename, *self.split, *(old for olds in self.fuse.values() for old in olds)]
        return sum(any(_holes(old, name) is not None for old in olds) for name in names)

    def _reversed(self) -> Names:
        """The same page, read from right to left."""
        return Names(
            {new: old for old, new in self.rename.items()},
            self.split, self.fuse, self.groups,
            self.pairs_to_halves, self.halves_to_pairs, self.stacked, self.sizes, self.transpose,
            self.typed,
        )  # fmt: skip

    def _all(self, names: Collection[str]) -> Iterator[tuple[str, Origin]]:
        for name in names:
            yield from self._renamed(name) or [(name, Origin((name,)))]
            yield from self._fused(name)
            yield from self._split(name)

    def _renamed(self, name: str) -> list[tuple[str, Origin]]:
        for old, new in self.rename.items():
            if (holes := _holes(old, name)) is not None:
                return [(_filled(new, holes), Origin((name,)))]
        return []

    def _fused(self, name: str) -> list[tuple[str, Origin]]:
        for new, olds in self.fuse.items():
            for old in olds:
                if (holes := _holes(old, name)) is not None:
                    sources = tuple(_filled(each, holes) for each in olds)
                    return [(_filled(new, holes), Origin(sources))]
        return []

    def _split(self, name: str) -> list[tuple[str, Origin]]:
        for old, news in self.split.items():
            if (holes := _holes(old, name)) is not None:
                made = tuple(_filled(each, holes) for each in news)
                return [(new, Origin((name,), made, i)) for i, new in enumerate(made)]
        return []

    def _ordered(self, new: str, origin: Origin) -> Origin:
        """With the order of its rows. Raises SurgeryError where heads are turned both ways."""
        singles = origin.siblings or origin.sources
        fused = origin.sources[0] if origin.siblings else new
        alias = {} if origin.siblings or len(origin.sources) > 1 else {origin.sources[0]: new}
        heads = {}
        for key in ("halves_to_pairs", "pairs_to_halves"):
            rules = getattr(self, key)
            heads[key] = tuple(
                _size(rules, each) or _size(rules, alias.get(each, "")) for each in singles
            )
        to_pairs, to_halves = heads["halves_to_pairs"], heads["pairs_to_halves"]
        if any(to_pairs) and any(to_halves):
            raise SurgeryError(
                f"{new} is under halves_to_pairs and under pairs_to_halves",
                next=f"name it under one of them: {PAGE}",
            )
        turned = to_pairs if any(to_pairs) else to_halves
        origin = replace(origin, heads=turned, to_pairs=any(to_pairs))
        stacked = self._where(new, origin, self.stacked, "stacked")
        if stacked and not origin.in_order:
            raise SurgeryError(
                f"{new} is under stacked, and its rows are fused, split or turned as well",
                next=f"stack what is one parameter in both runs: {PAGE}",
            )
        if stacked:  # and the other one is fused
            one, fused = (new, origin.sources[0]) if stacked == HERE else (origin.sources[0], new)
            origin = replace(origin, stacked=stacked, stacks=int(_size(self.stacked, one)))
        origin = replace(origin, groups=_size(self.groups, fused) or 1)
        return replace(origin, turned=self._where(new, origin, self.transpose, "transpose"))

    def _where(self, new: str, origin: Origin, rules: Collection[str], key: str) -> str:
        """In which run a parameter has a name under `key`; "" where it has none in either. Raises
        SurgeryError for one in both, where that decides in which order its rows are."""
        here, there = (
            any(_holes(rule, name) is not None for rule in rules for name in names)
            for names in ((new, *origin.siblings), origin.sources)
        )
        if here and there and (key == "stacked" or not origin.in_order):
            raise SurgeryError(
                f"{new} is under {key}, and which of the runs has it so is not said: it has a name "
                "there in both",
                next=f"rename it in one of the runs: {PAGE}",
            )
        return EITHER if here and there else HERE if here else THERE if there else ""


def _size(rules: Mapping[str, Size], name: str) -> Size:
    return next((size for old, size in rules.items() if _holes(old, name) is not None), 0)


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


# --- the page ------------------------------------------------------------------------------------


def shipped() -> list[str]:
    """The pages that come with the product, by name."""
    return sorted(path.stem for path in disk.matching(FOLDER, "*.yaml"))


def read(path: str) -> Names:
    """The rules of the page at `path`, or of the shipped one of that name; none without one. Raises
    UsageError with the key that is wrong."""
    if not path:
        return Names()
    typed = path
    if path in shipped() and not disk.exists(Path(path)):
        path = str(FOLDER / f"{path}.yaml")
    try:
        data = plain_yaml.read(Path(path))
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}", next=_pages()) from None
    for key in data:
        if key not in KEYS:
            raise unknown_key(str(key), KEYS, path)
    for key in NAMES:
        rules = data.get(key, {})
        kind = str if key == "rename" else list
        if not isinstance(rules, dict) or not all(isinstance(new, kind) for new in rules.values()):
            raise UsageError(
                f"{path}: {key} is no table of names to {'names' if kind is str else 'lists'}",
                next=PAGE,
            )
        for old, new in rules.items():
            _check(path, key, str(old), [new] if isinstance(new, str) else new)
    for key in (*ROWS, "sizes"):
        _check_sizes(path, key, data.get(key, {}))
    turned = data.get("transpose", [])
    if not isinstance(turned, list) or not all(isinstance(name, str) for name in turned):
        raise UsageError(f"{path}: transpose is no list of names", next=PAGE)
    own = {key: data[key] for key in (*NAMES, *ROWS, "sizes") if key in data}
    used = data.get("use")
    if used is None:
        return Names(**own, transpose=turned, typed=typed)
    if used not in shipped():
        raise UsageError(f"{path}: use: {used}: no page of that name is shipped", next=_pages())
    base = read(used)
    added = {key: {**own[key], **getattr(base, key), **own[key]} for key in own}
    return replace(base, **added, transpose=[*turned, *base.transpose], typed=typed)


def _pages() -> Hint:
    return f"--names FILE, or one of {', '.join(shipped())}    {PAGE}"


def _check(path: str, key: str, old: str, news: Sequence[Any]) -> None:
    """Each word in braces of one side is on the other; there is something to stack."""
    words = [{hole[1] for hole in HOLE.finditer(str(name))} for name in (old, *news)]
    if not news or any(each != words[0] for each in words):
        raise UsageError(
            f"{path}: {key}: {old}: both sides must have the same words in braces",
            next=PAGE,
        )


def _check_sizes(path: str, key: str, rules: Any) -> None:
    """Numbers above 0; under what takes a number of heads, also the words that `sizes` says."""
    words = () if key in ("sizes", "stacked") else SIZES
    if not isinstance(rules, dict) or (key == "sizes" and not rules.keys() <= set(SIZES)):
        of = f"of {' and '.join(SIZES)}" if key == "sizes" else "of names"
        raise UsageError(f"{path}: {key} is no table {of} to numbers", next=PAGE)
    for name, size in rules.items():
        whole = isinstance(size, int) and not isinstance(size, bool) and size > 0
        if not whole and size not in words:
            how = "a whole number above 0" + (f", {' or '.join(words)}" if words else "")
            raise UsageError(f"{path}: {key}: {name}: {size} is not {how}", next=PAGE)
