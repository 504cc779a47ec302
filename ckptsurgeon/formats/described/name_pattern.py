"""What one name on a path may be: `*` any text, `{step}` and the like a number of up to 18 digits.

A page lies in a run and is somebody else's word, so no pattern is a regular expression: the work
for a name is bounded by its length and that of the pattern.
"""

from __future__ import annotations

import re
from functools import cached_property

from ckptsurgeon.plans.frozen import frozen

ANY = "*"
NUMBER = re.compile(r"\{[^\W\d]\w*\}")
DIGITS = re.compile(r"\d{1,18}")
WORDS = re.compile(rf"({NUMBER.pattern}|\*+)")


@frozen
class NamePattern:
    """One name on a path. A number is written without leading zeros or with them; one that comes
    twice is the same text both times."""

    text: str

    @cached_property
    def words(self) -> list[str]:
        return [word for word in WORDS.split(self.text) if word]

    @cached_property
    def _ends(self) -> tuple[str, str]:
        """The text that each name of this pattern begins with, and the one that it ends with."""
        plain = ["" if "*" in word or NUMBER.fullmatch(word) else word for word in self.words]
        return (plain[0], plain[-1]) if plain else ("", "")

    def numbers(self, name: str) -> dict[str, int] | None:
        """Those in `name`; None if it is not of this pattern."""
        texts = self.texts(name)
        return None if texts is None else {key: int(text) for key, text in texts.items()}

    def texts(self, name: str) -> dict[str, str] | None:
        """The numbers in `name` as they are written there. Where several readings are possible,
        what stands first is as long as it can be."""
        begin, end = self._ends
        if not (name.startswith(begin) and name.endswith(end)):
            return None  # most names in a folder
        failed: set[tuple[int, int]] = set()
        todo: list[tuple[int, int, tuple[tuple[str, str], ...]]] = [(0, 0, ())]
        while todo:
            word, at, found = todo.pop()
            if word == len(self.words):
                if at == len(name):
                    return self._alike(found)
                continue
            if (word, at) in failed:
                continue
            failed.add((word, at))  # each is tried once: what follows does not depend on the way
            todo += self._after(word, name, at, found)
        return None

    def _after(
        self, word: int, name: str, at: int, found: tuple[tuple[str, str], ...]
    ) -> list[tuple[int, int, tuple[tuple[str, str], ...]]]:
        """Where a reading may go on after a word, the longest last."""
        text = self.words[word]
        if text.startswith(ANY):
            longer = [(word, at + 1, found)] if at < len(name) else []
            return [(word + 1, at, found), *longer]
        if NUMBER.fullmatch(text):
            match = DIGITS.match(name, at)
            ends = range(at + 1, match.end() + 1) if match else ()
            return [(word + 1, end, (*found, (text[1:-1], name[at:end]))) for end in ends]
        return [(word + 1, at + len(text), found)] if name.startswith(text, at) else []

    @staticmethod
    def _alike(found: tuple[tuple[str, str], ...]) -> dict[str, str] | None:
        texts = dict(found)
        return None if any(texts[key] != text for key, text in found) else texts
