"""Who a process is: its number alone does not say, as numbers are given again. Linux's /proc.

Only what /proc says is evidence. Where it is missing, or hides the processes of other users,
nothing is known, and nothing is concluded.
"""

from __future__ import annotations

import os
from pathlib import Path


def boot() -> str:
    """The id of this boot of the machine, or "" where it is not known."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def namespace() -> int:
    """The number of the namespace that this host's process numbers belong to, or 0."""
    try:
        return Path("/proc/self/ns/pid").stat().st_ino
    except OSError:
        return 0


def start(pid: int) -> int | None:
    """When a process that runs was started, in clock ticks since boot. None: it does not run (a
    zombie has ended, only its parent has not asked how), or /proc does not say."""
    state, ticks = _stat(pid) or ("", None)
    return None if state in _ENDED else ticks


def is_gone(pid: int, ticks: int) -> bool:
    """Whether the process `pid` that was started at `ticks` (0: not known) has provably ended."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass
    known = _stat(pid)
    return known is not None and (known[0] in _ENDED or (bool(ticks) and known[1] != ticks))


def parent(pid: int) -> int | None:
    """The number of the process that started it; None where /proc does not say."""
    fields = _fields(pid)
    return None if fields is None else int(fields[1])


_ENDED = ("Z", "X")


def _stat(pid: int) -> tuple[str, int] | None:
    """State and start time (proc(5), stat fields 3 and 22). A process whose first thread has ended
    before the others is called a zombie there; it runs as long as they do."""
    fields = _fields(pid)
    if fields is None:
        return None
    state, threads, ticks = fields[0], int(fields[17]), int(fields[19])
    return "S" if state == "Z" and threads > 1 else state, ticks


def _fields(pid: int) -> list[str] | None:
    """Those of its stat from the third on: what comes before may hold any character."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    return text.rpartition(")")[2].split()
