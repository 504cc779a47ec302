"""The ranks of one launch share what a long pass reads, without a scheduler.

Each rank carries out the whole command, so each comes to the same lists of jobs. Of a list it does
every job whose place is its own number, modulo the number of ranks, and takes what the other jobs
give from the files of the others: each rank writes one in the working folder, and removes it in the
end. The last rank alone answers.

A rank that dies, hangs or is slow costs the jobs that it had: the last one waits LOST_S for a job
(LONGER times the longest of its own, where that is more), does it, and then all others of that
rank. A job is only read, so doing it twice does no harm.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from ckptsurgeon import disk
from ckptsurgeon.cli.results import packed, unpacked
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.hints import TYPED, again
from ckptsurgeon.transaction.job_list import sealed, unsealed
from ckptsurgeon.transaction.ranks import Ranks, Told
from ckptsurgeon.version import VERSION
from ckptsurgeon.workers import host

LOST_S, END_S, SILENT_S = 60.0, 60.0, 600.0
"""Seconds for which the last rank waits for a job of another one, and once it is done for the ends
of the others; and without any news after which another one gives up."""
LONGER = 10
"""A job that takes so many times as long as the longest of one's own is none that hangs, either."""
PAUSE_S = 0.2
"""Seconds between two looks, and between two writes."""
T = TypeVar("T")


