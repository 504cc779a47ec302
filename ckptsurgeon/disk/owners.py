"""Whose a new file is, and what rights it gets.

What root makes in a folder of somebody else belongs to the folder's owner and group, who could not
undo, nor prune, what is root's. It is given by its descriptor: by its name, the owner could have it
be another file. Where root may not give (NFS), it stays root's.
"""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

from ckptsurgeon.disk.calls import act

to_give: dict[int, tuple[os.stat_result, int]] = {}
"""Descriptors of new files that are still root's alone → the folder whose owner gets them, and the
mode that they get then."""


def owner_of(folder: int) -> os.stat_result | None:
    """The status of the folder, where what is made in it is to be given to its owner."""
    if os.geteuid() != 0:
        return None
    above = os.fstat(folder)
    return None if (above.st_uid, above.st_gid) == (0, 0) else above


def give(descriptor: int) -> None:
    """Give a new file away, once."""
    if (given := to_give.pop(descriptor, None)) is not None:
        owner, mode = given
        with contextlib.suppress(PermissionError):
            os.fchown(descriptor, owner.st_uid, owner.st_gid)
        os.fchmod(descriptor, mode)


def give_folder(name: str, folder: int, owner: os.stat_result) -> None:
    """Give away the folder that was just made: it is root's alone, and empty."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(name, flags, dir_fd=folder)
    try:
        made = os.fstat(descriptor)
        ours = (made.st_uid, stat.S_IMODE(made.st_mode) & 0o777) == (0, 0o700)
        if ours and not any(os.scandir(descriptor)):
            with contextlib.suppress(PermissionError):
                os.fchown(descriptor, owner.st_uid, owner.st_gid)
            os.fchmod(descriptor, made.st_mode & stat.S_ISGID | 0o777 & ~umask())
    finally:
        os.close(descriptor)


def give_link(name: str, folder: int, owner: os.stat_result, text: str) -> None:
    """Give away the link that was just made. A link has no rights that matter: where /proc does not
    lead to it, it stays root's."""
    flags = os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(name, getattr(os, "O_PATH", os.O_RDONLY) | flags, dir_fd=folder)
    try:
        if os.readlink("", dir_fd=descriptor) == text:
            with contextlib.suppress(OSError):
                os.chown(f"/proc/self/fd/{descriptor}", owner.st_uid, owner.st_gid)
    finally:
        os.close(descriptor)


def umask() -> int:
    """That of this process: to ask for it by umask(2) would change it for other threads."""
    try:
        for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
            if line.startswith("Umask:"):
                return int(line.split()[1], 8)
    except OSError:
        pass
    return 0o022


def copy_rights(descriptor: int, path: Path, like: os.stat_result) -> None:
    """Give a new file the rights of `like`, and its owner and group where this user may; no bit
    that lends them to whoever runs it.

    Without it, a pointer that root replaced could no longer be written by the trainer."""
    to_give.pop(descriptor, None)
    mine = os.fstat(descriptor)
    if (mine.st_uid, mine.st_gid) != (like.st_uid, like.st_gid):
        with contextlib.suppress(PermissionError):
            act("set_owner", path, lambda _: os.fchown(descriptor, like.st_uid, like.st_gid))
    copy_mode(descriptor, path, like)


def copy_mode(descriptor: int, path: Path, like: os.stat_result) -> None:
    """Give a new file the mode of `like` alone."""
    mine, mode = os.fstat(descriptor), stat.S_IMODE(like.st_mode) & 0o777
    if descriptor in to_give:
        to_give[descriptor] = (to_give[descriptor][0], mode)
    elif stat.S_IMODE(mine.st_mode) != mode:
        act("set_mode", path, lambda _: os.fchmod(descriptor, mode), mode=mode)
