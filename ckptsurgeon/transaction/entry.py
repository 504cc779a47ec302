"""The one record of a surgery that is under way: the sha256 of its JSON, then the JSON."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ckptsurgeon import disk, whole_file
from ckptsurgeon.errors import InterruptedSurgery
from ckptsurgeon.hints import command
from ckptsurgeon.plans.as_json import Malformed, parsed, to_json
from ckptsurgeon.plans.record_types import made
from ckptsurgeon.transaction.home import HOME
from ckptsurgeon.transaction.redo import Step

INTENT = "intent"
"""In a bucket, the name of the record as it is before the commit point, which makes `journal`."""
FORKING = "forking"
"""The name of the object that says of a fork in a bucket that not all of it is there."""
RECOVER = command("recover", why="finish it or discard it")


@dataclass(frozen=True)
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
    if os.path.lexists(new):
        disk.remove_file(new)
    disk.write_new(new, encoded(entry))
    check()
    disk.rename(new, path)
    disk.fsync_directory(path.parent)


def read(root: Path) -> Entry | None:
    """What the journal says, None where there is none. Raises InterruptedSurgery where it can't be
    told. A fork that was cut off in a bucket has no id."""
    if os.path.lexists(root / HOME / FORKING):
        return Entry("", "fork: not all of it is there", (), ())
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
    raise InterruptedSurgery(
        f"{path} is damaged{wrong}",
        untouched="nothing was touched by this command",
        next=("restore it from a snapshot of the file system", RECOVER),
    )
