"""A SQLite database that is only read: nothing comes to lie beside it, and no lock is taken."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from ckptsurgeon.errors import DamagedFile

HEADER = b"SQLite format 3\0"


def is_database(path: Path) -> bool:
    """Whether a file has the header of one; an empty one has none yet."""
    try:
        with path.open("rb") as file:  # in a mirror this fetches it
            return file.read(len(HEADER)) == HEADER
    except OSError:
        return False


@contextlib.contextmanager
def opened(path: Path) -> Iterator[sqlite3.Connection]:
    """The database as the file has it: what only a log beside it (WAL) has is not seen. Raises
    DamagedFile for one that can't be read."""
    address = f"{path.resolve().as_uri()}?mode=ro&immutable=1"
    try:
        with contextlib.closing(sqlite3.connect(address, uri=True)) as database:
            database.execute("PRAGMA trusted_schema = OFF")
            yield database
    except sqlite3.DatabaseError as error:
        raise DamagedFile(str(path), 0, f"SQLite can't read it: {error}") from error


def columns(database: sqlite3.Connection, table: str) -> list[str]:
    """The names of the columns of a table; none where it is not there."""
    rows = database.execute("SELECT name FROM pragma_table_info(?)", (table,))
    return [str(name) for (name,) in rows]
