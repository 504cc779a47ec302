"""Gives up a committed surgery that `recover` can't finish, as somebody else wrote a file of it.

What is still the surgery's is taken back, what somebody else wrote is left as it is, and a record
names it (`given_up.py`). One write of the journal decides it: killed before, the surgery waits as
it did, killed after, `recover` goes on with taking it back. Neither makes the run what it was
before the surgery: the files that are left are another's.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ckptsurgeon.errors import InterruptedSurgery, SurgeryError
from ckptsurgeon.hints import again, command
from ckptsurgeon.transaction import journal, lock, staging, way_back
from ckptsurgeon.transaction.entry import RECOVER, Entry, read, write
from ckptsurgeon.transaction.names import edited
from ckptsurgeon.transaction.recovery import Recovery
from ckptsurgeon.transaction.redo import refuse_unlike
from ckptsurgeon.transaction.worker import as_owner


def plan(root: Path, *, logs: Sequence[Path] | None = ()) -> Entry:
    """The entry with which `recover` takes back the surgery that waits, as far as it can. Reads
    only. Raises SurgeryError where none waits, or nothing is in its way."""
    root = Path(root).absolute()
    entry = read(root)
    if entry is None:
        raise SurgeryError("nothing to give up: no surgery was interrupted", next=command("log"))
    journal.refuse_foreign_entry(root, logs, entry)
    if not journal.waiting(root, logs) or not _is_stuck(root, entry):
        act = "finishes" if entry.committed and entry.back is None else "discards"
        raise InterruptedSurgery(
            f"nothing is in the way of “{entry.title}”: recover {act} it",
            untouched="nothing was touched by this command",
            next=RECOVER,
        )
    entry = way_back.find(root, entry)
    journal.refuse_foreign_entry(root, logs, entry)
    return entry


def give_up(
    root: Path, planned: Entry, *, logs: Sequence[Path] | None = (), jobs: int = 8
) -> Recovery:
    """Do what was `planned`. Raises SurgeryError, without a write, where that has changed, and
    InterruptedSurgery where it is cut off: then it, or `recover`, can be called again."""
    root = Path(root).absolute()
    try:
        with as_owner(root, edited(planned.todo)), lock.hold(root, f"recover: {planned.title}"):
            if plan(root, logs=logs) != planned:
                raise InterruptedSurgery(
                    "another file has changed since this was planned",
                    untouched="nothing was touched by this command",
                    next=again(why="shows what is left now"),
                )
            write(root, planned)
    except (OSError, KeyboardInterrupt) as error:
        raise journal.cut_short(planned.title, error) from error
    return journal.recover(root, logs=logs, jobs=jobs)


def _is_stuck(root: Path, entry: Entry) -> bool:
    """Whether `recover` would refuse what it finds."""
    try:
        refuse_unlike(root, entry.todo, staging.tails(root, entry))
    except InterruptedSurgery:
        return True
    except FileNotFoundError:  # the staged bytes
        return True
    return False
