"""Evidence that a file is still being written to: processes, leases and times. Reads only."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import socket
import time
from pathlib import Path

FLUSH_S = 120
"""Seconds after which torch's writer has flushed what it holds."""
AHEAD_S = 3600
"""Seconds by which the clock of another host, or of a file server, may be ahead of this one's."""
MOUNTS = Path("/proc/self/mountinfo")
REMOTE = ("nfs", "nfs4", "cifs", "smb3")
EVENT_WRITER = re.compile(r"tfevents\.(?P<born>\d+)\.(?P<host>.+)\.(?P<pid>\d+)\.\d+")


def written(item: Path) -> str | None:
    """Why an event file may still be written to, or None.

    Its writer's process is alive here; or somebody here has it open for writing (a read lease is
    refused then, fcntl(2)); or it came from another host and grew within the flush interval."""
    match = EVENT_WRITER.search(item.name)
    host = match["host"] if match else None
    if match and host == socket.gethostname():
        pid = int(match["pid"])
        if pid != os.getpid() and _born_before(pid, int(match["born"])):
            return f"its writer, process {pid}, is running"
    elif host is not None and (told := fresh(item.stat().st_mtime)):
        return f"written from {host} {told}; it must be quiet for {FLUSH_S} s"
    return "somebody has it open for writing" if is_open(item) else None


def fresh(moment: float) -> str:
    """How long ago a file was written to, if it may have been within the flush interval, else the
    empty text. The time may be by a clock that is ahead of this host's."""
    age = time.time() - moment
    if not -AHEAD_S <= age < FLUSH_S:
        return ""
    return f"{age:.0f} s ago" if age >= 0 else f"{-age:.0f} s ahead of this host's clock"


def is_open(item: Path) -> bool:
    """Whether anybody on this host has the file open for writing: a read lease is refused then,
    fcntl(2). On a network file system one is also refused where the server has delegated nothing
    (`nfs4_add_lease`, `cifs_setlease` in Linux), so there it is no evidence."""
    descriptor = os.open(item, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a FIFO must not wait
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except OSError as error:
        return error.errno == errno.EAGAIN and _file_system(descriptor) not in REMOTE
    finally:
        os.close(descriptor)
    return False


def _file_system(descriptor: int) -> str:
    """The kind of the mount that an open file is on (proc(5)); empty where /proc does not say."""
    with contextlib.suppress(OSError, ValueError):
        told = Path(f"/proc/self/fdinfo/{descriptor}").read_text("ascii").split()
        mount = told[told.index("mnt_id:") + 1]
        for line in MOUNTS.read_text("utf-8", "surrogateescape").splitlines():
            if line.startswith(f"{mount} "):
                return line.partition(" - ")[2].split()[0]
    return ""


def ticks(pid: int) -> int | None:
    """Start time of a process in clock ticks since boot (proc(5), stat field 22)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text("ascii", "replace")
    except OSError:
        return None
    return int(stat.rsplit(")", 1)[1].split()[19])


def _born_before(pid: int, moment: int) -> bool:
    """Whether `pid` is alive and was started before `moment` (Unix time), so that it can have
    made a file then: a number that was given anew since is no evidence."""
    began = ticks(pid)
    if began is None:
        return False
    boot = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    return boot + began / os.sysconf("SC_CLK_TCK") <= moment + 2
