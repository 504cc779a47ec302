"""Evidence that a trainer still writes to a run: processes, leases and times. Reads only."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import signal
import stat
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from ckptsurgeon import disk, whole_file
from ckptsurgeon.disk import mount
from ckptsurgeon.formats import Format
from ckptsurgeon.formats.step_folders import files_below
from ckptsurgeon.hints import Hint, shell
from ckptsurgeon.plans.edits import relative
from ckptsurgeon.remote import reads
from ckptsurgeon.run import slurm_job
from ckptsurgeon.transaction import process
from ckptsurgeon.transaction.home import EVENTS, HOME, NOTE, RECEIPTS
from ckptsurgeon.workers import side_by_side

FLUSH_S = 120
"""Seconds after which torch's writer has flushed what it holds."""
AHEAD_S = 3600
"""Seconds by which the clock of another host, or of a file server, may be ahead of this one's."""
RECORD = "trainer.pid"
"""What the bundled trainer says of its process."""
MAX_RECORD = 1 << 16
"""Bytes of it."""
REMOTE = ("nfs", "nfs4", "cifs", "smb3")
EVENT_WRITER = re.compile(rf"{EVENTS}\.(?P<born>\d+)\.(?P<host>.+)\.(?P<pid>\d+)\.\d+")


def evidence(
    root: Path, format: Format, logs: Iterable[Path], pointers: Mapping[str, int | None]
) -> list[str]:
    """Why somebody may be writing to the run at `root` now, a sentence for each sign.

    Signs are the bundled trainer's `trainer.pid`, event files (`logs`) that may still be written
    to, and a step that is being saved. Another host's trainer can't be seen from here, only what it
    writes, and its SLURM job."""
    signs = _trainer(root / RECORD)
    for item in logs:
        sign = written(item, root) if disk.is_file(item) else None
        if sign:
            signs.append(f"{relative(item, root)}: {sign}")
    return signs + _saving(root, format, pointers)


def end_it(root: Path, alive: str) -> list[Hint]:
    """What to do about a trainer that is `alive`: the bundled one saves and ends when it is told
    to."""
    own = recorded(root) if RECORD in alive else None
    kill = [] if own is None else [shell(["kill", own[0]], why="it saves a step, and ends")]
    return [*kill, "stop the trainer, wait until it is gone, then repeat the command"]


def recorded(root: Path) -> tuple[int, int] | None:
    """Number and start of the process of this host that the bundled trainer's record names."""
    pid, ticks, host, _ = _record(root / RECORD) or (0, 0, "", None)
    return (pid, ticks) if pid > 0 and host == os.uname().nodename else None


def _record(record: Path) -> tuple[int, int, str, object] | None:
    try:
        data = json.loads(whole_file.read(record, MAX_RECORD))
        return (
            int(data["pid"]), int(data["start_time"]), str(data["host"]), data.get("slurm_job")
        )  # fmt: skip
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None


def _trainer(record: Path) -> list[str]:
    """The process that the bundled trainer's record names, if it runs on this host; of another host
    its SLURM job, if that runs."""
    pid, ticks, host, job = _record(record) or (0, 0, "", None)
    if not host:
        return []
    if host == os.uname().nodename:
        running = process.start(pid) == ticks
        return [f"{record.name}: process {pid} is running"] if running else []
    state = slurm_job.running(job)
    return [f"{record.name}: its job {job} is {state}, squeue says"] if state else []


def _saving(root: Path, format: Format, pointers: Mapping[str, int | None]) -> list[str]:
    """A shard of the newest steps that somebody here has open, or a step beyond every pointer that
    was written to a moment ago, and after them."""
    named = [step for step in pointers.values() if step is not None]
    if not named:
        return []
    files = [file for name in pointers for file in _written(root / name)]
    pointed = max((file.stat().st_mtime for file in files), default=0.0)

    def sign(item: Path, newer: bool) -> str:
        try:
            descriptor = reads.opened(item, os.O_NONBLOCK | os.O_NOFOLLOW)
        except FileNotFoundError:  # a trainer that cleans up
            return ""
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENXIO):  # a link, a socket
                return ""
            raise
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                return ""
            if _is_written(descriptor):
                return "somebody has it open for writing"
        finally:
            os.close(descriptor)
        saved = status.st_mtime
        if newer and saved > pointed and (ago := fresh(saved)):
            return (
                f"written {ago} and newer than what the pointers name: a trainer may be saving it; "
                f"it must be quiet for {FLUSH_S} s"
            )
        return ""

    newest = max(named)
    steps = [step for step in format.steps(root) if step >= newest]
    items = [(item, step > newest) for step in steps for item in format.files(root, step)]
    signs = side_by_side(lambda each: sign(*each), items)
    return [
        f"{relative(item, root)}: {why}" for (item, _), why in zip(items, signs, strict=True) if why
    ]


def _written(pointer: Path) -> list[Path]:
    """What a save writes of a pointer: the file, or those in a folder that is a copy of a step."""
    return [
        p
        for p in (files_below(pointer) if disk.is_folder(pointer) else [pointer])
        if disk.is_file(p)
    ]


def written(item: Path, root: Path) -> str | None:
    """Why a log of the run at `root` may still be written to, or None.

    Its writer's process is alive here; or somebody here has it open for writing (a read lease is
    refused then, fcntl(2)); or it came from another host and grew within the flush interval; or it
    grew then, no name says where its writer is, and other hosts may write there."""
    match = EVENT_WRITER.search(item.name)
    host = match["host"] if match else None
    if match and host == os.uname().nodename:
        pid = int(match["pid"])
        if pid != os.getpid() and _born_before(pid, int(match["born"])):
            return f"its writer, process {pid}, is running"
    elif host is not None and (ago := fresh(item.stat().st_mtime)):
        return f"written from {host} {ago}; it must be quiet for {FLUSH_S} s"
    elif host is None and (ago := fresh(item.stat().st_mtime)) and _elsewhere(item, root):
        return f"written {ago}, maybe from another host; it must be quiet for {FLUSH_S} s"
    return "somebody has it open for writing" if is_open(item) else None


def _elsewhere(log: Path, root: Path) -> bool:
    """Whether another host may have written the log last: it is on a network's file system, and no
    surgery wrote it. What a surgery writes is staged before its receipt, by the same clock."""
    if log.name.endswith(NOTE) or not mount.is_network(log.parent):
        return False
    receipts = disk.matching(root / HOME / RECEIPTS, "*/receipt.json")
    done = max((receipt.stat().st_mtime_ns for receipt in receipts), default=0)
    return log.stat().st_mtime_ns > done


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
    (`nfs4_add_lease`, `cifs_setlease` in Linux), so there it is not evidence."""
    descriptor = reads.opened(item, os.O_NONBLOCK)  # a FIFO must not wait
    try:
        return _is_written(descriptor)
    finally:
        os.close(descriptor)


def _is_written(descriptor: int) -> bool:
    try:
        # Who opens the file to write just now makes the kernel send a signal: SIGIO would end us.
        fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except OSError as error:
        return error.errno == errno.EAGAIN and mount.kind(descriptor) not in REMOTE
    return False


def _born_before(pid: int, moment: int) -> bool:
    """Whether `pid` is alive and was started before `moment` (Unix time), so that it can have
    made a file then: a number that was given to another process since is not evidence."""
    ticks = process.start(pid)
    if ticks is None:
        return False
    boot = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    return boot + ticks / os.sysconf("SC_CLK_TCK") <= moment + 2
