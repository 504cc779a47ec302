"""Whether a plan fits on the file systems that it writes to. Reads only."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Collection, Iterable
from pathlib import Path

from ckptsurgeon import disk
from ckptsurgeon.errors import SurgeryError, count
from ckptsurgeon.hints import Hint, command
from ckptsurgeon.plans.edits import Append, Edit, Move, Replace
from ckptsurgeon.transaction.may_change import existing

BLOCK = 4096
"""Bytes that a file system gives out at once, nearly everywhere: a write between two holes takes
as much."""
MAKE_ROOM: tuple[Hint, ...] = (
    "free some space, then run the same command again",
    command("prune", "--dry-run", why="how much past surgeries keep in the attic"),
)
"""What to do about a full disk."""
MARGIN = 1.05
"""Free space and inodes that a plan asks for: 5 % more than it counts."""


def refuse_full(root: Path, edits: Iterable[Edit], home: str, there: Collection[str] = ()) -> None:
    """Check that the whole plan fits, on each file system that it writes to: bytes and inodes. What
    is `there` of an earlier attempt has its room."""
    files: dict[Path, list[int]] = defaultdict(list)
    at_home = existing(root / home)
    there_now = {name for name in there if disk.is_there(root / name)}
    for edit in edits:
        if isinstance(edit, Append):
            blocks = sum(end // BLOCK - start // BLOCK + 1 for start, end in edit.runs)
            files[(root / edit.file).parent].append(blocks * BLOCK)
            files[at_home].append(len(edit.data))
        elif isinstance(edit, (Move, Replace)) and edit.content is not None:
            staged = edit.src if isinstance(edit, Move) else edit.staged
            used = (root / staged).lstat().st_blocks * 512 if staged in there_now else 0
            files[existing(root / staged)].append(max(0, edit.content.size - used))
    files[at_home] += [0] * 8  # lock, journals, records and their directories
    devices: dict[int, tuple[Path, list[int]]] = {}
    for folder, sizes in files.items():
        devices.setdefault(folder.stat().st_dev, (folder, []))[1].extend(sizes)
    for folder, sizes in devices.values():
        _check_free(folder, sizes)


def _check_free(folder: Path, sizes: list[int]) -> None:
    room = os.statvfs(folder)
    block = room.f_frsize or 4096
    needed = int(sum(size // block + 1 for size in sizes) * block * MARGIN)
    free = room.f_bavail * block
    if needed > free:
        raise SurgeryError(
            f"{folder}: the plan needs {count(needed, 'byte', spec=',')} of free space, and there "
            f"are {free:,} (its journal and whole blocks count)",
            next=MAKE_ROOM,
        )
    # One for each file, and one for a new directory of its own. Some file systems count none, and
    # rclone's mount says that all are taken: where that is so, the first file is refused.
    inodes = int(2 * len(sizes) * MARGIN)
    if inodes > room.f_favail > 0:
        raise SurgeryError(
            f"{folder}: the plan needs {count(inodes, 'free inode', spec=',')}, and there are "
            f"{room.f_favail:,}",
            next="remove some files, then run the same command again",
        )
