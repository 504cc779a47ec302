"""A progress bar on the terminal of stderr; in a log file there is none."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from typing import TextIO

CLEAR = "\r\033[K"


class ProgressBar:
    """One line at the bottom that is redrawn in place, at most `RATE` times a second."""

    RATE = 5.0

    def __init__(self, stream: TextIO | None, first: int, last: int) -> None:
        self._first, self._last = first, last
        self._began = time.monotonic()
        self._drawn = 0.0
        self._stream = stream if stream is not None and stream.isatty() else None

    def draw(self, iteration: int, loss: float) -> None:
        """The state after `iteration`: share done, seconds per iteration, time left."""
        now = time.monotonic()
        if self._stream is None or (now - self._drawn < 1 / self.RATE and iteration < self._last):
            return
        self._drawn = now
        each = (now - self._began) / max(iteration - self._first, 1)
        left = each * (self._last - iteration)
        text = f" {iteration}/{self._last}  loss {loss:.4f}  {each:.2f} s/it  {_clock(left)} left"
        width = max(shutil.get_terminal_size().columns - len(text) - 3, 0)
        full = width * iteration // max(self._last, 1)
        bar = f"[{'#' * full}{'.' * (width - full)}]" if width >= 10 else ""
        self._stream.write(f"{CLEAR}{bar}{text}")
        self._stream.flush()

    def clear(self) -> None:
        """Take the line away, for other text or for good."""
        if self._stream is not None and self._drawn:
            self._stream.write(CLEAR)
            self._stream.flush()
            self._drawn = 0.0

    def above(self, say: Callable[[str], None]) -> Callable[[str], None]:
        """`say`, which takes the bar away first: both may be the same terminal."""

        def spoken(text: str) -> None:
            self.clear()
            say(text)

        return spoken


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
