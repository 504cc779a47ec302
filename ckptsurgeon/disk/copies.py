"""Bytes of one file copied into another, by the kernel where it can: it shares the blocks where the
file system does.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Iterable
from pathlib import Path

from ckptsurgeon.disk.calls import act
from ckptsurgeon.disk.files import truncate

COPY_AT_ONCE = 1 << 26
FICLONE = 0x40049409

_NO_KERNEL_COPY = (errno.EXDEV, errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EPERM)


def copy_at(descriptor: int, path: Path, offset: int, source: Path, start: int, end: int) -> None:
    """Copy bytes [start, end) of `source` to `offset`: inside the kernel where that is possible,
    so a file system with reflinks shares the blocks. A hole stays a hole. Raises OSError when
    `source` is shorter."""
    copy_each(descriptor, path, source, [(offset, start, end)])
    if os.fstat(descriptor).st_size < offset + end - start:
        truncate(descriptor, path, offset + end - start)


def copy_each(
    descriptor: int, path: Path, source: Path, spans: Iterable[tuple[int, int, int]]
) -> None:
    """The same for each (offset, start, end), but for the size of the file where a hole is last.
    `source` is opened once."""
    origin = read_from(source, path)
    try:
        size = os.fstat(origin).st_size
        for offset, start, end in spans:
            shift = offset - start
            if size < end:
                raise OSError(errno.EIO, f"ends before byte {end}", str(source))
            while start < end:
                start, stop = _data(origin, start, end)
                _copy(descriptor, path, shift, origin, source, start, stop)
                start = stop
    finally:
        os.close(origin)


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
            count = act("copy", path, copy, **where)
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
        act(
            "clone",
            path,
            lambda _: fcntl.ioctl(descriptor, FICLONE, origin),
            source=str(source),
        )
    finally:
        os.close(origin)
