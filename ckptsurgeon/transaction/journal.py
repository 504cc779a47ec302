"""Applies a plan in one transaction: killed anywhere, the run ends before the surgery or after it.

1. Intent: a durable record of every name that staging will make.
2. Staging: all new bytes and the receipt, durable and read back. The run is not touched.
3. Commit point: one rename puts a record in place that holds all that is needed to finish.
4. Redo: every edit, from that record alone; it can be cut off and done again (`redo.py`).
5. The receipt is renamed into its place; then staging and journal go.

Before 3, an error takes everything back: the run is byte for byte as it was. After 3, only
`recover` may go on: it finishes. The journal is one file: the sha256 of its JSON, then the JSON.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ckptsurgeon import disk, whole_file
from ckptsurgeon.errors import InterruptedSurgery, SurgeryError
from ckptsurgeon.hints import command
from ckptsurgeon.plans.as_json import Malformed, parsed, to_json
from ckptsurgeon.plans.plan import Plan, Receipt
from ckptsurgeon.plans.record_types import made
from ckptsurgeon.progress import Progress, silent
from ckptsurgeon.transaction import assumptions, lock, receipts, staging
from ckptsurgeon.transaction.home import HOME
from ckptsurgeon.transaction.names import edited, refuse_foreign, refuse_foreign_staging
from ckptsurgeon.transaction.redo import Step, redo
from ckptsurgeon.transaction.worker import as_owner

RECOVER = command("recover", why="finish it or discard it")


@dataclass(frozen=True)
class Entry:
    """What the journal file holds. `steps` are filled in at the commit point."""

    id: str
    title: str
    files: tuple[str, ...]
    directories: tuple[str, ...]
    steps: tuple[Step, ...] = ()
    committed: bool = False


@dataclass(frozen=True)
class Recovery:
    """What `recover` did: "nothing", "discarded" (before) or "finished" (after), by the edits that
    the journal names."""

    outcome: str
    title: str | None = None
    receipt: str | None = None
    steps: tuple[Step, ...] = ()


# --- look ----------------------------------------------------------------------------------------


def interrupted(root: Path) -> str | None:
    """The title of a surgery that waits for `recover` (or is under way at this moment)."""
    try:
        entry = _read(root)
    except SurgeryError:
        return "a surgery whose journal is damaged"
    return None if entry is None else entry.title


def committed(root: Path) -> bool | None:
    """Whether the surgery that waits for `recover` is past its commit point, and will be finished;
    None where none waits, or its journal can't be read."""
    try:
        entry = _read(root)
    except SurgeryError:
        return None
    return None if entry is None else entry.committed


def waiting(root: Path, logs: Sequence[Path] | None) -> tuple[Step, ...]:
    """The edits that `recover` will finish; none where it discards them. Raises InterruptedSurgery
    where it would refuse them."""
    entry = _read(root)
    if entry is None:
        return ()
    _refuse_foreign(root, logs, entry)
    return () if _finished(root, entry) else entry.steps


def refuse_waiting(root: Path) -> None:
    """Raise InterruptedSurgery while a surgery waits for `recover`."""
    title = interrupted(root)
    if title is not None:
        raise InterruptedSurgery(
            f"a surgery was interrupted: {title}",
            untouched="nothing was touched by this command",
            next=RECOVER,
        )


# --- commit --------------------------------------------------------------------------------------


def commit(
    root: Path,
    plan: Plan,
    *,
    logs: Sequence[Path] | None = (),
    jobs: int = 8,
    progress: Progress | None = None,
    still: Callable[[], None] = lambda: None,
) -> Receipt:
    """Apply `plan` and return its receipt. `logs` are the real paths of the run's log folders, in
    which it may edit event files (`refuse_foreign`). `still` raises SurgeryError where the run has
    changed in what no fingerprint says; it is asked first, and right before the commit.

    Raises SurgeryError or KeyboardInterrupt when nothing was changed and no trace is left, and
    InterruptedSurgery when `recover` must go on. `progress(phase, done, total)` counts files."""
    root = Path(root).absolute()
    try:
        with as_owner(root, edited(plan.edits)):
            still()
            return _under_lock(root, plan, logs, jobs, progress or silent, still)
    except OSError as error:
        raise _failed(error) from error


