"""What a file is, by its first bytes: trainers call theirs what they like."""

from __future__ import annotations

import os
import re
from pathlib import Path

from ckptsurgeon import whole_file

ZIP, FIXED = b"PK\x03\x04", 30
"""What a record of a zip begins with, and the bytes before its name."""
LEGACY = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."
"""The pickle that a file of the format before torch 1.6 begins with: its magic number."""
CONTROL = re.compile(rb"[\x00-\x08\x0e-\x1f]")
"""Bytes that no text has."""
HEAD = 512


def begins_as_torch(path: Path) -> bool:
    """Whether it begins as one of torch.save: with its magic number, or with a zip's record of the
    pickle. False for what can't be read."""
    head = _head(path)
    if not head.startswith(ZIP):
        return head.startswith(LEGACY)
    name = head[FIXED : FIXED + int.from_bytes(head[26:28], "little")]
    return name.endswith(b"/data.pkl")


def begins_as_text(path: Path) -> bool:
    """Whether it begins as a text; False for what is empty or can't be read."""
    head = _head(path)
    return bool(head) and CONTROL.search(head) is None


def _head(path: Path) -> bytes:
    try:
        with whole_file.regular(path) as descriptor:
            return os.read(descriptor, HEAD)
    except OSError:
        return b""
