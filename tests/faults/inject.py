"""Faults at one numbered call of `ckptsurgeon.disk`, in a child process that can really die."""

from __future__ import annotations

import errno
import os
import signal
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ckptsurgeon import disk
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.transaction import process

ERRORS = ("ENOSPC", "EIO", "EDQUOT", "EROFS", "EACCES")
KINDS = ("KILL", *ERRORS, "FULL", "EINTR", "SHORT", "CTRL-C")

TAKES_SPACE = ("make_directory", "create", "link", "symlink", "write", "copy", "truncate")
"""What fails on a disk that is really full ("FULL"); renames and removals go on."""

KILLED = -signal.SIGKILL
TRACEBACK = 98


@dataclass
class Fault:
    """A hook: the fault `kind` at call number `at`, and at every later one when `sticky`."""

    kind: str
    at: int
    sticky: bool = False
    calls: int = 0
    counting: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def __call__(self, operation: str, path: str, details: Mapping[str, Any]) -> int | None:
        with self.counting:
            self.calls += 1
            number = self.calls
        if number != self.at and not (self.sticky and number > self.at):
            return None
        if self.kind == "KILL":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.kind == "CTRL-C":
            raise KeyboardInterrupt
        if self.kind == "FULL":
            if operation in TAKES_SPACE:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return None
        if self.kind == "SHORT":
            size = len(details["data"]) if "data" in details else 2
            return max(1, size // 2) if operation in ("write", "copy") else None
        code = getattr(errno, self.kind)
        raise OSError(code, os.strerror(code))

    def __str__(self) -> str:
        return f"{self.kind}{' sticky' if self.sticky else ''} at {self.at}"


@contextmanager
def hooked(hook: disk.calls.Hook | None) -> Iterator[None]:
    before, disk.calls.hook = disk.calls.hook, hook
    try:
        yield
    finally:
        disk.calls.hook = before


def exit_code(call: Callable[[], object]) -> int:
    """What the command line exits with."""
    try:
        call()
    except SurgeryError as error:
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    return 0


@dataclass(frozen=True)
class Outcome:
    """How a child ended: exit code (`KILLED` when it was), disk calls made, and a traceback."""

    code: int
    calls: int = 0
    told: str = ""


def outcome(call: Callable[[], object], fault: Fault | None = None) -> Outcome:
    """Make the call with the fault at one of its disk calls: in a forked child when it is to be
    killed, else in this process, where a point costs a third."""
    fault = fault or Fault("", 0)
    return _in_child(call, fault) if fault.kind == "KILL" else _here(call, fault)


def _here(call: Callable[[], object], fault: Fault) -> Outcome:
    try:
        with hooked(fault):
            code, told = exit_code(call), ""
    except Exception:
        code, told = TRACEBACK, traceback.format_exc()
    return Outcome(code, fault.calls, told)


def _in_child(call: Callable[[], object], fault: Fault) -> Outcome:
    out, into = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12: fork beside threads
        child = os.fork()
    if child == 0:
        os.close(out)
        ended = _here(call, fault)
        os.write(into, f"{ended.calls} {ended.told[-4000:]}".encode())
        os._exit(ended.code)
    os.close(into)
    with os.fdopen(out, "rb") as pipe:
        calls, _, told = pipe.read().decode().partition(" ")
    return Outcome(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), int(calls or 0), told)


@contextmanager
def exited() -> Iterator[None]:
    """Whoever failed in this process counts as gone: the user recovers from another one."""
    gone, process.is_gone = process.is_gone, lambda pid, at: pid == os.getpid() or gone(pid, at)
    try:
        yield
    finally:
        process.is_gone = gone


def count_calls(call: Callable[[], object]) -> list[str]:
    """The operations of one clean run, in order. Runs in this process."""
    operations: list[str] = []

    def hook(operation: str, path: str, details: Mapping[str, Any]) -> None:
        operations.append(f"{operation} {Path(path).name}")

    with hooked(hook):
        call()
    return operations