def _under_lock(
    root: Path,
    plan: Plan,
    logs: Sequence[Path] | None,
    jobs: int,
    progress: Progress,
    still: Callable[[], None],
) -> Receipt:
    if interrupted(root) is not None:
        # Under the lock: a surgery that is alive is named as such.
        with lock.hold(root, plan.title):
            refuse_waiting(root)
    listings = refuse_stale(root, plan, logs)
    assumptions.check_edits(root, plan.edits)
    assumptions.check_space(root, plan.edits, HOME)
    with lock.hold(root, plan.title):
        refuse_waiting(root)
        _refuse_other_id(root, plan)
        assumptions.check_files_again(root, plan.assumes, listings, [HOME])
        return _commit(root, plan, listings, jobs, progress, still)


def _commit(
    root: Path,
    plan: Plan,
    listings: assumptions.Listings,
    jobs: int,
    progress: Progress,
    still: Callable[[], None],
) -> Receipt:
    plan = replace(plan, edits=staging.timed(root, plan.edits))
    receipt = receipts.of(plan)
    folders = staging.directories(root, plan)
    entry = Entry(plan.id, plan.title, staging.staged_files(plan), folders)
    try:
        disk.fsync_directory(root)
        _write(root, entry)
        progress("staging", 0, len(entry.files))
        staging.make_directories(root, folders)
        staging.write(root, plan, receipt, jobs)
        progress("staging", len(entry.files), len(entry.files))
        made = [HOME, *entry.files, *folders]
        entry = replace(entry, steps=staging.steps(root, plan.edits), committed=True)

        def as_planned() -> None:
            still()
            assumptions.check_files_again(root, plan.assumes, listings, made)

        _write(root, entry, as_planned)
        _finish(root, entry, jobs, progress)
    except BaseException as error:
        raise _cut_off(root, entry, error) from error
    return receipt


def _cut_off(root: Path, entry: Entry, error: BaseException) -> BaseException:
    """Take the staging back when the commit point was not reached. What to tell the user."""
    try:
        journal = _read(root)
        committed = journal.committed if journal else _finished(root, entry)
        if committed:
            return _waiting(entry.title, error)
        _discard(root, entry)
    except (OSError, SurgeryError, KeyboardInterrupt) as second:
        return _waiting(entry.title, second)
    return _failed(error) if isinstance(error, OSError) else error


def _finished(root: Path, entry: Entry) -> bool:
    """Whether the receipt is in its place."""
    return (root / receipts.receipt_file(entry.id)).exists()


def refuse_stale(root: Path, plan: Plan, logs: Sequence[Path] | None = ()) -> assumptions.Listings:
    """Raise when the plan edits what is not the run's, when another surgery was done since it was
    made, or a file of it was changed."""
    known = {expected.file for expected in plan.assumes}
    refuse_foreign(root, logs, plan.edits, "the plan", known)
    _refuse_other_id(root, plan)
    return assumptions.check_files(root, plan.assumes)


def _refuse_other_id(root: Path, plan: Plan) -> None:
    expected = receipts.next_id(root)
    if plan.id != expected:
        raise SurgeryError(
            f"the plan was made as surgery {plan.id}, but the next surgery is {expected}: another "
            "surgery was done since",
            next=assumptions.AGAIN,
        )


def _failed(error: OSError) -> SurgeryError:
    if error.errno == errno.EROFS and (
        refusal := assumptions.read_only(Path(error.filename or "/"))
    ):
        return refusal
    return SurgeryError(
        f"{error.filename or 'the disk'}: {error.strerror or error}",
        next="remove the cause, then run the same command again",
    )


def _waiting(title: str, error: BaseException) -> InterruptedSurgery:
    if isinstance(error, InterruptedSurgery):
        return error
    reason = str(error) or type(error).__name__
    return InterruptedSurgery(
        f"the surgery “{title}” was interrupted: {reason}",
        untouched="every byte from before the surgery is kept",
        next=RECOVER,
    )


# --- recover -------------------------------------------------------------------------------------


