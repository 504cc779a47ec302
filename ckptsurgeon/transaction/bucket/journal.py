"""Applies a plan in a bucket, in one transaction: killed anywhere, the run ends before or after it.

1. `intent`, an object that is created: every name that staging will make.
2. Staging: all new bytes, and the receipt, as objects below `staging`; of a shard that grows or
   shrinks the parts of an upload, which nobody sees. The run is not touched.
3. Commit point: `journal` is created, by one request that one process can win. It holds all that is
   needed to finish. Who takes back a surgery that died creates the same object first.
4. Redo: every edit, from that record alone (`redo.py`).
5. The receipt gets its place; then staging, `intent` and `journal` go.

Before 3, an error takes everything back. After 3, only `recover` may go on: it finishes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ckptsurgeon.errors import InterruptedSurgery, SurgeryError, count
from ckptsurgeon.hints import again, shell
from ckptsurgeon.plans.edits import (
    Append,
    Checksum,
    Computed,
    Content,
    Edit,
    Link,
    Move,
    Piece,
    Replace,
    Span,
    Tail,
    Truncate,
)
from ckptsurgeon.plans.plan import Plan, Receipt
from ckptsurgeon.plans.queries import Queries
from ckptsurgeon.progress import Progress, silent
from ckptsurgeon.remote import parts, reads
from ckptsurgeon.remote.writes import Changed, Head, Upload
from ckptsurgeon.transaction import assumptions, entry, journal, receipts, staging
from ckptsurgeon.transaction.bucket import lease
from ckptsurgeon.transaction.bucket.place import Place, at_once
from ckptsurgeon.transaction.bucket.redo import Ready, appended, cut, redo
from ckptsurgeon.transaction.entry import FORKING, INTENT, Entry
from ckptsurgeon.transaction.home import HOME, staged_name
from ckptsurgeon.transaction.recovery import Recovery

JOURNAL = f"{HOME}/journal"
WRITTEN = 1 << 30
"""Bytes of an object that a surgery may write anew, at most; one that grows may have any size."""
COPIED = 1 << 20
"""Bytes of a span that are read by themselves, at most: of a longer one the whole file is."""


def uploads_file(id: str) -> str:
    """Which uploads a surgery has begun."""
    return staged_name(id, "uploads")


# --- commit --------------------------------------------------------------------------------------


def commit(
    place: Place,
    plan: Plan,
    *,
    logs: Sequence[Path] | None,
    progress: Progress | None = None,
    still: Callable[[], None],
) -> Receipt:
    """Apply `plan` and return its receipt, as `transaction.journal.commit` does on a disk.

    Raises SurgeryError or KeyboardInterrupt when nothing was changed and no trace is left, and
    InterruptedSurgery when `recover` must go on."""
    root = place.root
    refuse_impossible(plan.edits)
    try:
        still()
        entry.refuse_waiting(root)
        listings = journal.refuse_stale(root, plan, logs)
        with reads.unwatched():  # what it opens it does not read
            assumptions.check_edits(root, plan.edits)
        with lease.hold(place, plan.title) as held:
            place.mirror.refresh()
            entry.refuse_waiting(root)
            journal.refuse_other_id(root, plan)
            made = [HOME, lease.NAME]
            assumptions.check_files_again(root, plan.assumes, listings, made)
            receipt = _commit(place, plan, listings, held, still, progress or silent)
    except OSError as error:
        raise journal.failed(error) from error
    try:
        place.mirror.refresh()
    except SurgeryError as error:
        raise receipts.unread(receipt.id, error) from error
    return receipt


def refuse_impossible(edits: Sequence[Edit]) -> None:
    """Raise SurgeryError for an edit that no request stands for, before anything is written."""
    for edit in edits:
        content = edit.content if isinstance(edit, (Move, Replace)) else None
        if content is None:
            continue
        name = edit.dst if isinstance(edit, Move) else edit.file
        if isinstance(content, Link):
            raise SurgeryError(f"{name}: a bucket has no symbolic links", next=_ON_DISK)
        if isinstance(content, Queries):
            raise SurgeryError(f"{name}: a database is not changed in a bucket", next=_ON_DISK)
        if any(isinstance(piece, (Computed, Checksum)) for piece in content.pieces):
            what = f"{name}: new tensors are not computed in a bucket yet"
            raise SurgeryError(what, next=_ON_DISK)
        if content.size > WRITTEN:
            what = f"{name} would be written anew, {count(content.size, 'byte', spec=',')}"
            raise SurgeryError(f"{what}: too many in a bucket yet", next=_ON_DISK)


_ON_DISK = "copy the run to a disk, and name its folder there with -C"


def _commit(
    place: Place,
    plan: Plan,
    listings: assumptions.Listings,
    held: lease.Lease,
    still: Callable[[], None],
    progress: Progress,
) -> Receipt:
    root = place.root
    receipt = receipts.of(plan)
    folders, files = staging.directories(root, plan), staging.staged_files(plan)
    staged = (*files, uploads_file(plan.id))
    begun = Entry(plan.id, plan.title, staged, folders, staging.steps(root, plan.edits))
    committed = replace(begun, committed=True)
    try:
        _create(place, f"{HOME}/{INTENT}", begun)
        progress("staging", 0, len(files))
        staging.make_directories(root, folders)
        staging.write(root, replace(plan, edits=_read_alone(root, plan.edits)), receipt, 8)
        _send(place, plan.edits, files)
        ready = _send_parts(place, plan)
        progress("staging", len(files), len(files))
        place.mirror.refresh()
        still()
        assumptions.check_files_again(root, plan.assumes, listings, [HOME, *files, *folders])
        held.confirm()
        _create(place, JOURNAL, committed)
        _finish(place, committed, ready, progress)
    except BaseException as error:
        raise _cut_off(place, committed, error) from error
    return receipt


def _create(place: Place, name: str, record: Entry) -> None:
    """Make the record. Raises SurgeryError where another process made one of that name."""
    data = entry.encoded(record)
    try:
        place.writes.put(place.key(name), data)
    except Changed:
        found = place.writes.read(place.key(name))
        if found is None or found[0] != data:  # else the answer to our own got lost
            raise SurgeryError(
                f"s3://{place.writes.bucket}/{place.key(name)}: another process was first",
                next=again(why="it plans anew"),
            ) from None


def _cut_off(place: Place, record: Entry, error: BaseException) -> BaseException:
    """Take the staging back when the commit point was not reached. What to tell the user."""
    try:
        if _is_there(place, JOURNAL) or _finished(place, record):
            return journal.cut_short(record.title, error)
        _discard(place, record)
    except (OSError, SurgeryError, KeyboardInterrupt) as second:
        return journal.cut_short(record.title, second)
    return journal.failed(error) if isinstance(error, OSError) else error


def _is_there(place: Place, name: str) -> bool:
    return place.head(name) is not None


def _finished(place: Place, record: Entry) -> bool:
    return _is_there(place, receipts.receipt_file(record.id))


# --- staging -------------------------------------------------------------------------------------


def _read_alone(root: Path, edits: Sequence[Edit]) -> tuple[Edit, ...]:
    """The edits, with the bytes of each short span in its place: to stage it fetches no whole
    shard."""

    def known(piece: Piece) -> Piece:
        if not isinstance(piece, Span) or piece.end - piece.start > COPIED:
            return piece
        path = root / piece.file
        descriptor = reads.opened(path)
        try:
            return reads.bytes_at(path, descriptor, piece.start, piece.end - piece.start)
        finally:
            os.close(descriptor)

    return tuple(
        replace(edit, content=replace(edit.content, pieces=tuple(map(known, edit.content.pieces))))
        if isinstance(edit, (Move, Replace)) and isinstance(edit.content, Content)
        else edit
        for edit in edits
    )


def _send(place: Place, edits: Sequence[Edit], files: Sequence[str]) -> None:
    """The staged files become objects, with what is said of those whose place they take."""
    like: dict[str, str] = {}
    for edit in edits:
        if isinstance(edit, Replace):
            like[edit.staged] = edit.file
        elif isinstance(edit, Move) and edit.content is not None and edit.like is not None:
            like[edit.src] = edit.like

    def send(name: str) -> None:
        data = (place.root / name).read_bytes()
        head = place.head(like[name]) if name in like else None
        if len(data) > parts.MOST:
            place.writes.complete(place.writes.upload(place.key(name), [data], head))
        else:
            place.writes.put(place.key(name), data, like=head, match="")

    at_once(send, files)


def _send_parts(place: Place, plan: Plan) -> Mapping[str, Ready]:
    """The parts of each object that grows or shrinks, by the file; a short one is sent later."""
    begun: dict[str, tuple[Head, Upload, Append | Truncate]] = {}

    def begin(edit: Append | Truncate) -> None:
        known = place.mirror.object(place.key(edit.file))
        head = place.head(edit.file)
        if head is None or known is None or head.etag != known.etag:
            what = f"s3://{place.writes.bucket}/{place.key(edit.file)} was changed"
            raise SurgeryError(f"{what} since the plan was made", next=assumptions.AGAIN)
        if edit.old_size >= parts.LEAST:
            begun[edit.file] = head, place.writes.begin(place.key(edit.file), head), edit

    at_once(begin, [edit for edit in plan.edits if isinstance(edit, (Append, Truncate))])
    if not begun:
        return {}
    made = [(upload.key, upload.id) for _, upload, _ in begun.values()]
    name = uploads_file(plan.id)
    place.writes.put(place.key(name), json.dumps(made).encode(), match="")
    ready: dict[str, Ready] = {}

    def fill(file: str) -> None:
        head, upload, edit = begun[file]
        if isinstance(edit, Append):
            segments = appended(place, head, edit)
        else:
            segments = cut(place, head, edit)
        filled = place.writes.fill(upload, segments)
        ready[file] = Ready(filled, head.etag)

    at_once(fill, begun)
    return ready


def _discard(place: Place, record: Entry) -> None:
    """Nothing of it is left, and the record of it goes last."""
    _tidy(place, record)
    place.delete([f"{HOME}/{INTENT}"])
    place.delete([JOURNAL])


def _tidy(place: Place, record: Entry) -> None:
    """Remove what was staged. An upload that was begun, and not noted, has no part yet: a trainer's
    that has none, of the same object, would go with it, and no other."""
    found = place.writes.read(place.key(uploads_file(record.id)))
    begun = [(str(key), str(id)) for key, id in json.loads(found[0])] if found else []
    sizes = {s.file: s.old_size for s in record.steps if isinstance(s, (Tail, Truncate))}
    long = {place.key(file) for file, size in sizes.items() if size >= parts.LEAST}
    if long and not found:
        above = f"{place.key('.')}/".lstrip("/")
        begun = [each for each in place.writes.empty_uploads(above) if each[0] in long]
    at_once(lambda each: place.writes.abort(*each), begun)
    place.delete(record.files)


# --- after the commit point ----------------------------------------------------------------------


def _finish(
    place: Place, record: Entry, ready: Mapping[str, Ready], progress: Progress = silent
) -> None:
    """Redo, receipt, tidy. Once the receipt is in place, the edits are known to be done."""
    if not _finished(place, record):
        finished = 0

        def count(files: int) -> None:
            nonlocal finished
            finished += files
            progress("editing", finished, len(record.steps))

        count(0)
        redo(place, record.steps, staging.tails_file(record.id), ready, count)
        for staged, final in receipts.records(record.id).items():  # the receipt is the last
            if (head := place.head(staged)) is not None:
                place.writes.copy(place.key(staged), head, place.key(final))
    _discard(place, record)


def recover(place: Place, *, logs: Sequence[Path] | None) -> Recovery:
    """Finish a surgery that was cut off after its commit point; take back one cut off before.

    Raises SurgeryError while another surgery is under way, InterruptedSurgery when it is cut off
    itself: then it can be called again; and VerificationFailed or SurgeryError when that is done
    and the run can't be read back."""
    title = entry.interrupted(place.root)
    if place.mirror.object(place.key(f"{HOME}/{FORKING}")) is not None:
        raise InterruptedSurgery(
            f"{place.root} is a fork that was cut off, or that is still made",
            untouched="nothing was touched by this command",
            next=shell(["aws", "s3", "rm", "--recursive", place.root], why="if no fork is running"),
        )
    if title is None and not _is_there(place, lease.NAME):
        return Recovery("nothing")
    journal.waiting(place.root, logs)
    held, done = False, None
    try:
        with lease.hold(place, f"recover: {title or 'nothing'}"):
            held = True
            place.mirror.refresh()
            done = _recover(place, logs)
        place.mirror.refresh()
        return done
    except InterruptedSurgery:
        raise
    except (OSError, SurgeryError, KeyboardInterrupt) as error:
        if isinstance(error, SurgeryError) and not held:
            raise
        if done is not None:
            raise done.unread(error) from error
        raise journal.cut_short(title or "recover", error) from error


def _recover(place: Place, logs: Sequence[Path] | None) -> Recovery:
    record = entry.read(place.root)
    if record is None:
        return Recovery("nothing")
    if not record.committed and not _is_there(place, JOURNAL):
        # From here on, the surgery can't be committed by a process that was only slow.
        try:
            place.writes.put(place.key(JOURNAL), entry.encoded(record))
        except Changed:
            place.mirror.refresh()
            record = entry.read(place.root) or record
    journal.refuse_foreign_entry(place.root, logs, record)
    if not record.committed:
        _discard(place, record)
        return Recovery("discarded", record.title)
    _finish(place, record, {})
    return Recovery("finished", record.title, record.id, record.steps)
