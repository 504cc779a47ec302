"""The one way to stdout and stderr: a control character from whatever source does not get there.

What is printed holds names and texts of files that others wrote. A line break and a tab are layout,
and the colours are ours; all else that moves a terminal is written as JSON would write it, so that
a document stays one.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TextIO

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
    """A stream that takes text for a terminal."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        """Write what is left of `text`. Its length is that of all of it, as callers count."""
        folder, name = _names.get() or ("", "")
        shown = text.replace(folder, name) if folder else text
        self.stream.write(CONTROL.sub(self._written, shown))
        return len(text)

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
    now = {name: Checked(stream) for name, stream in before.items() if stream is not None}
    for name, stream in now.items():
        setattr(sys, name, stream)
    called = _names.set(None)
    try:
        yield
    finally:
        _names.reset(called)
        for name, stream in now.items():
            if getattr(sys, name) is stream:  # not one that was put there because it is closed
                setattr(sys, name, before[name])


def unchecked(stream: TextIO) -> TextIO:
    """The stream itself, for our own bar and for what a trainer prints."""
    return stream.stream if isinstance(stream, Checked) else stream
