"""A small text file, such as a pointer: read without following a link or waiting for a writer."""

from __future__ import annotations

import os
import re
from pathlib import Path

from ckptsurgeon import whole_file


def text(path: Path) -> str | None:
    """The first 4 KiB; None if there is no regular file of this name that can be read."""
    try:
        with whole_file.regular(path, follow=False) as descriptor:
            return os.read(descriptor, 4096).decode("utf-8", "replace")
    except OSError:
        return None


def number(path: Path) -> int | None:
    """The whole number that is all of its text; None for any other text, and without a file."""
    match = re.fullmatch(r"\d{1,18}", (text(path) or "").strip())
    return int(match[0]) if match else None
