"""A small text file, such as a pointer: read without following a link or waiting for a writer."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path


def text(path: Path) -> str | None:
    """The first 4 KiB; None if there is no regular file of this name that can be read."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return None
        return os.read(descriptor, 4096).decode("utf-8", "replace")
    except OSError:
        return None
    finally:
        os.close(descriptor)


def number(path: Path) -> int | None:
    """The whole number that is all of its text; None for any other text, and without a file."""
    match = re.fullmatch(r"\d{1,18}", (text(path) or "").strip())
    return int(match[0]) if match else None
