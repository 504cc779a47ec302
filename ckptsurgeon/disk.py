"""The only module that creates, writes, renames, truncates or removes anything on disk.

Each mutating call first passes `hook(operation, path, details)`, in the thread that makes the call:
that is where tests count calls, record them, and inject faults. A hook that returns a number
shortens the write that it was asked about. Every OSError that leaves here names its path.

Nothing here is durable by itself: data are durable after `fsync_file`, a name after
`fsync_directory` of its directory. No call follows a symbolic link in any part of the path that it
changes: each folder on the way is opened from the one above it (`_above`), so one that becomes a
link between the check and the call is an error. Callers resolve what a user named.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import stat
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from ckptsurgeon.spans import Spans, rows, windows

Hook = Callable[[str, str, Mapping[str, Any]], "int | None"]
T = TypeVar("T")

hook: Hook | None = None
changes = 0
"""How many calls were made so far: what was listed before the last one may no longer be true."""

INTERRUPTED_CALLS = 100
"""A call that EINTR breaks is made again, at most this often (FUSE and old NFS mounts do it)."""
COPY_AT_ONCE = 1 << 26
WRITTEN_AT_ONCE = 1 << 20
LONG = 4 << 20
"""Bytes of a row of spans that are written past the page cache."""
FICLONE = 0x40049409
FOLDER = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_CLOEXEC

_NO_DIRECTORY_FSYNC = (errno.EINVAL, errno.ENOTSUP)
_NO_KERNEL_COPY = (errno.EXDEV, errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EPERM)


def _act(operation: str, path: Path, call: Callable[[int | None], T], **details: Any) -> T:
    """Make one mutating call, numbered by the hook. `call` gets the hook's answer."""
    global changes
    changes += 1
    for attempt in range(INTERRUPTED_CALLS):
        try:
            return call(None if hook is None else hook(operation, str(path), details))
        except InterruptedError:
            if attempt == INTERRUPTED_CALLS - 1:
                raise
        except OSError as error:
            error.filename = str(path)
            raise
    raise AssertionError("unreachable")


@contextlib.contextmanager
def _above(path: Path) -> Iterator[tuple[str, int]]:
    """The last name in `path`, and the folder that it is in as a descriptor. Raises OSError with
    ENOTDIR if a part of the way is a symbolic link."""
    *folders, name = path.parts
    start = folders.pop(0) if path.is_absolute() and folders else "."
    descriptor = os.open(start, FOLDER)
    try:
        for folder in folders:
            inner = os.open(folder, FOLDER | os.O_NOFOLLOW, dir_fd=descriptor)
            os.close(descriptor)
            descriptor = inner
        yield name, descriptor
    finally:
        os.close(descriptor)


# --- names ---------------------------------------------------------------------------------------


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """An empty folder outside of every run, removed in the end with all that is in it."""
    with tempfile.TemporaryDirectory(prefix="ckptsurgeon-") as folder:
        yield Path(folder)


def make_directory(path: Path) -> None:
    """Create one directory. Raises FileExistsError or FileNotFoundError as mkdir(2) does."""

    def make(_: int | None) -> None:
        with _above(path) as (name, folder):
            owner = _owner(folder)
            os.mkdir(name, 0o777 if owner is None else 0o700, dir_fd=folder)
            if owner is not None:
                _give_folder(name, folder, owner)

    _act("make_directory", path, make)


def remove_directory(path: Path) -> None:
    """Remove one empty directory."""

    def remove(_: int | None) -> None:
        with _above(path) as (name, folder):
            os.rmdir(name, dir_fd=folder)

    _act("remove_directory", path, remove)


def remove_file(path: Path) -> None:
    """Remove one name of a file."""

    def remove(_: int | None) -> None:
        with _above(path) as (name, folder):
            os.unlink(name, dir_fd=folder)

    _act("remove_file", path, remove)


def rename(source: Path, target: Path) -> None:
    """rename(2): an existing target file is replaced in one step."""

    def move(_: int | None) -> None:
        with _above(source) as (old, here), _above(target) as (new, there):
            os.rename(old, new, src_dir_fd=here, dst_dir_fd=there)

    _act("rename", source, move, target=str(target))


