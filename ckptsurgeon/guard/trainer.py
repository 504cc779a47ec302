"""The trainer of a watched run: whether it runs, how it is stopped, and its start."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ckptsurgeon import disk
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.files.one_look import look_again
from ckptsurgeon.guard import event as events
from ckptsurgeon.guard.policy import Policy
from ckptsurgeon.hints import shell
from ckptsurgeon.launch.kill_switch import MARK, kill_switch
from ckptsurgeon.launch.written import by_others
from ckptsurgeon.plans.frozen import frozen
from ckptsurgeon.run import writers
from ckptsurgeon.run.run import Run
from ckptsurgeon.transaction import process
from ckptsurgeon.transaction.names import ID

PAUSE_S = 0.1
"""How often to look whether it has ended."""
GONE_S = writers.FLUSH_S + 30.0
"""Seconds for what was killed to be gone, and for the step that it has half saved to be quiet: a
trainer of another host may be saving that one."""
HUNG_S = 60.0
"""Seconds at most that a trainer which hangs has to end by itself."""
OUTPUT = "trainer.log"
"""What it prints after a start, with the event."""


@frozen
class Process:
    """A process of this host; its start tells it from another that has its number later."""

    pid: int
    start: int

    @classmethod
    def of(cls, pid: int) -> Process | None:
        """The one of this number; None where it does not run."""
        start = process.start(pid)
        return None if start is None else cls(pid, start)

    @property
    def runs(self) -> bool:
        return process.start(self.pid) == self.start

    def send(self, number: int) -> None:
        with contextlib.suppress(OSError):
            if self.runs:
                os.kill(self.pid, number)

    def below(self) -> list[Process]:
        """Itself and every process that it started, and they."""
        parents: dict[int, list[int]] = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and (parent := process.parent(int(entry.name))) is not None:
                parents.setdefault(parent, []).append(int(entry.name))
        found, waiting = [], [self.pid]
        while waiting:
            pid = waiting.pop()
            waiting += parents.get(pid, [])
            found += [each] if (each := Process.of(pid)) else []
        return found


def recorded(run: Run) -> Process | None:
    """The one that the bundled trainer's record names, if it runs on this host, and nobody else can
    have written that."""
    named = writers.recorded(run.root)
    if named is None or by_others(run.root / writers.RECORD):
        return None
    at = Process(*named)
    return at if at.runs else None


def _started_before(run: Run) -> Process | None:
    """What this watch or one before it has started, if any of it runs: who has its output open
    holds a lock on that. Where the number was not kept, the trainer's own is taken."""
    event = _last_started(run)
    if event is None:
        return None
    path = events.folder(run.root, event.id) / OUTPUT
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        known = event.pid > 0 and not by_others(path.with_name("event.json"))
        return Process(event.pid, event.born) if known else recorded(run) or Process(0, 0)
    finally:
        os.close(descriptor)
    return None


def printed(run: Run) -> tuple[Path, float] | None:
    """What the trainer prints that a watch started last, and when that was (Unix time)."""
    event = _last_started(run)
    return None if event is None else (events.folder(run.root, event.id) / OUTPUT, event.acted)


def _last_started(run: Run) -> events.Event | None:
    """The event after which a watch has started the trainer last."""
    for each in reversed(events.read(run.root)):
        if disk.is_file(events.folder(run.root, each.id) / OUTPUT):
            return each
    return None


class Trainer:
    """The trainer of the run that is watched: the process that was `named`, else what a watch has
    started, else what the bundled trainer's record names. What is started gets `options`."""

    def __init__(self, named: Process | None, options: Sequence[str]) -> None:
        self._named, self._options = named, options
        self._at: Process | None = named
        self._child = 0

    def now(self, run: Run) -> Process | None:
        """Its process, if it runs."""
        if self._at is None or not self._at.runs:
            found = None if self._named else _started_before(run) or recorded(run)
            if found is None:
                return None
            self._at = found
        return self._at

    @property
    def seen(self) -> bool:
        """Whether it was ever seen to run."""
        return self._at is not None

    def status(self) -> int | None:
        """How it ended, where this process has started it; then it is forgotten."""
        status = None
        if self._child:
            status = os.waitstatus_to_exitcode(os.waitpid(self._child, 0)[1])
        self._at, self._child = None, 0
        return status

    def start(self, run: Run, event: events.Event) -> events.Event:
        """Start `relaunch` in a session of its own: it and the trainer outlive the watch. What they
        print goes to a file of the event, which gets the process. Raises SurgeryError where that
        can't be."""
        path = events.put(run.root, event.id, OUTPUT, b"")
        words = [sys.executable, "-m", "ckptsurgeon", "relaunch", "-C", str(run.root)]
        try:
            with disk.opened(path) as out:
                fcntl.flock(out, fcntl.LOCK_EX | fcntl.LOCK_NB)
                files = [
                    (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0),
                    (os.POSIX_SPAWN_DUP2, out, 1),
                    (os.POSIX_SPAWN_DUP2, out, 2),
                ]
                self._child = os.posix_spawn(
                    sys.executable, [*words, *self._options], os.environ,
                    file_actions=files, setsid=True,
                )  # fmt: skip
        except OSError as error:
            raise SurgeryError(
                f"the trainer can't be started: {error.strerror}", next=shell(words)
            ) from None
        self._at = Process.of(self._child)
        return event if self._at is None else replace(event, pid=self._at.pid, born=self._at.start)

    def stop(self, run: Run, policy: Policy, id: str, *, hung: bool) -> str:
        """Let it save and end: by the policy's command, else by its kill switch, else by SIGTERM;
        one that does not is killed. Empty once it is gone, else why it is not."""
        at, switch = self.now(run), kill_switch(run)
        if at is None and run.trainer() is None:
            return ""
        if policy.stop:
            try:
                seconds = policy.stop_within or 1
                subprocess.run(policy.stop, timeout=seconds, check=False)
            except (OSError, subprocess.TimeoutExpired) as error:
                return f"{policy.stop[0]}: {error}"
        elif switch is not None and not hung:
            with contextlib.suppress(FileExistsError):
                disk.write_new(switch, f"{MARK} {id}\n".encode())
        elif at is not None:
            at.send(signal.SIGTERM)
        else:
            return "no process of it is known here, nor a kill switch, nor has the policy `stop`"
        seconds = min(policy.stop_within, HUNG_S) if hung else policy.stop_within
        if at is None:
            seconds = max(seconds, GONE_S)
        if _gone(run, [at] if at is not None else [], seconds):
            return ""
        if at is not None:
            ranks = recorded(run)
            every = [*at.below(), *(ranks.below() if ranks else [])]
            for each in every:
                each.send(signal.SIGKILL)
            if _gone(run, every, GONE_S):
                return ""
        return run.trainer() or "it still runs"


def _gone(run: Run, processes: Sequence[Process], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while True:
        look_again()
        if not any(each.runs for each in processes) and run.trainer() is None:
            return True
        if time.monotonic() >= end:
            return False
        time.sleep(PAUSE_S)


def clear_switch(run: Run) -> None:
    """Remove a kill switch that a watch put there; a person's stays."""
    switch = kill_switch(run)
    if switch is None or not disk.is_file(switch) or switch.stat().st_size > 100:
        return
    mark, _, id = switch.read_text("utf-8", "replace").rstrip("\n").partition(" ")
    if mark == MARK and ID.fullmatch(id):
        disk.remove_file(switch)
