"""Listening to a trainer of the user's own while it runs: its printed lines, else its logs."""

from __future__ import annotations

import sys
import time

from ckptsurgeon.errors import VerificationFailed
from ckptsurgeon.hints import Hint, command
from ckptsurgeon.logs.printed import points
from ckptsurgeon.logs.printed.comparison import Comparison
from ckptsurgeon.logs.printed.families import Listener, families
from ckptsurgeon.run.run import Run
from ckptsurgeon.transaction.receipts import standing

INTERVAL_S = 10.0
"""Between two looks at the logs, while the lines have not said the rates."""


class LiveComparison:
    """What a trainer says from its start on. `word` has it all; a difference is raised at once.

    The logs are looked at when a line was printed, and at the end: a trainer that prints nothing
    is compared once it has ended."""

    def __init__(self, run: Run, comparison: Comparison) -> None:
        self._run, self._comparison = run, comparison
        self._speakers = families(run.format.name)
        self._listener = Listener(self._speakers)
        self._began = time.time()
        self._looked = time.monotonic()

    def feed(self, line: str) -> bool:
        """Take one printed line in. True once the first updates were compared, their rates among
        them. Raises VerificationFailed for a difference."""
        for statement in self._listener.feed(line):
            self._comparison.feed(statement)
        self._refuse(self._comparison)
        if self._comparison.done and self._comparison.has_rates:
            return self._close()
        if time.monotonic() - self._looked < INTERVAL_S:
            return False
        self._looked = time.monotonic()
        return self._look() and self._comparison.done and self._close()

    def end(self) -> bool:
        """The trainer has ended: hear what is left. True if anything could be compared."""
        for statement in self._listener.end():
            self._comparison.feed(statement)
        self._refuse(self._comparison)
        if not self._comparison.has_rates:
            self._look()
        return self._comparison.begun and self._close()

    def _look(self) -> bool:
        """Hear the logs since the start. True if they say the rates."""
        logged = Comparison(self._comparison.expected)
        for folder in self._run.logs.folders():
            for statement in points.in_folder(folder, self._speakers, since=self._began):
                logged.feed(statement)
        self._refuse(logged)
        if logged.has_rates:
            self._comparison.add(logged)
        return logged.has_rates

    def _refuse(self, comparison: Comparison) -> None:
        if comparison.differs:
            raise VerificationFailed(
                f"the trainer does not use what was promised: {'; '.join(comparison.differs)}",
                untouched="the trainer was stopped; what it had saved is kept",
                next=[*comparison.expected.remedy, way_back(self._run)],
            )

    def _close(self) -> bool:
        for sentence in self._comparison.sentences():
            print(f"note: {sentence}", file=sys.stderr)
        return True


def way_back(run: Run) -> Hint:
    """What helps when the trainer breaks the promise: undo, if a surgery is in force."""
    if standing(run.receipts()):
        return command("undo", why="take the surgery back")
    return command("show", why="which place of each value wins")
