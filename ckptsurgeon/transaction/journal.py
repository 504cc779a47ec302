"""Applies a plan in one transaction: killed anywhere, the run ends before the surgery or after it.

1. Intent: a durable record of every name that staging will make.
2. Staging: all new bytes and the receipt, durable and read back. The run is not touched.
3. Commit point: one rename puts a record in place that holds all that is needed to finish.
4. Redo: every edit, from that record alone; it can be cut off and done again (`redo.py`).
5. The receipt is renamed into its place; then staging and journal go.

Before 3, an error takes everything back: the run is byte for byte as it was. After 3, only
`recover` may go on: it finishes. The journal is one file (`entry.py`). Before 3, a kill may also be
followed by the same surgery, which goes on with what its workers have noted (`job_list.py`).
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from pathlib import Path

from ckptsurgeon import disk
from ckptsurgeon.errors import InterruptedSurgery, SurgeryError
from ckptsurgeon.plans.edits import Edit, Tail
from ckptsurgeon.plans.frozen import frozen
from ckptsurgeon.plans.plan import Plan, Receipt
from ckptsurgeon.progress import Progress, silent
from ckptsurgeon.transaction import assumptions, given_up, inverse, lock, receipts, space, staging
from ckptsurgeon.transaction.assumptions import IN_PLACE
from ckptsurgeon.transaction.entry import (
    RECOVER,
    Entry,
    Step,
    interrupted,
    read,
    refuse_waiting,
    write,
)
from ckptsurgeon.transaction.home import HOME, STAGING
from ckptsurgeon.transaction.may_change import read_only
from ckptsurgeon.transaction.names import edited, refuse_foreign, refuse_foreign_staging
from ckptsurgeon.transaction.ranks import Ranks
from ckptsurgeon.transaction.recovery import Recovery
from ckptsurgeon.transaction.redo import known, redo
from ckptsurgeon.transaction.worker import as_owner


@frozen
class _By:
    """Who does it: so many threads, and workers for what is computed and copied, if any."""

    jobs: int
    workers: Executor | None
    resume: bool
    progress: Progress


# --- commit --------------------------------------------------------------------------------------


def commit(
    root: Path,
    plan: Plan,
    *,
    logs: Sequence[Path] | None = (),
    jobs: int = 8,
    workers: Executor | None = None,
    resume: bool = False,
    progress: Progress | None = None,
    still: Callable[[], None] = lambda: None,
) -> Receipt:
    """Apply `plan` and return its receipt. `logs` are the real paths of the run's log folders, in
    which it may edit event files (`refuse_foreign`). `workers` compute and copy in place of this
    process, and leave records; with `resume`, an attempt of the same surgery that was cut off
    before its commit point is gone on with. `still` raises SurgeryError where the run has
    changed in what no fingerprint says; it is asked first, and right before the commit.

    Raises SurgeryError or KeyboardInterrupt when nothing was changed and no trace is left, and
    InterruptedSurgery when `recover` must go on. `progress(phase, done, total)` counts files."""
    root = Path(root).absolute()
    try:
        with as_owner(root, edited(plan.edits)):
            still()
            by = _By(jobs, workers, resume, progress or silent)
            return _under_lock(root, plan, logs, by, still)
    except OSError as error:
        raise failed(error) from error


def _under_lock(
    root: Path,
    plan: Plan,
    logs: Sequence[Path] | None,
    by: _By,
    still: Callable[[], None],
) -> Receipt:
    before: Entry | None = None
    if interrupted(root) is not None:
        # Under the lock: a surgery that is alive is named as such.
        with lock.hold(root, plan.title):
            before = _cut_off_before(root, plan, logs, by)
    held = _held(root, plan.edits)
    in_place = {edit.file for edit in plan.edits if isinstance(edit, IN_PLACE)}
    listings = refuse_stale(root, plan, logs, before, opened=in_place)
    there = before.files if before else ()
    kept = {cut.file for cut, _ in inverse.kept(plan.edits, plan.id)}
    anchors = assumptions.check_edits(root, plan.edits, there, plan.assumes, kept, held)
    space.refuse_full(root, plan.edits, HOME, there)
    with held, lock.hold(root, plan.title):
        if before is None:
            refuse_waiting(root)
        elif read(root) != before:
            raise SurgeryError("another process has gone on with it", next=assumptions.AGAIN)
        refuse_other_id(root, plan, before)
        made = [HOME, *there, *(before.directories if before else ())]
        assumptions.check_files_again(root, plan.assumes, listings, made)
        return _commit(root, plan, listings, anchors, held, by, still, before)


def _cut_off_before(root: Path, plan: Plan, logs: Sequence[Path] | None, by: _By) -> Entry | None:
    """The attempt that waits, where it is to be gone on with; None where none waits. Raises
    InterruptedSurgery for any other."""
    entry = read(root)
    if entry is None:
        return None
    if not by.resume or entry.committed or (entry.id, entry.title) != (plan.id, plan.title):
        refuse_waiting(root)
    refuse_foreign_entry(root, logs, entry)
    return entry


def _commit(
    root: Path,
    plan: Plan,
    listings: assumptions.Listings,
    anchors: Mapping[str, str],
    held: disk.Held,
    by: _By,
    still: Callable[[], None],
    before: Entry | None,
) -> Receipt:
    plan = replace(plan, edits=staging.timed(root, plan.edits))
    receipt = receipts.of(plan, by.workers.start if isinstance(by.workers, Ranks) else "")
    progress = by.progress
    folders = staging.directories(root, plan)
    files = staging.staged_files(plan, by.workers is not None)
    if before is not None:
        folders = tuple(dict.fromkeys([*before.directories, *folders]))
        files = tuple(dict.fromkeys([*before.files, *files]))
    entry = Entry(plan.id, plan.title, files, folders)
    try:
        disk.fsync_directory(root)
        write(root, entry)
        progress("staging", 0, len(entry.files))
        staging.make_directories(root, folders)
        staging.write(root, plan, receipt, by.jobs, by.workers, before is not None, progress)
        progress("staging", len(entry.files), len(entry.files))
        made = [HOME, *entry.files, *folders]
        steps = known(root, staging.steps(root, plan.edits, anchors))
        entry = replace(entry, steps=steps, committed=True)

        def as_planned() -> None:
            still()
            opened = assumptions.hold(root, entry.steps, plan.assumes, held)
            others = [each for each in plan.assumes if each.file not in opened]
            assumptions.check_files_again(root, others, listings, made)

        write(root, entry, as_planned)
        _finish(root, entry, held, by.jobs, progress)
    except BaseException as error:
        raise _cut_off(root, entry, error) from error
    return receipt


def _cut_off(root: Path, entry: Entry, error: BaseException) -> BaseException:
    """Take the staging back when the commit point was not reached. What to tell the user."""
    try:
        journal = read(root)
        committed = journal.committed if journal else _finished(root, entry)
        if committed:
            return cut_short(entry.title, error)
        _discard(root, entry)
    except (OSError, SurgeryError, KeyboardInterrupt) as second:
        return cut_short(entry.title, second)
    return failed(error) if isinstance(error, OSError) else error


def _finished(root: Path, entry: Entry) -> bool:
    """Whether the receipt is in its place, or the record that it was given up."""
    record = receipts.receipt_file if entry.back is None else given_up.record_file
    return disk.is_there(root / record(entry.id))


def refuse_stale(
    root: Path,
    plan: Plan,
    logs: Sequence[Path] | None = (),
    before: Entry | None = None,
    opened: Collection[str] = (),
) -> assumptions.Listings:
    """Raise when the plan edits what is not the run's, when another surgery was done since it was
    made, or a file of it was changed; those in `opened` are compared when they are. `before` is the
    attempt that it goes on with."""
    known = {expected.file for expected in plan.assumes}
    refuse_foreign(root, logs, plan.edits, "the plan", known)
    refuse_other_id(root, plan, before)
    others = [expected for expected in plan.assumes if expected.file not in opened]
    return assumptions.check_files(root, others)


def refuse_other_id(root: Path, plan: Plan, before: Entry | None = None) -> None:
    """Raise SurgeryError where another surgery was done since the plan was made."""
    expected = before.id if before else receipts.next_id(root)
    if plan.id != expected:
        raise SurgeryError(
            f"the plan was made as surgery {plan.id}, but the next surgery is {expected}: another "
            "surgery was done since",
            next=assumptions.AGAIN,
        )


def failed(error: OSError) -> SurgeryError:
    """What is said of what the system refused before the commit point."""
    if error.errno == errno.EROFS and (refusal := read_only(Path(error.filename or "/"))):
        return refusal
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    return SurgeryError(
        f"{error.filename or 'the disk'}: {error.strerror or error}",
        next=space.MAKE_ROOM if full else "remove the cause, then run the same command again",
    )


def cut_short(title: str, error: BaseException) -> InterruptedSurgery:
    """What is said of a surgery that `recover` must go on with."""
    if isinstance(error, InterruptedSurgery):
        return error
    reason = str(error) or type(error).__name__
    return InterruptedSurgery(
        f"the surgery “{title}” was interrupted: {reason}",
        untouched="every byte from before the surgery is kept",
        next=RECOVER,
    )


# --- recover -------------------------------------------------------------------------------------


def waiting(root: Path, logs: Sequence[Path] | None) -> tuple[Step, ...]:
    """The edits that `recover` will finish; none where it discards them. Raises InterruptedSurgery
    where it would refuse them."""
    entry = read(root)
    if entry is None:
        return ()
    refuse_foreign_entry(root, logs, entry)
    return entry.todo if entry.committed and not _finished(root, entry) else ()


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
        raise cut_short(title, error) from error


def _traces(home: Path) -> bool:
    """Whether a surgery left something: a journal, a lock, or an empty home."""
    if not disk.is_folder(home):
        return False
    names = {entry.name for entry in home.iterdir()}
    return not names or any(name.startswith(("journal", "lock")) for name in names)


def _recover(root: Path, logs: Sequence[Path] | None, jobs: int) -> Recovery:
    entry = read(root)
    if entry is None:
        staging.remove(root, [f"{HOME}/journal.new"], [])
        return Recovery("nothing")
    refuse_foreign_entry(root, logs, entry)
    # A record that is seen is not yet one that survives a power cut.
    disk.fsync_directory(root / HOME)
    if not entry.committed:
        _discard(root, entry)
        return Recovery("discarded", entry.title)
    with _held(root, entry.todo) as held:
        _finish(root, entry, held, jobs, silent)
    if entry.back is not None:
        return Recovery("given up", entry.title, steps=entry.back, left=entry.left)
    return Recovery("finished", entry.title, entry.id, entry.steps)


def refuse_foreign_entry(root: Path, logs: Sequence[Path] | None, entry: Entry) -> None:
    """Raise InterruptedSurgery when the journal names what no surgery of this run would."""
    try:
        refuse_foreign(root, logs, (*entry.steps, *(entry.back or ())), "the journal")
        refuse_foreign_staging(root, logs, entry.id, entry.files, entry.directories)
    except SurgeryError as error:
        raise InterruptedSurgery(
            error.what, untouched="nothing was touched by this command", next=error.next
        ) from None


def _discard(root: Path, entry: Entry) -> None:
    staging.remove(root, entry.files, entry.directories)
    _remove_journal(root)


def _held(root: Path, edits: Iterable[Edit | Step]) -> disk.Held:
    """What keeps open the files that are edited in place; none of them is yet."""
    return disk.Held(root / edit.file for edit in edits if isinstance(edit, (*IN_PLACE, Tail)))


def _finish(root: Path, entry: Entry, held: disk.Held, jobs: int, progress: Progress) -> None:
    """Redo, receipt, tidy. Once the receipt is in place, the edits are known to be done; where the
    surgery is given up, the same of what takes them back, and of its record."""
    if not _finished(root, entry):
        finished = 0

        def count(files: int) -> None:
            nonlocal finished
            finished += files
            progress("editing", finished, len(entry.todo))

        count(0)
        if entry.back is not None:
            staging.make_directories(root, [n for n in entry.directories if STAGING in n])
        redo(root, entry.todo, staging.tails(root, entry), held, jobs, count)
    if entry.back is not None:
        given_up.write(root, entry.id, entry.left)
    else:
        _keep_records(root, entry.id)
    staging.remove(root, entry.files, entry.directories)
    _remove_journal(root)


def _keep_records(root: Path, id: str) -> None:
    for staged, final in receipts.records(id).items():
        if disk.is_there(root / staged):
            disk.rename(root / staged, root / final)
    # Not only after our own renames: those of an attempt which was killed may not be durable.
    disk.fsync_directory((root / receipts.receipt_file(id)).parent)


def _remove_journal(root: Path) -> None:
    staging.remove(root, [f"{HOME}/journal.new", f"{HOME}/journal"], [])
