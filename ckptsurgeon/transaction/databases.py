"""A SQLite database in a transaction: it is changed in a copy, which then takes its place."""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
from pathlib import Path

from ckptsurgeon import disk
from ckptsurgeon.disk.databases import change
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.hints import shell
from ckptsurgeon.plans.queries import Queries
from ckptsurgeon.transaction.json_keys import keys_renamed
from ckptsurgeon.transaction.reading import forget

BESIDE = ("-wal", "-journal")
"""What SQLite puts behind the name of a database for what is not in it yet, or not for good."""
LEAP = 8 << 20
_FINISH = (
    "import sqlite3, sys; d = sqlite3.connect(sys.argv[1]); "
    "d.execute('PRAGMA wal_checkpoint(TRUNCATE)'); d.execute('SELECT * FROM sqlite_master')"
)
_CHECK = (
    "import sqlite3, sys; d = sqlite3.connect(sys.argv[1]); "
    "print(*d.execute('PRAGMA integrity_check'), sep='\\n')"
)


def is_live(path: Path) -> bool:
    """Whether a database is not whole by itself: a log or a journal beside it has what a process
    wrote that is alive, or was killed."""
    return _unfinished(path) is not None


def refuse_live(path: Path) -> None:
    """Raise SurgeryError for such a one."""
    beside = _unfinished(path)
    if beside is not None:
        finish = shell(
            ["python3", "-c", _FINISH, path],
            why="once nobody has it open: SQLite finishes what was begun",
        )
        raise SurgeryError(
            f"{beside} has changes that are not in {path.name} yet: somebody has it open, or was "
            "killed",
            next=finish,
        )


def _unfinished(path: Path) -> Path | None:
    for beside in (path.with_name(path.name + end) for end in BESIDE):
        with contextlib.suppress(FileNotFoundError):
            if beside.stat().st_size:
                return beside
    return None


def stage(root: Path, path: Path, queries: Queries, like: str | None) -> None:
    """Make the copy, with the rights of `like`, change it, make it durable, and have SQLite read
    all of it again from the device."""
    source = root / queries.file
    refuse_live(source)
    with disk.created(path) as descriptor:
        size = source.stat().st_size
        for start in range(0, size, LEAP):
            end = min(start + LEAP, size)
            disk.copy_at(descriptor, path, start, source, start, end)
            forget(descriptor, 0, end)
        try:
            change(path, queries.statements, {"keys_renamed": _keys_renamed})
        except sqlite3.Error as error:
            raise _odd(source, str(error)) from error
        if like is not None:
            disk.copy_rights(descriptor, path, (root / like).stat())
        disk.fsync_file(descriptor, path)
        forget(descriptor, 0, os.fstat(descriptor).st_size)
    _check(path, source)


def _keys_renamed(text: str | bytes, pairs: str) -> str | bytes:
    """A text, or bytes, that is an object of JSON, with new names for the keys at its top."""
    new = json.loads(pairs)
    if isinstance(text, bytes):
        return keys_renamed(text, new)
    return keys_renamed(text.encode(), new).decode()


def _check(path: Path, source: Path) -> None:
    address = f"{path.resolve().as_uri()}?mode=ro&immutable=1"
    try:
        with contextlib.closing(sqlite3.connect(address, uri=True)) as database:
            said = database.execute("PRAGMA quick_check(1)").fetchone()[0]
    except sqlite3.Error as error:
        raise _odd(source, str(error)) from error
    if said != "ok":
        raise _odd(source, said)


def _odd(source: Path, what: str) -> SurgeryError:
    return SurgeryError(
        f"{source}: SQLite can't change it: {what}",
        next=shell(["python3", "-c", _CHECK, source], why="what SQLite says of it"),
    )