def link(source: Path, target: Path) -> None:
    """A second name for `source` (for the link itself when it is symbolic)."""

    def add(_: int | None) -> None:
        with _above(source) as (old, here), _above(target) as (new, there):
            os.link(old, new, src_dir_fd=here, dst_dir_fd=there, follow_symlinks=False)

    _act("link", source, add, target=str(target))


def symlink(text: str, path: Path) -> None:
    """A symbolic link that says `text`."""

    def make(_: int | None) -> None:
        with _above(path) as (name, folder):
            os.symlink(text, name, dir_fd=folder)
            if (owner := _owner(folder)) is not None:
                _give_link(name, folder, owner, text)

    _act("symlink", path, make, text=text)


def fsync_directory(path: Path) -> None:
    """Make the names in `path` durable; a file system that has no such call is left to itself."""

    def sync(_: int | None) -> None:
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        with _above(path) as (name, folder):
            descriptor = os.open(name, flags, dir_fd=folder)
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno not in _NO_DIRECTORY_FSYNC:
                raise
        finally:
            os.close(descriptor)

    _act("fsync_directory", path, sync)


# --- bytes ---------------------------------------------------------------------------------------


@contextlib.contextmanager
def created(path: Path) -> Iterator[int]:
    """The descriptor of a new, empty file. Raises FileExistsError when the name is taken.

    What root makes in somebody else's folder is for root alone until it is made durable, or is
    closed: then it is given to the owner of the folder, unless it got other rights before."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC

    def create(_: int | None) -> int:
        with _above(path) as (name, folder):
            owner = _owner(folder)
            mode = 0o666 if owner is None else 0o600
            descriptor = os.open(name, flags, mode, dir_fd=folder)
            if owner is not None:
                _to_give[descriptor] = (owner, 0o666 & ~_umask())
            return descriptor

    descriptor = _act("create", path, create)
    try:
        yield descriptor
        _give(descriptor)
    finally:
        _to_give.pop(descriptor, None)
        os.close(descriptor)


@contextlib.contextmanager
def opened(path: Path) -> Iterator[int]:
    """The descriptor of an existing regular file, open for writing in place."""
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with _above(path) as (name, folder):
        descriptor = os.open(name, flags, dir_fd=folder)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        yield descriptor
    finally:
        os.close(descriptor)


def write_at(descriptor: int, path: Path, offset: int, data: bytes | memoryview) -> None:
    """Write all of `data` at `offset`, in as many calls as the kernel asks for."""
    view = memoryview(data)
    while view:
        rest = view

        def write(limit: int | None, rest: memoryview = rest, offset: int = offset) -> int:
            return os.pwrite(descriptor, rest if limit is None else rest[:limit], offset)

        count = _act("write", path, write, offset=offset, data=rest)
        if count == 0:
            raise OSError(errno.EIO, "nothing could be written", str(path))
        view = view[count:]
        offset += count


def write_each(descriptor: int, path: Path, data: bytes, spans: Spans, gap: int) -> None:
    """Write the bytes of `data`, one after the other, to the [start, end) of `spans`, which ascend.
    Zeros of up to `gap` bytes between two are written with them: an edit of 10,000 tensors has
    10,000 spans. A long row of spans goes past the page cache, where the file system allows that:
    its pages would cost more than all else does, and push out those of others."""
    rest = memoryview(data)
    room: memoryview | None = None  # of memory that a direct write can begin at
    for row in rows(spans, gap):
        if len(row) == 1:
            ((start, end),) = row
            size = end - start
            _write_alone(descriptor, path, start, rest[:size])
        else:
            size = sum(end - start for start, end in row)
            room = room or memoryview(mmap.mmap(-1, WRITTEN_AT_ONCE))
            _write_row(descriptor, path, rest[:size], row, room)
        rest = rest[size:]


def _write_row(
    descriptor: int,
    path: Path,
    data: memoryview,
    spans: Spans,
    room: memoryview,
) -> None:
    direct = spans[-1][1] - spans[0][0] >= LONG
    try:
        for start, window in windows(room, data, spans):
            if len(window) < len(room):  # the first or the last
                past_the_cache(descriptor, False)
            elif direct and (direct := past_the_cache(descriptor, True)):
                try:
                    write_at(descriptor, path, start, window)
                    continue
                except OSError as error:
                    if error.errno != errno.EINVAL:
                        raise
                direct = past_the_cache(descriptor, False)
            write_at(descriptor, path, start, window)
    finally:
        past_the_cache(descriptor, False)


def past_the_cache(descriptor: int, direct: bool) -> bool:
    """Have reads and writes go past the page cache, or through it; whether they go past it."""
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    wanted = flags | os.O_DIRECT if direct else flags & ~os.O_DIRECT
    if wanted != flags:
        try:
            fcntl.fcntl(descriptor, fcntl.F_SETFL, wanted)
        except OSError:  # a file system that has nothing but its cache
            return False
    return direct


def _write_alone(descriptor: int, path: Path, offset: int, data: memoryview) -> None:
    """As `write_at`; what nobody watches goes to the kernel at once, as there may be thousands."""
    try:
        count = os.pwrite(descriptor, data, offset) if hook is None else 0
    except OSError as error:
        error.filename = str(path)
        raise
    if count < len(data):
        write_at(descriptor, path, offset + count, data[count:])


def copy_at(descriptor: int, path: Path, offset: int, source: Path, start: int, end: int) -> None:
    """Copy bytes [start, end) of `source` to `offset`: inside the kernel where that is possible,
    so a file system with reflinks shares the blocks. A hole stays a hole. Raises OSError when
    `source` is shorter."""
    shift = offset - start
    origin = read_from(source, path)
    try:
        if os.fstat(origin).st_size < end:
            raise OSError(errno.EIO, f"ends before byte {end}", str(source))
        while start < end:
            start, stop = _data(origin, start, end)
            _copy(descriptor, path, shift, origin, source, start, stop)
            start = stop
    finally:
        os.close(origin)
    if os.fstat(descriptor).st_size < end + shift:
        truncate(descriptor, path, end + shift)


def read_from(source: Path, target: Path, flags: int = 0) -> int:
    """A descriptor to copy bytes of `source` by into `target`. Raises OSError unless it is a file,
    and for root where the copy would be of somebody who may not read the source: a name of his may
    lead to any file."""
    descriptor = os.open(source, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | flags)
    info = os.fstat(descriptor)
    reason = 0 if stat.S_ISREG(info.st_mode) else errno.EINVAL
    private = os.geteuid() == 0 and not info.st_mode & stat.S_IROTH
    if private and target.parent.stat().st_uid not in (0, info.st_uid):
        reason = errno.EACCES
    if reason:
        os.close(descriptor)
        raise OSError(reason, os.strerror(reason), str(source))
    return descriptor


def _data(origin: int, start: int, end: int) -> tuple[int, int]:
    """The first stretch of [start, end) that is not a hole; (end, end) when all of it is."""
    try:
        begin = min(os.lseek(origin, start, os.SEEK_DATA), end)
        return begin, min(os.lseek(origin, begin, os.SEEK_HOLE), end) if begin < end else end
    except OSError as error:
        if error.errno == errno.ENXIO:
            return end, end
        if error.errno in _NO_KERNEL_COPY:
            return start, end
        raise


def _copy(
    descriptor: int, path: Path, shift: int, origin: int, source: Path, start: int, end: int
) -> None:
    in_kernel = True
    while start < end:

        def copy(
            limit: int | None, start: int = start, end: int = end, in_kernel: bool = in_kernel
        ) -> int:
            count = min(end - start, COPY_AT_ONCE if limit is None else limit)
            if in_kernel:
                return os.copy_file_range(origin, descriptor, count, start, start + shift)
            data = os.pread(origin, min(count, 1 << 20), start)
            return os.pwrite(descriptor, data, start + shift)

        where = {"offset": start + shift, "source": str(source), "start": start, "end": end}
        try:
            count = _act("copy", path, copy, **where)
        except OSError as error:
            if not in_kernel or error.errno not in _NO_KERNEL_COPY:
                raise
            in_kernel = False
            continue
        if count == 0 and not in_kernel:
            raise OSError(errno.EIO, f"ends before byte {end}", str(source))
        in_kernel = in_kernel and count > 0  # network file systems may say 0 instead of an error
        start += count


def clone(descriptor: int, path: Path, source: Path) -> None:
    """Share all blocks of `source` with a new, empty file until one of them is written to. Raises
    OSError where the file system can't (FICLONE, ioctl_ficlonerange(2))."""
    origin = read_from(source, path)
    try:
        _act(
            "clone",
            path,
            lambda _: fcntl.ioctl(descriptor, FICLONE, origin),
            source=str(source),
        )
    finally:
        os.close(origin)


