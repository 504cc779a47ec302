"""What has a name: an error is no answer, and says neither that it is there nor that it is not.

`os.path.lexists` takes every error for "not there", and so does `Path.exists` from Python 3.14 on,
and `Path.glob` gives less of a folder that can't be listed from 3.13 on: where a server fails now
and then, a file that has to be removed would stay, one that has to take its name would not, and
half of a step's shards would be edited.
"""

from __future__ import annotations

import errno
import fnmatch
import os
import re
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

from ckptsurgeon.disk.calls import INTERRUPTED_CALLS

_WILD = re.compile(r"[*?[]")
_NOWHERE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG)


def is_there(path: Path | str) -> bool:
    """Whether there is such a name, be it that of a link which leads nowhere. Raises OSError."""
    return _mode(os.lstat, path) != 0


def exists(path: Path | str) -> bool:
    """Whether there is such a name, and of a link what it leads to. Raises OSError."""
    return _mode(os.stat, path) != 0


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
        if not _has_none(error, past_closed):
            raise error

    return os.walk(folder, onerror=refused)


def below(folder: Path, *, past_closed: bool = False) -> Iterator[Path]:
    """All that is in a folder, at any depth, but for what links lead to; nothing of one that is not
    there. Raises OSError as `walk` does."""
    for parent, folders, files in walk(folder, past_closed=past_closed):
        yield from (Path(parent) / name for name in (*folders, *files))


def matching(folder: Path, pattern: str, *, past_closed: bool = False) -> Iterator[Path]:
    """The paths below a folder that a pattern names, ascending: of its parts each is a name, in
    which `*` stands for any text. Raises OSError as `walk` does; of a folder that is not there
    nothing has such a name."""
    first, _, rest = pattern.partition("/")
    try:
        names = _named(folder, first)
    except OSError as error:
        if not _has_none(error, past_closed):
            raise
        return
    for path in (folder / name for name in names):
        if not rest:
            yield path
        elif is_folder(path):
            yield from matching(path, rest, past_closed=past_closed)


def _named(folder: Path, part: str) -> list[str]:
    if not _WILD.search(part):
        return [part] if is_there(folder / part) else []
    return sorted(fnmatch.filter((path.name for path in folder.iterdir()), part))


def names_in(folder: Path) -> list[str]:
    """The names in a folder, ascending: none in one that is not there, or that this user may not
    list. Raises OSError for any other reason."""
    try:
        return sorted(path.name for path in folder.iterdir())
    except OSError as error:
        if _has_none(error, past_closed=True):
            return []
        raise


def _has_none(error: OSError, past_closed: bool) -> bool:
    """Whether a folder that can't be listed for this reason counts as one with nothing in it."""
    closed = past_closed and isinstance(error, PermissionError)
    return closed or error.errno in _NOWHERE


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