def recover(root: Path, *, logs: Sequence[Path] | None = (), jobs: int = 8) -> Recovery:
    """Finish a surgery that was cut off after its commit point; take back one cut off before.
    `logs` are as for `commit`.

    Does nothing, without a write, when there is nothing to do. Raises InterruptedSurgery when it
    is cut off itself: then it can be called again."""
    root = Path(root).absolute()
    if not _traces(root / HOME):
        return Recovery("nothing")
    title = interrupted(root) or "recover"
    steps = waiting(root, logs)
    try:
        with as_owner(root, edited(steps)), lock.hold(root, f"recover: {title}"):
            return _recover(root, logs, jobs)
    except (OSError, KeyboardInterrupt) as error:
        raise _waiting(title, error) from error


def _traces(home: Path) -> bool:
    """Whether a surgery left something: a journal, a lock, or an empty home."""
    if not home.is_dir():
        return False
    names = {entry.name for entry in home.iterdir()}
    return not names or any(name.startswith(("journal", "lock")) for name in names)


def _recover(root: Path, logs: Sequence[Path] | None, jobs: int) -> Recovery:
    entry = _read(root)
    if entry is None:
        staging.remove(root, [f"{HOME}/journal.new"], [])
        return Recovery("nothing")
    _refuse_foreign(root, logs, entry)
    # A record that is seen is not yet one that survives a power cut.
    disk.fsync_directory(root / HOME)
    if not entry.committed:
        _discard(root, entry)
        return Recovery("discarded", entry.title)
    _finish(root, entry, jobs, silent)
    return Recovery("finished", entry.title, entry.id, entry.steps)


def _refuse_foreign(root: Path, logs: Sequence[Path] | None, entry: Entry) -> None:
    """Raise InterruptedSurgery when the journal names what no surgery of this run would."""
    try:
        refuse_foreign(root, logs, entry.steps, "the journal")
        refuse_foreign_staging(root, logs, entry.id, entry.files, entry.directories)
    except SurgeryError as error:
        raise InterruptedSurgery(
            error.what, untouched="nothing was touched by this command", next=error.next
        ) from None


def _discard(root: Path, entry: Entry) -> None:
    staging.remove(root, entry.files, entry.directories)
    _remove_journal(root)


def _finish(root: Path, entry: Entry, jobs: int, progress: Progress) -> None:
    """Redo, receipt, tidy. Once the receipt is in place, the edits are known to be done."""
    if not _finished(root, entry):
        finished = 0

        def count(files: int) -> None:
            nonlocal finished
            finished += files
            progress("editing", finished, len(entry.steps))

        count(0)
        redo(root, entry.steps, root / staging.tails_file(entry.id), jobs, count)
    for staged, final in receipts.records(entry.id).items():
        if (root / staged).exists():
            disk.rename(root / staged, root / final)
    # Not only after our own renames: those of an attempt which was killed may not be durable.
    disk.fsync_directory((root / receipts.receipt_file(entry.id)).parent)
    staging.remove(root, entry.files, entry.directories)
    _remove_journal(root)


# --- files ---------------------------------------------------------------------------------------


def _write(root: Path, entry: Entry, check: Callable[[], None] = lambda: None) -> None:
    """Put the journal in place, durably; `check` is called right before, and may refuse."""
    body = json.dumps(vars(entry), default=to_json).encode()
    new, path = root / HOME / "journal.new", root / HOME / "journal"
    if os.path.lexists(new):
        disk.remove_file(new)
    disk.write_new(new, hashlib.sha256(body).hexdigest().encode() + b"\n" + body)
    check()
    disk.rename(new, path)
    disk.fsync_directory(path.parent)


def _read(root: Path) -> Entry | None:
    path = root / HOME / "journal"
    wrong = ""
    try:
        data = whole_file.read(path, whole_file.MAX_RECORD, follow=False)
        digest, _, body = data.partition(b"\n")
        if hashlib.sha256(body).hexdigest().encode() == digest:
            entry = parsed(body)
            if isinstance(entry, dict):
                return made(Entry, entry)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        wrong = f": {error.strerror}"
    except (Malformed, TypeError) as error:
        wrong = f": {error}"
    raise InterruptedSurgery(
        f"{path} is damaged{wrong}",
        untouched="nothing was touched by this command",
        next=("restore it from a snapshot of the file system", RECOVER),
    )


def _remove_journal(root: Path) -> None:
    staging.remove(root, [f"{HOME}/journal.new", f"{HOME}/journal"], [])
