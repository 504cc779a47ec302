"""A new state of a SQLite database, as what is to be done to a copy of the old one."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeAlias

from ckptsurgeon.plans.frozen import frozen

Values: TypeAlias = tuple[str | int | float | None, ...]
Statement: TypeAlias = tuple[str, Values]
"""A statement of SQL and the values for its question marks."""


@frozen
class Queries:
    """A copy of the database `file` in which these statements were carried out, where a `Content`
    would be bytes: which pages they change is known only then. `size` is what it takes at most,
    about."""

    file: str
    statements: tuple[Statement, ...]
    size: int

    def then(self, more: Queries) -> Queries:
        """With what else is to be done to the same file."""
        statements = (*self.statements, *more.statements)
        return replace(self, statements=statements, size=max(self.size, more.size))
