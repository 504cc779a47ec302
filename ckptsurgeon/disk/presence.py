"""What has a name: an error is no answer, and says neither that it is there nor that it is not.

`os.path.lexists` takes every error for "not there", and so does `Path.exists` from Python 3.14 on:
where a server fails now and then, a file that has to be removed would stay, and one that has to
take its name would not.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

from ckptsurgeon.disk.calls import INTERRUPTED_CALLS

_NOWHERE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG)


def is_there(path: Path | str) -> bool:
    """Whether there is such a name, be it that of a link which leads nowhere. Raises OSError."""
    return _mode(os.lstat, path) != 0


def is_folder(path: Path | str) -> bool:
    """Whether it is a folder, or a link to one. Raises OSError."""
    return stat.S_ISDIR(_mode(os.stat, path))


def is_file(path: Path | str) -> bool:
    """Whether it is a regular file, or a link to one. Raises OSError."""
    return stat.S_ISREG(_mode(os.stat, path))


def is_link(path: Path | str) -> bool:
    """Whether it is a symbolic link. Raises OSError."""
    return stat.S_ISLNK(_mode(os.lstat, path))


def walk(folder: Path, *, past_closed: bool = False) -> Iterator[tuple[str, list[str], list[str]]]:
    """What `os.walk` gives of a folder. Raises OSError for one in it that can't be listed, where
    that would give the others alone; with `past_closed` not for one that this user may not list.
    What is not there has nothing in it."""

    def refused(error: OSError) -> None:
        closed = past_closed and isinstance(error, PermissionError)
        if not closed and error.errno not in _NOWHERE:
            raise error

    return os.walk(folder, onerror=refused)


def names_in(folder: Path) -> list[str]:
    """The names in a folder, ascending: none in one that is not there, or that this user may not
    list. Raises OSError for any other reason."""
    try:
        return sorted(path.name for path in folder.iterdir())
    except PermissionError:
        return []
    except OSError as error:
        if error.errno in _NOWHERE:
            return []
        raise


def _mode(ask: Callable[[Path | str], os.stat_result], path: Path | str) -> int:
    """0 where nothing has the name. A call that EINTR breaks is made again."""
    for attempt in range(INTERRUPTED_CALLS):
        try:
            return ask(path).st_mode
        except InterruptedError:
            if attempt == INTERRUPTED_CALLS - 1:
                raise
        except OSError as error:
            if error.errno in _NOWHERE:
                return 0
            raise
        except ValueError:  # no name has a zero byte
            return 0
    raise AssertionError("unreachable")
