"""Ends a process that makes no progress, with what each of its threads was doing."""

from __future__ import annotations

import faulthandler
import os
import sys
import time
from contextlib import suppress
from pathlib import Path
from threading import Event, Thread

HUNG = 75
"""The exit code, EX_TEMPFAIL of sysexits.h: nothing is wrong with the run, start it again."""
MARKER = "hung"
"""The file in the run that says the same to a job's script: torchrun turns every code into 1."""
OTHERS = 2.0
"""Seconds for the other ranks to say where they are before a launcher ends them."""


class Watchdog:
    """Waits `minutes` for a sign of life, without a limit where it is None; then the process leaves
    with HUNG, and MARKER in the folder `root`. A collective that hangs lets go of Python's lock, so
    this thread still runs.

    Nothing is saved: the checkpoints are as they were, and `latest` names a complete one."""

    def __init__(self, minutes: float | None, root: Path) -> None:
        self._limit = None if minutes is None else 60.0 * minutes
        self._root = root
        self._last = time.monotonic()
        self._ended = Event()

    def start(self) -> None:
        """From now on somebody must call `alive` in time."""
        if self._limit is not None:
            self.alive()
            Thread(target=self._watch, args=(self._limit,), daemon=True).start()

    def alive(self) -> None:
        self._last = time.monotonic()

    def stop(self) -> None:
        self._ended.set()

    def _watch(self, limit: float) -> None:
        while not self._ended.wait(min(1.0, limit / 4)):
            if time.monotonic() - self._last > limit:
                self._leave(limit)

    def _leave(self, limit: float) -> None:
        rank = os.environ.get("RANK", "0")
        print(
            f"error: rank {rank} has made no progress for {limit / 60:g} minutes (`watchdog`)\n"
            "       the checkpoints are as they were\n"
            f"next:  start the run again: exit code {HUNG} says that it only hung; where it hung:",
            file=sys.stderr,
        )
        faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
        sys.stderr.flush()
        # In a thread: the disk may be what hangs.
        Thread(target=self._mark, args=(rank,), daemon=True).start()
        time.sleep(OTHERS)
        os._exit(HUNG)

    def _mark(self, rank: str) -> None:
        with suppress(OSError):
            (self._root / MARKER).write_text(f"rank {rank}\n", encoding="ascii")
