"""The ranks of one launch share the jobs of a surgery, without a scheduler.

Each rank makes the same plan, so each knows the same list, and does every job whose place in it is
its own number, modulo the number of ranks. The last rank holds the lock, makes the staged files,
does its share like the others, and commits. They meet in the record file alone:

- the last rank writes there which phase has begun: the jobs are done, then read back;
- whoever has done a job adds that to its record;
- each rank signs once it has planned, since after the commit it would plan something else.

A rank that dies, hangs or is slow costs the jobs that it had: the last one waits LOST_S for a job,
and then does it, and all others of that rank. Doing one twice does no harm. A last rank that dies
leaves what any killed surgery leaves.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import Any, TypeVar

from ckptsurgeon import disk
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.hints import again
from ckptsurgeon.transaction import job_list
from ckptsurgeon.transaction.job_list import SLOT, Job, sealed, unsealed
from ckptsurgeon.version import VERSION
from ckptsurgeon.workers import host

LOST_S = 60.0
"""Seconds for which the last rank waits for a job of another one."""
SIGN_S = 60.0
"""Seconds for which it waits for their signatures, once all is computed."""
SILENT_S = 600.0
"""Seconds without any news after which another rank no longer waits for the last one."""
PAUSE_S = 0.2
"""Seconds between two looks."""
NEWS_AT = 1024
"""Where in the first page of the record file the last rank says how far it is."""
T = TypeVar("T")
Told = Callable[[str, int, float, int], None]
"""Called with the host, the rank, the seconds and the bytes of each job that is done."""


class Ranks(Executor):
    """One of `of` ranks, from 0. `start` is the same in all ranks of a launch, and in no other
    launch. As an executor it is for the last rank, and for functions of jobs that give what JSON
    can hold."""

    def __init__(self, rank: int, of: int, start: str, told: Told | None = None) -> None:
        self.rank, self.of, self.start = rank, of, start[:64]
        self._told, self._phase, self._began = told, 0, False

    @property
    def last(self) -> bool:
        """Whether it is the one that commits."""
        return self.rank == self.of - 1

    # --- the last rank ---------------------------------------------------------------------------

    def map(
        self,
        fn: Callable[..., T],
        *iterables: Iterable[Any],
        timeout: float | None = None,
        chunksize: int = 1,
    ) -> Iterator[T]:
        """What the function gives for each job, in their order, whichever rank has called it."""
        (given,) = iterables
        jobs = list(given)
        if jobs:
            self._phase += 1
            self._announce(jobs[0])
            yield from self._all(fn, jobs)
            if self._phase == 1:
                self._wait_for_signatures(jobs)

    def _all(self, function: Callable[[Job], T], jobs: Sequence[Job]) -> Iterator[T]:
        mine = deque(jobs[self.rank :: self.of])
        lost: set[int] = set()
        for number, job in enumerate(jobs):
            rank, waits = number % self.of, 0.0
            while (done := self._done(job, self._phase)) is None:
                if mine:
                    self._do(function, mine.popleft(), self._phase)
                elif rank in lost:
                    self._do(function, job, self._phase)
                else:
                    waits = waits or time.monotonic()
                    if time.monotonic() - waits > LOST_S:
                        lost.add(rank)
                    time.sleep(PAUSE_S)
            if self._told is not None:
                self._told(str(done["by"]), int(done["rank"]), float(done["seconds"]), job.size)
            yield done["result"]

    def _announce(self, job: Job) -> None:
        news = {"list": job.list, "start": self.start, "phase": self._phase, "version": VERSION}
        _write(job.record, NEWS_AT, sealed(news))

    def _wait_for_signatures(self, jobs: Sequence[Job]) -> None:
        """A rank that planned after the commit would plan something else."""
        end = time.monotonic() + SIGN_S
        missing = set(range(self.of - 1))
        while missing and time.monotonic() < end:
            missing -= {rank for rank in missing if self._signed(jobs, rank)}
            if missing:
                time.sleep(PAUSE_S)

    def _signed(self, jobs: Sequence[Job], rank: int) -> bool:
        signed = _read(jobs[0].record, _place(jobs, rank), SLOT) or {}
        return (signed.get("start"), signed.get("rank")) == (self.start, rank)

    # --- the others ------------------------------------------------------------------------------

    def help(self, jobs: Sequence[Job]) -> None:
        """Do this rank's share. It ends early, and quietly, where the surgery has ended.

        Raises SurgeryError where the last rank is not heard of for SILENT_S, or has made another
        list."""
        if not jobs:
            return
        try:
            for phase, function in enumerate((job_list.do, job_list.check), 1):
                if not self._begun(jobs, phase):
                    return
                for job in job_list.known(jobs)[self.rank :: self.of]:
                    if self._done(job, phase) is None and (job.known or phase == 1):
                        self._do(function, job, phase)
        except (SurgeryError, OSError):
            if self._began and self._news(jobs[0].record) is None:
                return  # the last rank has done the rest, or has taken all back
            raise

    def _begun(self, jobs: Sequence[Job], phase: int) -> bool:
        """Wait until the last rank has begun a phase, and sign in the first. False where it has
        ended the surgery."""
        record = jobs[0].record
        before, since = _changed(record), time.monotonic()
        while True:
            news = self._news(record)
            if news is not None:
                _refuse_unlike(jobs[0], news)
                self._began = True
                if phase == 1:
                    note = {"start": self.start, "rank": self.rank}
                    _write(record, _place(jobs, self.rank), sealed(note))
                if int(news["phase"]) >= phase:
                    return True
            elif self._began:
                return False
            now = _changed(record)
            if now != before:
                before, since = now, time.monotonic()
            elif time.monotonic() - since > SILENT_S:
                raise SurgeryError(
                    f"rank {self.rank} of {self.of} has heard nothing of the last one for "
                    f"{SILENT_S / 60:.0f} minutes",
                    next=again(why="once that one no longer runs"),
                )
            time.sleep(PAUSE_S)

    def _news(self, record: Path) -> dict[str, Any] | None:
        """What the last rank of this launch says, while its surgery is under way."""
        news = _read(record, NEWS_AT, SLOT - NEWS_AT)
        return news if news and news.get("start") == self.start else None

    # --- of one job ------------------------------------------------------------------------------

    def _do(self, function: Callable[[Job], Any], job: Job, phase: int) -> None:
        """Call the function, and add to the job's record what it gives."""
        began = time.monotonic()
        result = function(job)
        done = {
            "start": self.start, "phase": phase, "result": result, "by": host()[:64],
            "rank": self.rank, "seconds": round(time.monotonic() - began, 3),
        }  # fmt: skip
        record = _read(job.record, job.at, job_list.slot(job)) or {}
        _write(job.record, job.at, sealed({**record, "list": job.list, **done}))

    def _done(self, job: Job, phase: int) -> dict[str, Any] | None:
        """What the record of a job says of this launch, where it has come to this phase."""
        record = _read(job.record, job.at, job_list.slot(job)) or {}
        mine = (record.get("list"), record.get("start")) == (job.list, self.start)
        return record if mine and record["phase"] >= phase else None


def _refuse_unlike(job: Job, news: dict[str, Any]) -> None:
    if (news.get("list"), news.get("version")) != (job.list, VERSION):
        raise SurgeryError(
            f"the last rank has another list of jobs, or another version than {VERSION}: on "
            f"{host()} the run is not what it is there",
            next=again(why="once all nodes have the same package and see the same files"),
        )


def _place(jobs: Sequence[Job], rank: int) -> int:
    """Of the signature of a rank: a page of its own, after all records."""
    return jobs[-1].at + job_list.slot(jobs[-1]) + rank * SLOT


def _read(record: Path, at: int, size: int) -> dict[str, Any] | None:
    """Opened anew each time: that is when NFS asks its server."""
    try:
        with record.open("rb", buffering=0) as file:
            return unsealed(os.pread(file.fileno(), size, at))
    except OSError:
        return None


def _write(record: Path, at: int, data: bytes) -> None:
    with disk.opened(record) as descriptor:
        disk.write_at(descriptor, record, at, data)
        disk.fsync_data(descriptor, record)


def _changed(record: Path) -> int:
    try:
        return record.stat().st_mtime_ns
    except OSError:
        return 0
