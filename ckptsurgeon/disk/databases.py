"""A SQLite database that nobody else has: changed in place, by statements."""

from __future__ import annotations

import contextlib
import errno
import sqlite3
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias

from ckptsurgeon.disk.calls import act
from ckptsurgeon.disk.files import opened, write_at
from ckptsurgeon.plans.queries import Statement, Values

Function: TypeAlias = Callable[..., Any]
MEMORY_KIB = 64 << 10
"""Pages that are in memory at once."""
_MODE = 18
"""The two bytes of the header that say whether SQLite writes a log ahead (WAL) of the file."""
_ALLOWED = {
    sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_INSERT, sqlite3.SQLITE_UPDATE,
    sqlite3.SQLITE_DELETE, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_TRANSACTION,
}  # fmt: skip


def change(
    path: Path,
    statements: Iterable[Statement],
    functions: Mapping[str, Function] = MappingProxyType({}),
) -> None:
    """Carry out each statement, in order. They may read and change rows, and nothing else: no other
    file is attached. They may call `functions`. There is no journal, so a file that an error or a
    kill left half changed is of no use. The mode of the file stays as it is.

    Raises OSError for what the disk did not do, sqlite3.Error for any other."""
    with opened(path) as descriptor:
        mode = _mode(path)
        write_at(descriptor, path, _MODE, b"\1\1")  # or there would be a log beside the file
        _carry_out(path, statements, functions)
        write_at(descriptor, path, _MODE, mode)


def _mode(path: Path) -> bytes:
    with path.open("rb") as file:
        file.seek(_MODE)
        return file.read(2)


def _carry_out(
    path: Path, statements: Iterable[Statement], functions: Mapping[str, Function]
) -> None:
    address = f"{path.resolve().as_uri()}?mode=rw"
    with contextlib.closing(sqlite3.connect(address, uri=True, isolation_level=None)) as database:
        for setting in (
            "locking_mode = EXCLUSIVE", "journal_mode = OFF", "synchronous = OFF",
            "temp_store = MEMORY", f"cache_size = -{MEMORY_KIB}", "trusted_schema = OFF",
        ):  # fmt: skip
            database.execute(f"PRAGMA {setting}")
        for name, function in functions.items():
            database.create_function(name, -1, function, deterministic=True)
        database.set_authorizer(_authorized)
        for text, values in (("BEGIN", ()), *statements, ("COMMIT", ())):
            act("query", path, partial(_ask, database, text, values))


def _authorized(action: int, *_: str | None) -> int:
    return sqlite3.SQLITE_OK if action in _ALLOWED else sqlite3.SQLITE_DENY


def _ask(database: sqlite3.Connection, text: str, values: Values, _: int | None) -> None:
    try:
        database.execute(text, values)
    except sqlite3.OperationalError as error:
        for words, number in (("full", errno.ENOSPC), ("disk I/O", errno.EIO)):
            if words in str(error):
                raise OSError(number, str(error)) from None
        raise
