"""One mutating call: it is numbered, made again where EINTR breaks it, and its error has a path.

Each first passes `hook(operation, path, details)`, in the thread that makes the call: that is where
tests count calls, record them, and inject faults. A hook that returns a number shortens the write
that it was asked about.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

Hook = Callable[[str, str, Mapping[str, Any]], "int | None"]
T = TypeVar("T")

hook: Hook | None = None
made = 0
"""How many calls were made so far: what was listed before the last one may no longer be true."""

INTERRUPTED_CALLS = 100
"""A call that EINTR breaks is made again, at most this often (FUSE and old NFS mounts do it)."""


def act(operation: str, path: Path, call: Callable[[int | None], T], **details: Any) -> T:
    """Make one mutating call, numbered by the hook. `call` gets the hook's answer."""
    global made
    made += 1
    for attempt in range(INTERRUPTED_CALLS):
        try:
            return call(None if hook is None else hook(operation, str(path), details))
        except InterruptedError:
            if attempt == INTERRUPTED_CALLS - 1:
                raise
        except OSError as error:
            error.filename = str(path)
            raise
    raise AssertionError("unreachable")
