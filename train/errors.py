"""The errors a user of the trainer can meet: what happened, what was left untouched, what to do."""

from __future__ import annotations

from collections.abc import Sequence


class TrainError(Exception):
    """A refusal in three parts; the process prints them on stderr and exits with `exit_code`."""

    exit_code = 1

    def __init__(
        self,
        what: str,
        *,
        next: str | Sequence[str],
        untouched: str = "nothing was written",
    ) -> None:
        super().__init__(what)
        self.what = what
        self.untouched = untouched
        self.next: tuple[str, ...] = (next,) if isinstance(next, str) else tuple(next)

    def render(self) -> str:
        """The text for stderr, without a trailing newline."""
        steps = "\n".join(
            ("next:  " if i == 0 else "       ") + line for i, line in enumerate(self.next)
        )
        return f"error: {self.what}\n       {self.untouched}\n{steps}"


class RankError(TrainError):
    """Raised by ranks of which some may be fine: each prints its own, where of the other errors,
    which every rank meets, only rank 0 speaks."""


class UsageError(TrainError):
    """The request itself is wrong: an unknown key, an impossible value, a missing argument."""

    exit_code = 2
