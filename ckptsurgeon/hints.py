"""What to do next, as data: it becomes text here alone, where each word is quoted for a shell and
what was typed is carried over."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Collection, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TypeAlias

DRY_RUN = ("--dry-run",)
"""What a command goes without that does what was only shown."""
OF_RECIPES = ("plan", "apply")
"""Commands that take a recipe and KEY=VALUE."""
DRY = re.compile(r"-(?P<letters>[nyqv]*n[nyqv]*)(?P<more>.*)")
"""-n, alone or among other letters."""


@dataclass(frozen=True)
class Command:
    """A command of ckptsurgeon and the reason for it. Its text also has the options of what was
    typed that it takes: -C, --format, --json, --log."""

    words: tuple[str, ...]
    why: str = ""
    run: str = ""
    """The run it is for, where that is not the one of what was typed."""
    real: bool = False
    """Whether it goes without the --dry-run of what was typed."""

    def __str__(self) -> str:
        before, after = TYPED.get().options(self)
        if self.run:
            before = ["-C", self.run, *before]
        own = list(self.words)
        end = own.index("--") if "--" in own else len(own)
        return quoted("ckptsurgeon", *before, *own[:end], *after, *own[end:])


@dataclass(frozen=True)
class Again:
    """The command that was typed, with options `added` and others `dropped`, and one word `swapped`
    for another. Where nothing was typed, or that word not once, its text is a sentence; where that
    command has not the options, it is the act `otherwise`."""

    added: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    swapped: tuple[str, str] | None = None
    why: str = ""
    setting: str = ""
    """KEY=VALUE that a command which takes a recipe gets in place of all this."""
    otherwise: str = ""
    """An act in words, for a command that has not the options."""

    def __str__(self) -> str:
        if not self.fits():
            return _parts(self.otherwise)[0]
        words = list(TYPED.get().words)
        end = words.index("--") if "--" in words else len(words)
        if self._in_recipe():
            key = self.setting.partition("=")[0]
            others = [word for word in words[:end] if word.partition("=")[0] != key]
            return quoted("ckptsurgeon", *others, self.setting, *words[end:])
        if not words or (self.swapped is not None and words.count(self.swapped[0]) != 1):
            return self._sentence()
        typed = [kept for word in self._rest(words[:end]) if (kept := self._kept(word)) is not None]
        return quoted("ckptsurgeon", *typed, *self.added, *words[end:])

    def fits(self) -> bool:
        """Whether it can be typed, or there is nothing to do otherwise."""
        options = [word for word in self.added if word.startswith("-")]
        takes = TYPED.get().takes
        return not self.otherwise or self._in_recipe() or all(takes(word) for word in options)

    def _in_recipe(self) -> bool:
        return bool(self.setting) and any(word in OF_RECIPES for word in TYPED.get().words)

    def _rest(self, words: Sequence[str]) -> Iterator[str]:
        """Without the options whose one value an added one takes the place of."""
        names = {name for option in self.added for name in TYPED.get().spellings(option)}
        rest = iter(words)
        for word in rest:
            if word in names:
                next(rest, None)
            elif not any(word.startswith(f"{n}=" if n[:2] == "--" else n) for n in names):
                yield word

    def _kept(self, word: str) -> str | None:
        if self.swapped is not None and word == self.swapped[0]:
            return self.swapped[1]
        if word in self.dropped:
            return None
        if "--dry-run" in self.dropped and (match := DRY.fullmatch(word)):
            letters = match["letters"].replace("n", "") + match["more"]
            return f"-{letters}" if letters else None
        return word

    def _sentence(self) -> str:
        if self.swapped is not None:
            return f"the same command with {self.swapped[1]} for {self.swapped[0]}"
        if self.added:
            return f"the same command with {quoted(*self.added)}"
        if self.dropped:
            return f"the same command without {' '.join(self.dropped)}"
        return "the same command again"


@dataclass(frozen=True)
class Shell:
    """Other commands for a shell, each of which runs if the one before it did; the output of the
    last goes to the file `into`."""

    commands: tuple[tuple[str, ...], ...]
    into: str = ""
    why: str = ""

    def __str__(self) -> str:
        line = " && ".join(quoted(*words) for words in self.commands)
        return f"{line} > {quoted(self.into)}" if self.into else line


Hint: TypeAlias = Command | Again | Shell | str
"""What to do next. A plain text is an act in words, without a command in it."""


@dataclass(frozen=True)
class Typed:
    """What a hint answers: the words behind `ckptsurgeon`, and which of their options a command
    takes over, before its name and behind it."""

    words: tuple[str, ...] = ()
    options: Callable[[Command], tuple[Sequence[str], Sequence[str]]] = lambda command: ((), ())
    takes: Callable[[str], bool] = lambda option: True
    """Whether the command that was typed has this option."""
    spellings: Callable[[str], Collection[str]] = lambda option: ()
    """All names of an option of that command which takes one value; of any other one none."""


NOTHING = Typed()
TYPED: ContextVar[Typed] = ContextVar("TYPED", default=NOTHING)
"""What was typed; nothing where this package is called from Python."""


def command(*words: object, why: str = "", run: object = "", real: bool = False) -> Command:
    """`ckptsurgeon` with these words: `command("rollback", "--to", 6210, why="it is sound")`."""
    return Command(tuple(map(str, words)), why, str(run), real)


def again(
    *added: object,
    without: Sequence[str] = (),
    swapped: tuple[object, object] | None = None,
    why: str = "",
    setting: str = "",
    otherwise: str = "",
) -> Again:
    """The command that was typed, once more: `again("--yes")`, `again(swapped=(350, 300))`. With an
    option that not every command has: `setting` for a recipe, `otherwise` for the other ones."""
    pair = None if swapped is None else (str(swapped[0]), str(swapped[1]))
    return Again(tuple(map(str, added)), tuple(without), pair, why, setting, otherwise)


def shell(*commands: Sequence[object], into: object = "", why: str = "") -> Shell:
    """Commands of the system: `shell(["rm", link], ["cp", "-r", real, link])`."""
    return Shell(tuple(tuple(map(str, words)) for words in commands), str(into), why)


def text(hint: Hint) -> str:
    """A hint as one line: the command, four spaces, the reason."""
    line, why = apart(hint)
    return f"{line}    {why}" if why else line


def apart(hint: Hint) -> tuple[str, str]:
    """What to type or to do, and the reason."""
    if isinstance(hint, Again) and not hint.fits():
        hint = hint.otherwise
    return _parts(hint) if isinstance(hint, str) else (str(hint), hint.why)


def _parts(act: str) -> tuple[str, str]:
    act, _, why = act.partition("    ")
    return act, why.strip()


def quoted(*words: object) -> str:
    """`words` as one line that bash and zsh take apart into just these. Control characters become
    escapes: none reaches a terminal, and what is pasted has them."""
    return " ".join(_quoted(str(word)) for word in words)


def _quoted(word: str) -> str:
    if word.isprintable():
        return shlex.quote(word)
    return f"$'{''.join(map(_escaped, word))}'"


def _escaped(character: str) -> str:
    if character.isprintable() and character not in "\\'!":
        return character
    return "".join(f"\\x{byte:02x}" for byte in os.fsencode(character))
