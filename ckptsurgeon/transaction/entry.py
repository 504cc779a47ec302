"""The one record of a surgery that is under way: the sha256 of its JSON, then the JSON; and what it
says of one that was cut off."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import field
from pathlib import Path

from ckptsurgeon import disk, whole_file
from ckptsurgeon.errors import InterruptedSurgery, SurgeryError
from ckptsurgeon.hints import command
from ckptsurgeon.plans.as_json import Malformed, parsed, to_json
from ckptsurgeon.plans.edits import Move, Replace, Tail, Truncate
from ckptsurgeon.plans.frozen import frozen
from ckptsurgeon.plans.record_types import made
from ckptsurgeon.transaction.home import HOME, jobs_file

INTENT = "intent"
"""In a bucket, the name of the record as it is before the commit point, which makes `journal`."""
FORKING = "forking"
"""The name of the object that says of a fork in a bucket that not all of it is there."""
RECOVER = command("recover", why="finish it or discard it")
GO_ON = "give its own command once more, with --resume    goes on with what was computed"

Step = Move | Replace | Tail | Truncate


@frozen
class Entry:
    """What the journal file holds. `steps` are filled in at the commit point. `back` takes them
    back where the surgery is given up, but for the files in `left` (`given_up.GivenUp`)."""

    id: str
    title: str
    files: tuple[str, ...]
    directories: tuple[str, ...]
    steps: tuple[Step, ...] = ()
    committed: bool = False
    back: tuple[Step, ...] | None = None
    left: Mapping[str, str] = field(default_factory=dict)

    @property
    def todo(self) -> tuple[Step, ...]:
        """What `recover` carries out."""
        return self.steps if self.back is None else self.back


def encoded(entry: Entry) -> bytes:
    """The bytes of the record."""
    body = json.dumps(vars(entry), default=to_json, check_circular=False).encode()
    return hashlib.sha256(body).hexdigest().encode() + b"\n" + body


def write(root: Path, entry: Entry, check: Callable[[], None] = lambda: None) -> None:
    """Put the journal in place, durably; `check` is called right before, and may refuse."""
    new, path = root / HOME / "journal.new", root / HOME / "journal"
    if disk.is_there(new):
        disk.remove_file(new)
    disk.write_new(new, encoded(entry))
    check()
    disk.rename(new, path)
    disk.fsync_directory(path.parent)


def read(root: Path) -> Entry | None:
    """What the journal says, None where there is none. Raises InterruptedSurgery where it can't be
    told. A fork that was cut off in a bucket has no id."""
    forking = root / HOME / FORKING
    try:
        if disk.is_there(forking):
            return Entry("", "fork: not all of it is there", (), ())
    except OSError as error:
        raise _damaged(forking, f": {error.strerror}") from None
    return _read(root / HOME / "journal") or _read(root / HOME / INTENT)


def _read(path: Path) -> Entry | None:
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
    raise _damaged(path, wrong)


def _damaged(path: Path, wrong: str) -> InterruptedSurgery:
    return InterruptedSurgery(
        f"{path} is damaged{wrong}",
        untouched="nothing was touched by this command",
        next=("restore it from a snapshot of the file system", RECOVER),
    )


def interrupted(root: Path) -> str | None:
    """The title of a surgery that waits for `recover` (or is under way at this moment)."""
    try:
        entry = read(root)
    except SurgeryError:
        return "a surgery whose journal is damaged"
    return None if entry is None else entry.title


def committed(root: Path) -> bool | None:
    """Whether the surgery that waits for `recover` is past its commit point, and will be finished;
    None where none waits, or its journal can't be read."""
    try:
        entry = read(root)
    except SurgeryError:
        return None
    return None if entry is None else entry.committed


def cut_off(root: Path) -> str | None:
    """The id of the surgery that waits and was cut off before its commit point."""
    entry = read(root)
    return None if entry is None or entry.committed else entry.id


def refuse_waiting(root: Path) -> None:
    """Raise InterruptedSurgery while a surgery waits for `recover`."""
    title = interrupted(root)
    if title is not None:
        raise InterruptedSurgery(
            f"a surgery was interrupted: {title}",
            untouched="nothing was touched by this command",
            next=(GO_ON, RECOVER) if _noted(root) else RECOVER,
        )


def _noted(root: Path) -> bool:
    """Whether the surgery that waits may be gone on with, and its workers have left records."""
    try:
        id = cut_off(root)
    except SurgeryError:
        return False
    return id is not None and disk.is_file(root / jobs_file(id))
