"""A small text file, such as a pointer: read without following a link or waiting for a writer."""

from __future__ import annotations

import os
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
