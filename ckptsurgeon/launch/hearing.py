"""Listening to a trainer of the user's own while it runs: its printed lines, else its logs."""

from __future__ import annotations

import sys
import time

from ckptsurgeon.errors import VerificationFailed
from ckptsurgeon.hints import Hint, command
from ckptsurgeon.logs.printed import points
from ckptsurgeon.logs.printed.families import Listener, families
from ckptsurgeon.logs.printed.word import Word
from ckptsurgeon.run.run import Run
from ckptsurgeon.transaction.receipts import standing

INTERVAL_S = 10.0
"""Between two looks at the logs, while the lines have not said the rates."""


class Hearing:
    """What a trainer says from its start on. `word` has it all; a difference is raised at once.

    The logs are looked at when a line was printed, and at the end: a trainer that prints nothing
    is compared once it has ended."""

    def __init__(self, run: Run, word: Word) -> None:
        self._run, self._word = run, word
        self._speakers = families(run.format.name)
        self._listener = Listener(self._speakers)
        self._began = time.time()
        self._looked = time.monotonic()

    def hear(self, line: str) -> bool:
        """Take one printed line in. True once the first updates were compared, their rates among
        them. Raises VerificationFailed for a difference."""
        for statement in self._listener.hear(line):
            self._word.hear(statement)
        self._refuse(self._word)
        if self._word.done and self._word.has_rates:
            return self._close()
        if time.monotonic() - self._looked < INTERVAL_S:
            return False
        self._looked = time.monotonic()
        return self._look() and self._word.done and self._close()

    def end(self) -> bool:
        """The trainer has ended: hear what is left. True if anything could be compared."""
        for statement in self._listener.end():
            self._word.hear(statement)
        self._refuse(self._word)
        if not self._word.has_rates:
            self._look()
        return self._word.heard and self._close()

    def _look(self) -> bool:
        """Hear the logs since the start. True if they say the rates."""
        logged = Word(self._word.expected)
        for folder in self._run.logs.folders():
            for statement in points.in_folder(folder, self._speakers, since=self._began):
                logged.hear(statement)
        self._refuse(logged)
        if logged.has_rates:
            self._word.add(logged)
        return logged.has_rates

    def _refuse(self, word: Word) -> None:
        if word.differs:
            raise VerificationFailed(
                f"the trainer does not use what was promised: {'; '.join(word.differs)}",
                untouched="the trainer was stopped; what it had saved is kept",
                next=[*word.expected.remedy, way_back(self._run)],
            )

    def _close(self) -> bool:
        for sentence in self._word.sentences():
            print(f"note: {sentence}", file=sys.stderr)
        return True


def way_back(run: Run) -> Hint:
    """What helps when the trainer breaks the promise: undo, if a surgery is in force."""
    if standing(run.receipts()):
        return command("undo", why="take the surgery back")
    return command("show", why="which place of each value wins")
