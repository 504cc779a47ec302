"""As whom a surgery works: in a run of somebody else, root works as its owner.

So no name in the run, whatever it leads to, has root read or write what the owner may not. The
whole process has these rights meanwhile, each of its threads.
"""

from __future__ import annotations

import codecs
import contextlib
import os
import pwd
from collections.abc import Iterable, Iterator
from pathlib import Path

from ckptsurgeon import disk
from ckptsurgeon.transaction.home import HOME


def worker(root: Path, names: Iterable[str]) -> str:
    """As whom root edits these files of the run, if that needs to be said."""
    run, other = _owners(root, names)
    if run is None:
        return ""
    if other is None:
        return f"works as {user_name(run.st_uid)}, who owns the run"
    return (
        f"works as root: {other} belongs to {user_name(other.lstat().st_uid)}, the run to "
        f"{user_name(run.st_uid)}"
    )


@contextlib.contextmanager
def as_owner(root: Path, names: Iterable[str]) -> Iterator[None]:
    """Work as the owner of the run, where this is root and all that `names` lead to is that
    owner's, as are the folders on the way; else, and where the system does not let root (a
    container without that right), as before."""
    run, other = _owners(root, names)
    if run is None or other is not None:
        yield
        return
    _load_what_comes_later()
    groups, group = os.getgroups(), os.getegid()
    try:
        with contextlib.suppress(OSError):
            os.setgroups(_groups(run.st_uid, run.st_gid))
            os.setegid(run.st_gid)
            os.seteuid(run.st_uid)
        yield
    finally:
        os.seteuid(0)
        os.setegid(group)
        os.setgroups(groups)


def _load_what_comes_later() -> None:
    """Import what a surgery imports once it needs it: root's Python may be where no other user can
    read it."""
    import concurrent.futures.thread  # noqa: F401

    codecs.lookup("ascii")


def _owners(root: Path, names: Iterable[str]) -> tuple[os.stat_result | None, Path | None]:
    """The run's folder, where this is root and it is somebody else's; and the first of the files
    and of the folders on the way that is not that owner's."""
    if os.geteuid() != 0:
        return None, None
    run = root.stat()
    if run.st_uid == 0:
        return None, None
    seen: set[Path] = set()
    for name in (HOME, *names):
        path = root / name
        way = [path, *(root / folder for folder in Path(name).parents if folder.name != "..")]
        for each in way:
            if each not in seen:
                seen.add(each)
                if disk.is_there(each) and each.lstat().st_uid != run.st_uid:
                    return run, each
    return run, None


def _groups(user: int, group: int) -> list[int]:
    try:
        return os.getgrouplist(pwd.getpwuid(user).pw_name, group)
    except KeyError:
        return [group]


def user_name(user: int) -> str:
    """By the user database; of one that it lacks the number."""
    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return f"user {user}"