def write_new(path: Path, data: bytes) -> None:
    """A new file with these bytes, which are durable; its name is not until its directory is."""
    with created(path) as descriptor:
        write_at(descriptor, path, 0, data)
        fsync_file(descriptor, path)


def truncate(descriptor: int, path: Path, size: int) -> None:
    """Cut the file, or extend it with a hole, to `size` bytes."""
    _act("truncate", path, lambda _: os.ftruncate(descriptor, size), size=size)


def fsync_file(descriptor: int, path: Path) -> None:
    """Make data, size, times and rights of one file durable."""
    _give(descriptor)
    _act("fsync_file", path, lambda _: os.fsync(descriptor))


def fsync_data(descriptor: int, path: Path) -> None:
    """Make data and size of one file durable."""
    _act("fsync_data", path, lambda _: os.fdatasync(descriptor))


# --- times and rights ----------------------------------------------------------------------------


def set_times(path: Path, mtime_ns: int) -> None:
    """Set the modification time; the access time stays as it is. Only the owner of a file may: for
    anybody else who writes to it, both stay (EPERM of utimensat(2))."""

    def set(_: int | None) -> None:
        with _above(path) as (name, folder):
            access = os.stat(name, dir_fd=folder, follow_symlinks=False).st_atime_ns
            os.utime(name, ns=(access, mtime_ns), dir_fd=folder, follow_symlinks=False)

    try:
        _act("set_times", path, set, mtime_ns=mtime_ns)
    except OSError as error:
        if error.errno != errno.EPERM:
            raise


