"""The one way to stdout and stderr: a control character from whatever source does not get there.

What is printed holds names and texts of files that others wrote. A line break and a tab are layout,
and the colours are ours; all else that moves a terminal is written as JSON would write it, so that
a document stays one.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TextIO, cast

from ckptsurgeon.errors import Unwritten

COLORS = ("0", "31", "32", "33")
"""Codes of `report.style`."""
CONTROL = re.compile(
    r"(\033\[(?:" + "|".join(COLORS) + r")m)"
    r"|[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]"
)
"""Also what turns the direction of a line around."""

_names: ContextVar[tuple[str, str] | None] = ContextVar("_names", default=None)


def call(folder: str, name: str) -> None:
    """From here to the end of `checked`, what is printed of paths below a folder begins with this
    name instead."""
    _names.set((folder, name))


def colored(stream: TextIO) -> bool:
    """Colour on a terminal only; NO_COLOR forbids it, FORCE_COLOR asks for it."""
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    return stream.isatty() and os.environ.get("TERM") != "dumb"


class Checked:
    """A stream that takes text for a terminal. An answer that it does not take raises, Unwritten or
    BrokenPipeError; what is said beside it, on stderr, decides nothing. From then on it takes every
    text and keeps none, or the interpreter would try once more at its end."""

    def __init__(self, stream: TextIO, *, answers: bool = True) -> None:
        self.stream = stream
        self.answers = answers
        self.gone = False

    def write(self, text: str) -> int:
        """Write what is left of `text`. Its length is that of all of it, as callers count."""
        folder, name = _names.get() or ("", "")
        shown = text.replace(folder, name) if folder else text
        if text != "":  # Click tries a stream with none, and passes over what that raises
            self._try(lambda: self.stream.write(CONTROL.sub(self._written, shown)))
        return len(text)

    def pass_on(self, text: str) -> int:
        """Write `text` as it is."""
        self._try(lambda: self.stream.write(text))
        return len(text)

    def flush(self) -> None:
        """Write what was kept back."""
        self._try(self.stream.flush)

    def _try(self, act: Callable[[], object]) -> None:
        if self.gone:
            return
        try:
            act()
        except OSError as error:
            self.gone = True
            if not self.answers:
                return
            if isinstance(error, BrokenPipeError):
                raise
            raise Unwritten(error) from None

    def _written(self, match: re.Match[str]) -> str:
        if match[1] and colored(self.stream):
            return match[0]
        return f"\\u{ord(match[0][0]):04x}{match[0][1:]}"

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@contextmanager
def checked() -> Iterator[None]:
    """stdout and stderr take no control characters meanwhile."""
    before = {name: getattr(sys, name) for name in ("stdout", "stderr")}
    now = {
        name: Checked(stream, answers=name == "stdout")
        for name, stream in before.items()
        if stream is not None
    }
    for name, stream in now.items():
        setattr(sys, name, stream)
    called = _names.set(None)
    try:
        yield
    finally:
        _names.reset(called)
        for name, stream in now.items():
            if getattr(sys, name) is stream and not stream.gone:
                setattr(sys, name, before[name])


class Unchecked:
    """The same stream, which takes text as it is."""

    def __init__(self, checked: Checked) -> None:
        self.write = checked.pass_on
        self.flush = checked.flush
        self.stream = checked.stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def unchecked(stream: TextIO) -> TextIO:
    """The stream for our own bar and for what a trainer prints."""
    return cast(TextIO, Unchecked(stream)) if isinstance(stream, Checked) else stream
