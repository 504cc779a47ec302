"""The errors a user can meet: what happened, what was left untouched, what to do next. And how any
sentence of ours lists names, and counts.

SurgeryError                     exit 1   failed or refused; the run is exactly as it was
├── Unwritten                    exit 1   stdout does not take the answer
├── UsageError                   exit 2   the request itself is wrong (flag, recipe key, value)
├── DamagedFile                  exit 1   a file is not what its reader needs: path and byte offset
├── NotUnderstood                exit 1   a file is sound, and what a field of it means is not known
│   └── Impossible               exit 1   no trainer goes on with the value: `verify` finds it
├── VerificationFailed           exit 4   the disk disagrees with the promise
└── InterruptedSurgery           exit 5   a committed surgery is waiting for `recover`
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ckptsurgeon.hints import Hint, command, text

UNTOUCHED = "the run is exactly as it was"
DEFECT = "this is a defect of ckptsurgeon: report it with the recipe and what `show` prints"
"""What to do next where a plan contradicts itself."""
DAMAGE = command("verify", why="list every damaged file")
SHOW = command("show", why="what is understood; what does not need the rest goes on without it")


FEW = 3


def first_few(names: Sequence[str]) -> str:
    """The names for a message; of many the first ones, and how many there are."""
    return ", ".join(names[:FEW]) + (f" … ({len(names)})" if len(names) > FEW else "")


def count(number: float, noun: str, plural: str = "", spec: str = "") -> str:
    """`1 file`, `2 files`; `spec` says how the number is written."""
    return f"{number:{spec}} {noun if number == 1 else plural or f'{noun}s'}"


def share(some: int, whole: int, noun: str, verb: str = "", verbs: str = "") -> str:
    """`1 of 3 files`, `1 of 1 file`; with a verb `1 of 3 files stays`, `2 of 3 files stay`."""
    return f"{some} of {count(whole, noun)} {verb if some == 1 else verbs}".rstrip()


def why_unread(error: OSError) -> str:
    """What could not be looked at, and why."""
    reason = error.strerror or str(error)
    return f"{error.filename}: {reason}" if error.filename else reason


class SurgeryError(Exception):
    """A refusal in three parts.

    `what` names the file and the number, `untouched` is a true sentence about the run at the
    moment of raising, `hints` are commands or acts that lead on, and `next` is their text.
    """

    exit_code = 1

    def __init__(
        self, what: str, *, next: Hint | Sequence[Hint], untouched: str = UNTOUCHED
    ) -> None:
        super().__init__(what)
        self.what = what
        self.untouched = untouched
        self.hints: tuple[Hint, ...] = (next,) if isinstance(next, Hint) else tuple(next)

    def __reduce__(self) -> tuple[Any, ...]:
        """Another process may raise it."""
        return _raised_elsewhere, (type(self), self.args, self.__dict__)

    @property
    def next(self) -> tuple[str, ...]:
        """The hints as lines that can be typed where the failed command was."""
        return tuple(map(text, self.hints))


def _raised_elsewhere(
    kind: type[SurgeryError], args: tuple[Any, ...], state: dict[str, Any]
) -> SurgeryError:
    made = kind.__new__(kind, *args)
    made.__dict__.update(state)
    return made


class Unwritten(SurgeryError):
    """stdout does not take the answer: its disk is full, say. A reader that has gone, as `head`
    does, is no error, and leaves as BrokenPipeError."""

    def __init__(self, error: OSError) -> None:
        self.why = error.strerror or str(error)
        super().__init__(
            f"the answer can't be written to stdout: {self.why}",
            next="send it where there is room, or free some, then run the same command again",
        )


class UsageError(SurgeryError):
    """The request can't be meant: an unknown key, a step that is not there, an impossible value."""

    exit_code = 2


class DamagedFile(SurgeryError):
    """A file can't be read as its format asks. `offset` is the byte where reading stopped."""

    def __init__(
        self,
        path: str,
        offset: int,
        what: str,
        *,
        next: Hint | Sequence[Hint] = DAMAGE,
        untouched: str = UNTOUCHED,
    ) -> None:
        super().__init__(f"{path}: byte {offset}: {what}", next=next, untouched=untouched)
        self.path = path
        self.offset = offset


class NotUnderstood(SurgeryError):
    """A file can be read, and a value in it is of a kind that is not known here: whoever needs the
    value is refused, and nobody else. `what` names the file and the key path."""

    def __init__(self, what: str, *, next: Hint | Sequence[Hint] = SHOW) -> None:
        super().__init__(what, next=next)


class Impossible(NotUnderstood):
    """The value is a number that none of its kind can be, or has no end. Its file can be read, and
    the step is not sound."""


class VerificationFailed(SurgeryError):
    """What is on disk, or what the trainer printed, is not what the plan promised."""

    exit_code = 4


class InterruptedSurgery(SurgeryError):
    """A journal with a commit record is on disk: only `recover` may touch the run."""

    exit_code = 5
