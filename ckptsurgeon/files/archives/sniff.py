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
HDF5 = b"\x89HDF\r\n\x1a\n"
LLM_C = (20240527).to_bytes(4, "little")
"""The first number of llm.c's `state_<step>_<rank>.bin`."""
FIRST = {b"data": "Stable-Baselines3", b"metadata.json": "Keras"}
"""The first record of a zip → whose it is, of those that torch did not write."""


def begins_as_torch(path: Path) -> bool:
    """Whether it begins as one of torch.save: with its magic number, or with a zip's record of the
    pickle. False for what can't be read."""
    head = _head(path)
    if not head.startswith(ZIP):
        return head.startswith(LEGACY)
    return _first(head).endswith(b"/data.pkl")


def another(path: Path) -> str:
    """The library that saves files which begin so, other than torch; "" where that is not known."""
    head = _head(path)
    if head.startswith(ZIP):
        return FIRST.get(_first(head), "")
    if head.startswith(LLM_C):
        return "llm.c"
    return "Keras" if head.startswith(HDF5) else ""


def _first(zipped: bytes) -> bytes:
    """The name of the first record."""
    return zipped[FIXED : FIXED + int.from_bytes(zipped[26:28], "little")]


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
