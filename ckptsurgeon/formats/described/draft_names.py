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
    RANK: re.compile(r"(rank|shard|proc|worker)[-_=.]*$", re.I),
    WORLD: re.compile(r"(world|world[-_]?size|of)[-_=.]*$", re.I),
    EPOCH: re.compile(r"(epoch|ep|e)[-_=.]*$", re.I),
}
"""What stands before a number that is one of these."""
MEASURE = re.compile(
    r"(?P<name>=|(?:loss|acc|accuracy|ppl|perplexity|bleu|f1|auc|score|reward|metric|mse|mae|wer|cer"
    r"|err|error|psnr|iou|map|lr)[-_=]*)-?(?:\d+\.\d+(?:e[-+]?\d+)?|nan|inf)(?![A-Za-z\d])",
    re.I,
)
"""What was measured at a step, in the name of its file: no digit of it counts anything."""


@frozen
class Group:
    """Files whose paths differ in numbers alone. `roles` says what each number of the path is: a
    name, or "" where it is part of the text, as it never changes."""

    run: Path
    files: tuple[Path, ...]
    roles: tuple[str, ...]

    def by_its_contents(self) -> Group:
        """The same files with a step that no name has."""
        other = "number" if EPOCH in self.roles else EPOCH
        return replace(self, roles=tuple(other if role == STEP else role for role in self.roles))

    @cached_property
    def is_called_step(self) -> bool:
        """Whether the number that is taken for the step is called so, and no other thing."""
        path = _measured(self.files[0], self.run)
        at = list(DIGITS.finditer(path))[self.roles.index(STEP)].start()
        return WORDS[STEP].search(path[:at]) is not None

    @property
    def numbered(self) -> bool:
        """Whether a number of the path is the step."""
        return STEP in self.roles

    @cached_property
    def pattern(self) -> str:
        """The path from the run, as a page has it."""
        return self._written(_measured(self.files[0], self.run), self.roles)

    def _written(self, path: str, roles: Sequence[str]) -> str:
        left = iter(roles)

        def replaced(number: re.Match[str]) -> str:
            role = next(left)
            return f"{{{role}}}" if role else number[0]

        return DIGITS.sub(replaced, path)

    def step(self, file: Path) -> int:
        """The number of the step of one of the files; -1 where no name has it."""
        found = DIGITS.findall(_measured(file, self.run))
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
        for file in self.files:
            names = _measured(file, self.run).split("/")
            for name in (name for name in names if DIGITS.search(name) and name in text):
                before = len(DIGITS.findall("/".join(names[: names.index(name)])))
                roles = self.roles[before : before + len(DIGITS.findall(name))]
                if STEP in roles:
                    return text.replace(name, self._written(name, roles), 1)
        numbers = DIGITS.findall(text)
        if len(numbers) == 1 and int(numbers[0]) in self.steps:
            return text.replace(numbers[0], "{step}")
        return None


def _measured(file: Path, run: Path) -> str:
    """The path from the run, with `*` for what was measured."""
    return MEASURE.sub(r"\g<name>*", file.relative_to(run).as_posix())


def groups(run: Path, files: Iterable[Path]) -> list[Group]:
    """The files in groups, those of many first."""
    alike: dict[str, list[Path]] = defaultdict(list)
    for file in files:
        alike[DIGITS.sub("#", _measured(file, run))].append(file)
    made = [Group(run, tuple(sorted(each)), _roles(run, sorted(each))) for each in alike.values()]
    return sorted(made, key=lambda group: (-len(group.files), group.pattern))


def _roles(run: Path, files: Sequence[Path]) -> tuple[str, ...]:
    """What each number of these paths is."""
    paths = [_measured(file, run) for file in files]
    before = [paths[0][: number.start()] for number in DIGITS.finditer(paths[0])]
    columns = list(zip(*map(DIGITS.findall, paths), strict=True))
    words = [next((role for role, word in WORDS.items() if word.search(b)), "") for b in before]
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