class Readers(Executor):
    """What the ranks of a launch are for one of them. Inside of it their files are in `folder`. As
    an executor it is for functions of one job that say by their annotations what they give, and
    whose jobs have a `file` or a `path`. `told` is called as that of Ranks."""

    def __init__(self, rank: Ranks, folder: Path, told: Told | None = None) -> None:
        self.rank, self.of, self.last, self._told = rank.rank, rank.of, rank.last, told
        typed = hashlib.sha256("\0".join(TYPED.get().words).encode()).hexdigest()[:8]
        name = f"ckptsurgeon-{rank.start}-{typed}"
        self._said = [_Said(folder / f"{name}.{number}") for number in range(rank.of)]
        self._own = self._said[self.rank].path
        self._waiting: list[bytes] = []
        self._lost: set[int] = set()
        self._passes, self._longest, self._wrote, self._heard = 0, 0.0, 0.0, time.monotonic()

    def __enter__(self) -> Readers:
        end = time.monotonic() + END_S
        while disk.exists(self._own) and time.monotonic() < end:
            time.sleep(PAUSE_S)  # the last rank is at the end of the same command, given before
        disk.write_new(self._own, b"")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """The last one removes all files, once the others have no more use for them."""
        if self.last:
            end = time.monotonic() + (0 if kind is KeyboardInterrupt else END_S)
            at_work = [self._said[n] for n in range(self.of - 1) if n not in self._lost]
            while (at_work := [each for each in at_work if not each.ended]) and (
                time.monotonic() < end
            ):
                time.sleep(PAUSE_S)
                for each in at_work:
                    each.look()
            for each in self._said:
                with suppress(OSError):
                    disk.remove_file(each.path)
            return
        with suppress(OSError):
            self._write({"ended": True})
            self._flush()

    def map(
        self,
        fn: Callable[..., T],
        *iterables: Iterable[Any],
        timeout: float | None = None,
        chunksize: int = 1,
    ) -> Iterator[T]:
        """What the function gives for each job, in their order, whichever rank has called it.
        Raises what it raises, at its place in that order, and SurgeryError where ranks have other
        lists."""
        (given,) = iterables
        jobs = list(given)
        if jobs:
            self._passes += 1
            yield from self._all(fn, jobs, _digest(jobs))

    def _all(self, function: Callable[..., T], jobs: Sequence[Any], names: str) -> Iterator[T]:
        mine = deque(range(self.rank, len(jobs), self.of))
        own: dict[int, T] = {}
        for number, job in enumerate(jobs):
            began = time.monotonic()
            while number not in own:
                done = self._done(number, names)
                if done is not None and "result" in done:
                    own[number] = unpacked(function, done["result"], job)
                    self._tell(done)
                elif done is not None:
                    own[number] = function(job)  # raises here what it has raised there
                elif mine or number % self.of in self._lost:
                    turn = mine.popleft() if mine else number
                    self._do(function, jobs[turn], turn, names, own)
                else:
                    self._wait(number % self.of, began)
            yield own.pop(number)
        self._flush()

    def _do(
        self, function: Callable[..., T], job: Any, number: int, names: str, own: dict[int, T]
    ) -> None:
        """Add to `own` what the function gives, and say it. What it raises is raised at its turn,
        when it is called once more."""
        began = time.monotonic()
        done: dict[str, Any] = {
            "pass": self._passes, "list": names, "job": number, "by": host(), "rank": self.rank,
        }  # fmt: skip
        try:
            own[number] = function(job)
        except Exception:
            self._said[self.rank].take(done)
        else:
            seconds = time.monotonic() - began
            self._longest = max(self._longest, seconds)
            self._tell(done := {**done, "seconds": round(seconds, 3)})
            done["result"] = packed(own[number], job)
        self._write(done)

    def _tell(self, done: Mapping[str, Any]) -> None:
        if self._told is not None:
            self._told(str(done["by"]), int(done["rank"]), float(done["seconds"]), 0)

    def _done(self, number: int, names: str) -> dict[str, Any] | None:
        """What is known of a job of this pass, from its own rank or from the last one."""
        for rank in (number % self.of, self.of - 1):
            done = self._said[rank].done.pop((self._passes, number), None)
            if done is not None and done["list"] != names:
                raise SurgeryError(
                    f"rank {rank} of {self.of} reads other files than rank {self.rank} on "
                    f"{host()}, or has another version than {VERSION}",
                    next=again(why="once all nodes have the same package and see the same files"),
                )
            if done is not None:
                return done
        return None

    def _wait(self, rank: int, began: float) -> None:
        """For news. The last one gives up a rank; another one gives up where all are silent."""
        self._flush()
        time.sleep(PAUSE_S)
        for each in {rank, self.of - 1}:
            if self._said[each].look():
                self._heard = time.monotonic()
        now, longest = time.monotonic(), LONGER * self._longest
        if self.last:
            if now - began > max(LOST_S, longest):
                self._lost.add(rank)
        elif self._said[-1].gone or now - max(began, self._heard) > max(SILENT_S, longest):
            raise SurgeryError(
                f"rank {self.rank} of {self.of} hears nothing of the last one any more",
                next=again(why="once that one no longer runs"),
            )

    def _write(self, document: Mapping[str, Any]) -> None:
        self._waiting.append(sealed(document))
        if time.monotonic() - self._wrote > PAUSE_S:
            self._flush()

    def _flush(self) -> None:
        if self._waiting:
            data, self._waiting = b"".join(self._waiting), []
            with disk.opened(self._own) as descriptor:
                disk.write_at(descriptor, self._own, os.fstat(descriptor).st_size, data)
                disk.fsync_data(descriptor, self._own)
        self._wrote = time.monotonic()


class _Said:
    """What the file of a rank says, as far as it was read; whether that one has ended, and whether
    its file was there and is gone."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.done: dict[tuple[int, int], dict[str, Any]] = {}
        self.ended = self.gone = False
        self._at, self._seen = 0, False

    def take(self, document: dict[str, Any]) -> None:
        """One thing more that it says."""
        if document.get("ended"):
            self.ended = True
        else:
            self.done[document["pass"], document["job"]] = document

    def look(self) -> bool:
        """Whether there is anything new. The file is opened anew each time: that is when NFS asks
        its server."""
        before = self._at
        try:
            with self.path.open("rb") as file:
                self._seen = True
                file.seek(self._at)
                for line in file:
                    if (document := unsealed(line)) is None:
                        break  # it is not whole yet
                    self.take(document)
                    self._at += len(line)
        except FileNotFoundError:
            self.gone = self._seen
        except OSError:
            pass  # as one that is not there yet
        return self._at > before


def _digest(jobs: Sequence[Any]) -> str:
    """Of the version and of the files that are read, in their order."""
    digest = hashlib.sha256(VERSION.encode())
    for job in jobs:
        first = job[0] if isinstance(job, list) else job
        digest.update(f"\0{getattr(first, 'file', None) or first.path}".encode())
    return digest.hexdigest()[:16]
