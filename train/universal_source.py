"""Which checkpoint a universal one was made from, and whether it still is what it was."""

from __future__ import annotations

import json
from pathlib import Path

from .errors import TrainError

SUFFIX = "_universal"
SOURCE = "source.json"


def find_universal(checkpoint: Path) -> Path:
    """The converted form of a checkpoint. Raises TrainError when there is none, or an older one:
    an edit made since would be lost in silence."""
    folder = checkpoint.with_name(checkpoint.name + SUFFIX)
    again = "python -m train universal --config …"
    if not (folder / SOURCE).is_file():
        raise TrainError(f"{folder}: no universal form of {checkpoint.name} here", next=again)
    if json.loads((folder / SOURCE).read_text()) != fingerprint(checkpoint):
        raise TrainError(
            f"{folder}: {checkpoint.name} has changed since it was converted",
            next=again,
            untouched="both are as they were",
        )
    return folder


def is_universal(checkpoint: Path) -> bool:
    """By the name of the folder."""
    return checkpoint.name.endswith(SUFFIX)


def fingerprint(checkpoint: Path) -> dict[str, list[int]]:
    """Size and time of every file."""
    found = {path.name: path.stat() for path in sorted(checkpoint.iterdir())}
    return {name: [entry.st_size, entry.st_mtime_ns] for name, entry in found.items()}
