"""Files that are called alike but for their numbers, and which of these is the step."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path

from ckptsurgeon.plans.frozen import frozen

DIGITS = re.compile(r"\d{1,18}")
STEP, RANK, WORLD, EPOCH = "step", "rank", "world", "epoch"
WORDS = {
    STEP: re.compile(r"(step|steps|iter|iteration|it|update|updates|ba|batch)[-_=.]*$", re.I),
    RANK: re.compile(r"(rank|rank[-_]world[-_]size|shard|proc|worker)[-_=.]*$", re.I),
    WORLD: re.compile(r"(world|world[-_]?size|of|rank[-_]world[-_]size[-_=.]*\d+)[-_=.]*$", re.I),
    EPOCH: re.compile(r"(epoch|ep|e)[-_=.]*$", re.I),
}
"""What stands before a number that is one of these."""
DATE = re.compile(
    r"(?<!\d)20\d\d(?:(?P<dash>[-_.])\d\d(?P=dash)\d\d(?!\d)"
    r"(?:[-_+T.@ ]*\d\d[-_.h]?\d\d(?:[-_.m]?\d\d(?:\.\d{3,9})?)?(?!\d)(?:[-_+.]\d\d(?!\d))?)?"
    r"|\d{4}[-_+T.]\d{4}(?:\d\d(?:\.\d{3,9})?)?(?!\d))"
)
"""When a step was saved, in the name of its file: its seconds begin again at each minute."""
LAST = re.compile("last|latest|current|newest|resume", re.I)
"""In the name of a copy of the newest step. Any other copy, as of the best one, is nobody's to
replace."""
MEASURE = re.compile(
    r"(?P<name>=|(?:loss|acc|accuracy|ppl|perplexity|bleu|f1|auc|score|reward|metric|mse|mae|wer|cer"
    r"|err|error|psnr|iou|map|lr)[-_=]*)-?(?:\d+\.\d+(?:e[-+]?\d+)?|nan|inf)(?![A-Za-z\d])",
    re.I,
)
"""What was measured at a step, in the name of its file: no digit of it counts anything."""


@frozen
class Group:
    """Files whose paths differ in numbers alone. `roles` says what each number of the path is: a
    name, or "" where it is part of the text, as it never changes. Where the files are `dated`, a
    date is no number, and may be any."""

    run: Path
    files: tuple[Path, ...]
    roles: tuple[str, ...]
    dated: bool = False

    def by_its_contents(self) -> Group:
        """The same files with a step that no name has."""
        other = "number" if EPOCH in self.roles else EPOCH
        return replace(self, roles=tuple(other if role == STEP else role for role in self.roles))

    @cached_property
    def is_called_step(self) -> bool:
        """Whether the number that is taken for the step is called so, and no other thing."""
        path = self._path(self.files[0])
        at = list(DIGITS.finditer(path))[self.roles.index(STEP)].start()
        return WORDS[STEP].search(path[:at]) is not None

    @cached_property
    def is_last(self) -> bool:
        """Whether its name is that of a copy which a restart loads."""
        return LAST.search(self.pattern) is not None

    @property
    def numbered(self) -> bool:
        """Whether a number of the path is the step."""
        return STEP in self.roles

    @cached_property
    def pattern(self) -> str:
        """The path from the run, as a page has it."""
        return self._written(self._path(self.files[0]), self.roles)

    def _path(self, file: Path) -> str:
        path = _measured(file, self.run)
        return DATE.sub("*", path) if self.dated else path

    def _written(self, path: str, roles: Sequence[str]) -> str:
        left = iter(roles)

        def replaced(number: re.Match[str]) -> str:
            role = next(left)
            return f"{{{role}}}" if role else number[0]

        return DIGITS.sub(replaced, path)

    def step(self, file: Path) -> int:
        """The number of the step of one of the files; -1 where no name has it."""
        found = DIGITS.findall(self._path(file))
        return int(found[self.roles.index(STEP)]) if self.numbered else -1

    @cached_property
    def steps(self) -> frozenset[int]:
        """Of all files."""
        return frozenset(map(self.step, self.files))

    @property
    def last(self) -> int:
        """The highest step."""
        return max(self.steps)

    @cached_property
    def newest(self) -> Path:
        """A file of the highest step."""
        return max(self.files, key=lambda file: (self.step(file), file.name))

    def named_in(self, text: str) -> str | None:
        """`text` with the step that it names as `{step}`: the name of a file or folder of one of
        the steps, or a number that is one. None where it names no step."""
        if not self.numbered:
            return None
        if "/" in text and len(text.split()) == 1:
            return self._led_to(text)
        for file in self.files:
            names = self._path(file).split("/")
            for name in (name for name in names if DIGITS.search(name) and name in text):
                before = len(DIGITS.findall("/".join(names[: names.index(name)])))
                roles = self.roles[before : before + len(DIGITS.findall(name))]
                if STEP in roles:
                    return text.replace(name, self._written(name, roles), 1)
        numbers = DIGITS.findall(text)
        if len(numbers) == 1 and int(numbers[0]) in self.steps:
            return text.replace(numbers[0], "{step}")
        return None

    def _led_to(self, path: str) -> str | None:
        """A path to one of the steps, with `{run}` for what leads to the run: in a copy of the run
        that is another path."""
        names, pattern = path.strip().split("/"), self.pattern.split("/")
        for depth in range(len(pattern), 0, -1):
            below = "/".join(pattern[:depth])
            ends = ("/".join(self._path(file).split("/")[:depth]) for file in self.files)
            if f"{{{STEP}}}" in below and "/".join(names[-depth:]) in ends:
                end = path[len(path.rstrip()) :]
                return "/".join(["{run}"] * (len(names) > depth) + [below]) + end
        return None


def _measured(file: Path, run: Path) -> str:
    """The path from the run, with `*` for what was measured."""
    return MEASURE.sub(r"\g<name>*", file.relative_to(run).as_posix())


def groups(run: Path, files: Iterable[Path]) -> list[Group]:
    """The files in groups, those of many first."""
    alike: dict[str, list[Path]] = defaultdict(list)
    for file in files:
        alike[DIGITS.sub("#", _measured(file, run))].append(file)
    made = [_group(run, sorted(each)) for each in alike.values()]
    return sorted(made, key=lambda group: (-len(group.files), group.pattern))


def _group(run: Path, files: Sequence[Path]) -> Group:
    """The files as steps; where no number but those of a date could be one, as dated."""
    paths = [_measured(file, run) for file in files]
    roles = _roles(paths)
    if STEP in roles or not DATE.search(paths[0]):
        return Group(run, tuple(files), roles)
    dateless = [DATE.sub("*", path) for path in paths]
    return Group(run, tuple(files), _roles(dateless), dated=True)


def _roles(paths: Sequence[str]) -> tuple[str, ...]:
    """What each number of these paths is."""
    starts = [number.start() for number in DIGITS.finditer(paths[0])]
    dates = [date.span() for date in DATE.finditer(paths[0])]
    columns = list(zip(*map(DIGITS.findall, paths), strict=True))
    words = [
        "date" if any(first <= at < end for first, end in dates) else _word(paths[0][:at])
        for at in starts
    ]
    varies = [len(set(column)) > 1 for column in columns]
    step = _step(words, varies, columns)
    roles = []
    for i, word in enumerate(words):
        if i == step:
            roles.append(STEP)
        elif word in (RANK, WORLD):
            roles.append(word)
        else:
            roles.append((word if word == EPOCH else f"number{i}") if varies[i] else "")
    return tuple(
        role if roles.index(role) == i or not role else f"{role}{i}" for i, role in enumerate(roles)
    )


def _word(before: str) -> str:
    """What a number is called by the text before it."""
    return next((role for role, word in WORDS.items() if word.search(before)), "")


def _step(
    words: Sequence[str], varies: Sequence[bool], columns: Sequence[Sequence[str]]
) -> int | None:
    """Which number is the step: the one that is called so, else the one with the most values; of a
    single file, the last. A rank is none, and an epoch only where nothing else is."""
    for wanted in (STEP, "", EPOCH):
        each = [i for i, word in enumerate(words) if word == wanted]
        moving = [i for i in each if varies[i]] or (each if not any(varies) else [])
        if moving:
            return max(moving, key=lambda i: (len(set(columns[i])), i))
    return None
