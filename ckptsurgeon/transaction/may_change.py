"""Whether this user, or anybody, may change what a plan changes: rights, mounts and flags. Reads
only; every check raises SurgeryError."""

from __future__ import annotations

import array
import contextlib
import fcntl
import os
import sys
from pathlib import Path

from ckptsurgeon import disk
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.hints import shell

RIGHTS = "run as the user who owns the run, or change its permissions"

GETFLAGS = 0x80006601 | array.array("l", [0]).itemsize << 16
"""FS_IOC_GETFLAGS: _IOR('f', 1, long)."""
HELD = {"immutable": 0x10, "append-only": 0x20}
"""FS_IMMUTABLE_FL, FS_APPEND_FL."""


def read_only(path: Path) -> SurgeryError | None:
    """The refusal to write to `path` if it is on a file system where nobody may."""
    if not os.statvfs(existing(path)).f_flag & os.ST_RDONLY:
        return None
    return SurgeryError(
        f"{path} is on a file system that is mounted read-only",
        next=(
            shell(["findmnt", "--target", path], why="which one, and how it is mounted"),
            "mount it for writing, then run the same command again; after an error the kernel "
            "makes it read-only by itself (dmesg)",
        ),
    )


def check_rename(root: Path, source: str, target: str) -> None:
    """Both names lie on one mount, in directories that this user may change. A rename does not
    cross mounts, not even two of one file system; after the commit point it would be too late."""
    folders = [existing((root / name).parent) for name in (source, target)]
    moved = root / source
    # A folder that gets another parent is written to as well: its `..` changes.
    entered = [moved] if disk.is_folder(moved) and not disk.is_link(moved) else []
    for folder in [*folders, *entered]:
        if not os.access(folder, os.W_OK | os.X_OK, effective_ids=True):
            why = f"{folder}: this user may not write here"
            raise read_only(folder) or SurgeryError(why, next=RIGHTS)
    if _mount(folders[0]) != _mount(folders[1]):
        raise SurgeryError(
            f"{root / source} and {root / target} are on different file systems, "
            "so a rename is impossible",
            next="put the attic and the run on one file system",
        )


def _mount(folder: Path) -> tuple[str, int]:
    """The mount and the device that a directory lies on."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        device = os.fstat(descriptor).st_dev
        text = Path(f"/proc/self/fdinfo/{descriptor}").read_text(encoding="ascii")
    except OSError:  # no /proc: the device must do
        text = ""
    finally:
        os.close(descriptor)
    return next((line for line in text.splitlines() if line.startswith("mnt_id:")), ""), device


def existing(path: Path) -> Path:
    """`path`, or its nearest parent that exists. Below a folder that may not be searched nothing
    does, as far as this user may know."""
    with contextlib.suppress(PermissionError):
        if disk.is_there(path):
            return path
    return existing(path.parent)


def check_flags(path: Path) -> None:
    """Raise when the file system lets nobody rename or replace it, not even its owner or root
    (chattr +i and +a, ioctl_iflags(2)): the rights do not say so. In an append-only folder names
    may come but not go. Where the file system has no such flags there are none."""
    more = os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        descriptor = os.open(path, os.O_RDONLY | more)
    except OSError:  # a link, or a file that may not be read
        return
    try:
        room = bytearray(array.array("l", [0]).itemsize)
        fcntl.ioctl(descriptor, GETFLAGS, room)
    except OSError:
        return
    finally:
        os.close(descriptor)
    held = [name for name, bit in HELD.items() if int.from_bytes(room[:4], sys.byteorder) & bit]
    if held:
        raise SurgeryError(
            f"{path} is {held[0]}: nobody may replace or rename it",
            next=shell(["chattr", "-ia", path], why="as root; then the same command again"),
        )
