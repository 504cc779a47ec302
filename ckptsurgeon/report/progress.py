"""The phases of a surgery on stderr, while they last."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from types import TracebackType
from typing import TextIO

from ckptsurgeon.report.style import size
from ckptsurgeon.report.terminal import unchecked

PATIENCE = 0.5
"""A phase that takes fewer seconds is not shown."""
BAR = 24
IN_BYTES = ("computing", "checking")
"""The phases of which bytes are counted."""


class Progress:
    """A line for each phase that took a while, when it is over; on a terminal a bar meanwhile.

    Call it with a phase, how much is done, and of how much. A stream that nobody reads any more
    stops no surgery: then nothing is shown."""

    def __init__(self, stream: TextIO, *, quiet: bool = False) -> None:
        self.stream = unchecked(stream)
        self.quiet = quiet
        self.bar = stream.isatty()
        self.phase = ""
        self.started = 0.0
        self.by: Callable[[], str] = str
        """Who does it, where that is not this process alone."""
        self.last: Callable[[], str] = str
        """The last line, if there is one."""

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self._finish()
            if (last := self.last()) and not self.quiet:
                self._write(f"  {last}\n")
        elif self.bar and not self.quiet:
            self._write("\r\033[K")

    def __call__(self, phase: str, done: int, total: int) -> None:
        if self.quiet:
            return
        if phase != self.phase:
            self._finish()
            self.phase, self.started = phase, time.monotonic()
        if self.bar and time.monotonic() - self.started > PATIENCE:
            full = BAR * done // max(total, 1)
            self._write(f"\r  {phase:<11} {'#' * full:.<{BAR}} {self._far(done, total)}\033[K")

    def _far(self, done: int, total: int) -> str:
        who = f", {self.by()}" if self.by() else ""
        if self.phase not in IN_BYTES:
            return f"{done}/{total}{who}"
        rate = done / max(time.monotonic() - self.started, 1e-3)
        return f"{size(done)} of {size(total)}, {size(rate)}/s{who}"

    def _finish(self) -> None:
        took = time.monotonic() - self.started
        if self.phase and not self.quiet and took >= PATIENCE:
            start = "\r\033[K" if self.bar else ""
            self._write(f"{start}  {self.phase:<11} {took:.1f} s\n")
        self.phase = ""

    def _write(self, text: str) -> None:
        with contextlib.suppress(OSError):
            self.stream.write(text)
            self.stream.flush()