# What root makes in a folder of somebody else belongs to the folder's owner and group, who could
# not undo, nor prune, what is root's. It is given by its descriptor: by its name, the owner could
# have it be another file. Where root may not give (NFS), it stays root's.

_to_give: dict[int, tuple[os.stat_result, int]] = {}
"""Descriptors of new files that are still root's alone → the folder whose owner gets them, and the
mode that they get then."""


def _owner(folder: int) -> os.stat_result | None:
    """The folder, where what is made in it is to be given to its owner."""
    if os.geteuid() != 0:
        return None
    above = os.fstat(folder)
    return None if (above.st_uid, above.st_gid) == (0, 0) else above


def _give(descriptor: int) -> None:
    """Give a new file away, once."""
    if (given := _to_give.pop(descriptor, None)) is not None:
        owner, mode = given
        with contextlib.suppress(PermissionError):
            os.fchown(descriptor, owner.st_uid, owner.st_gid)
        os.fchmod(descriptor, mode)


def _give_folder(name: str, folder: int, owner: os.stat_result) -> None:
    """Give away the folder that was just made: it is root's alone, and empty."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(name, flags, dir_fd=folder)
    try:
        made = os.fstat(descriptor)
        ours = (made.st_uid, stat.S_IMODE(made.st_mode) & 0o777) == (0, 0o700)
        if ours and not any(os.scandir(descriptor)):
            with contextlib.suppress(PermissionError):
                os.fchown(descriptor, owner.st_uid, owner.st_gid)
            os.fchmod(descriptor, made.st_mode & stat.S_ISGID | 0o777 & ~_umask())
    finally:
        os.close(descriptor)


def _give_link(name: str, folder: int, owner: os.stat_result, text: str) -> None:
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


def _umask() -> int:
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
    _to_give.pop(descriptor, None)
    mine = os.fstat(descriptor)
    if (mine.st_uid, mine.st_gid) != (like.st_uid, like.st_gid):
        with contextlib.suppress(PermissionError):
            _act("set_owner", path, lambda _: os.fchown(descriptor, like.st_uid, like.st_gid))
    copy_mode(descriptor, path, like)


def copy_mode(descriptor: int, path: Path, like: os.stat_result) -> None:
    """Give a new file the mode of `like` alone."""
    mine, mode = os.fstat(descriptor), stat.S_IMODE(like.st_mode) & 0o777
    if descriptor in _to_give:
        _to_give[descriptor] = (_to_give[descriptor][0], mode)
    elif stat.S_IMODE(mine.st_mode) != mode:
        _act("set_mode", path, lambda _: os.fchmod(descriptor, mode), mode=mode)
