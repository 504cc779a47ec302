"""The workers of a Dask cluster as an executor. What one had that dies or hangs, others do."""

from __future__ import annotations

import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from ckptsurgeon import disk
from ckptsurgeon.cli.tally import Done, Measured, Tally
from ckptsurgeon.errors import SurgeryError, UsageError
from ckptsurgeon.hints import Hint, again, shell
from ckptsurgeon.report.terminal import unchecked
from ckptsurgeon.version import VERSION

T = TypeVar("T")
ANSWER_S = 20
"""Seconds in which the scheduler and each worker must answer."""
LOST_S = 30
"""Seconds without any worker after which a pass fails."""
HUNG_S, FIRST_S = 60.0, 600.0
"""Seconds in which no job ends, after which those under way are given to other workers, too; and
where none has ended before, so that nobody knows how long one takes."""
LONGER = 10
"""A job that takes so many times as long as the longest before it is none that hangs, either."""
LOOK_S = 1.0
"""Seconds between two looks at whether jobs end."""
PAUSE_S = 0.01
"""Seconds between two at whether the next one has ended."""
ADDRESS = re.compile(r"([a-z]+://)?[^/\s]+:\d+")
RETRIES = 3
"""How often a job is done anew whose worker is lost, as in Dask's own `allowed-failures`, or given
to another worker, since its own hangs."""


@contextmanager
def connected(on: str, folders: Sequence[Path]) -> Iterator[DaskWorkers]:
    """The workers of the scheduler `on`. Raises UsageError where none answers, where one has
    another version of this package or sees other `folders`."""
    try:
        from distributed import Client
    except ImportError:
        raise UsageError(
            "--on needs Dask, which is not installed",
            next=shell(["pip", "install", "ckptsurgeon[cluster]"]),
        ) from None
    given = {"scheduler_file": on} if disk.is_file(Path(on)) else {"address": on}
    if "address" in given and not ADDRESS.fullmatch(on):
        raise UsageError(f"--on {on} is no file, and no address", next=_without(on))
    try:
        client = Client(**given, timeout=ANSWER_S, set_as_default=False)
    except (OSError, ValueError, TypeError) as error:
        raise UsageError(f"no Dask scheduler answers at {on}: {error}", next=_without(on)) from None
    with client:
        _refuse_unlike(client, on, folders)
        ended, lost = threading.Event(), threading.Event()
        watch = threading.Thread(target=_watch, args=(client, ended, lost), daemon=True)
        watch.start()
        try:
            yield DaskWorkers(client, on, lost)
        finally:
            ended.set()
            watch.join()


class DaskWorkers(Executor):
    """The workers of a Dask cluster. A job whose worker is lost is done again by another one. A job
    whose worker hangs is done by another one, too, and the first that ends counts."""

    def __init__(self, client: Any, on: str, lost: threading.Event) -> None:
        self._client, self._on, self._lost = client, on, lost
        self.tally = Tally()

    def map(
        self,
        fn: Callable[..., T],
        *iterables: Iterable[Any],
        timeout: float | None = None,
        chunksize: int = 1,
    ) -> Iterator[T]:
        """What the function gives for each job, in their order. Raises SurgeryError where the
        workers are lost."""
        from distributed import KilledWorker
        from distributed.comm import CommClosedError

        began = time.monotonic()
        jobs = [*zip(*iterables, strict=False)]
        if not jobs:
            return
        work = _Work(self._client, Measured(fn, VERSION), jobs)
        try:
            for number in range(len(jobs)):
                done = work.result(number)
                self.tally.add(done)
                yield done.result
        except ImportError as error:  # a worker that came later, of a version without these modules
            raise SurgeryError(
                f"a worker of {self._on} has another version of ckptsurgeon than {VERSION}, or "
                f"lacks what it needs: {error}",
                next=shell(["pip", "install", f"ckptsurgeon=={VERSION}"], why="on its host"),
            ) from None
        except Exception as error:
            if not self._lost.is_set() and not isinstance(error, (KilledWorker, CommClosedError)):
                raise
            raise SurgeryError(
                f"the workers of {self._on} are lost", next=(again(), _without(self._on))
            ) from None
        finally:
            self.tally.seconds += time.monotonic() - began


class _Work:
    """Calls of one function, and what has become of each: the futures of one job are the same
    call, by several workers."""

    def __init__(self, client: Any, function: Measured, jobs: Sequence[tuple[Any, ...]]) -> None:
        self.jobs = jobs
        self._client, self._function = client, function
        # Not pure: Dask would take what a job gave before for what it gives now.
        submitted = client.map(function, *zip(*jobs, strict=True), retries=RETRIES, pure=False)
        self._futures = [[future] for future in submitted]
        self._ended, self._since, self._longest = 0, time.monotonic(), 0.0

    def result(self, number: int) -> Done:
        """Of the first call of this job that ends. Raises what it raised."""
        looked = time.monotonic()
        while not self._has_ended(number):
            time.sleep(PAUSE_S)
            if time.monotonic() - looked > LOOK_S:
                self._look()
                looked = time.monotonic()
        first = next(future for future in self._futures[number] if future.status != "pending")
        done: Done = first.result()
        self._longest = max(self._longest, done.seconds)
        return done

    def _look(self) -> None:
        """Where no job ends any more, give those that are under way to other workers."""
        pending = [n for n in range(len(self.jobs)) if not self._has_ended(n)]
        ended, now = len(self.jobs) - len(pending), time.monotonic()
        if ended > self._ended:
            self._ended, self._since = ended, now
        patience = max(HUNG_S, LONGER * self._longest) if ended else FIRST_S
        if now - self._since <= patience:
            return
        self._since = now
        number_of = {future.key: n for n in pending for future in self._futures[n]}
        at_work = {
            worker: [number_of[key] for key in keys if key in number_of]
            for worker, keys in self._client.processing().items()
        }
        others = [worker for worker in at_work if not at_work[worker]]
        for worker, numbers in at_work.items():
            stuck = [n for n in numbers if len(self._futures[n]) <= RETRIES]
            if not (others and stuck):
                continue
            _say(f"{worker} has ended no job for {patience:.0f} s; others do what it has")
            for number in stuck:
                self._futures[number] += [
                    self._client.submit(
                        self._function, *self.jobs[number], workers=others, pure=False
                    )
                ]

    def _has_ended(self, number: int) -> bool:
        return any(future.status != "pending" for future in self._futures[number])


def _say(text: str) -> None:
    print(f"  note: {text}", file=unchecked(sys.stderr))


def _watch(client: Any, ended: threading.Event, lost: threading.Event) -> None:
    """Give up where no worker is left for LOST_S: Dask waits for others for ever."""
    since = time.monotonic()
    while not ended.wait(1):
        if client.scheduler_info()["workers"]:
            since = time.monotonic()
        elif time.monotonic() - since > LOST_S:
            lost.set()
            client.close(timeout=1)
            return


def _without(on: str) -> Hint:
    return again(without=["--on", on], why="with threads of this process")


def _refuse_unlike(client: Any, on: str, folders: Sequence[Path]) -> None:
    try:
        client.wait_for_workers(1, timeout=ANSWER_S)
    except TimeoutError:
        raise UsageError(f"the Dask scheduler at {on} has no worker", next=_without(on)) from None
    mine = [_seen(folder) for folder in folders]
    found = _asked(client, [str(folder.resolve()) for folder in folders])
    if not found:
        raise UsageError(f"no worker of {on} answers", next=_without(on))
    for worker, told in sorted(found.items()):
        if not isinstance(told, tuple) or told[0] != VERSION:
            other = f"has {told[0]}" if isinstance(told, tuple) else f"can't tell: {told}"
            raise UsageError(
                f"the worker {worker} {other}; ckptsurgeon is {VERSION} here",
                next=shell(["pip", "install", f"ckptsurgeon=={VERSION}"], why="on its host"),
            )
        for folder, here, there in zip(folders, mine, told[1], strict=True):
            if here != there:
                raise UsageError(
                    f"the worker {worker} does not see {folder} as it is here", next=_without(on)
                )


def _asked(client: Any, folders: Sequence[str]) -> Mapping[str, Any]:
    """What each worker says that answers in time. Those that hang are named."""
    found: dict[str, Any] = {}

    def ask(worker: str) -> None:
        with suppress(Exception):  # its connection broke: that is no answer, either
            found.update(client.run(_told, folders, workers=[worker], on_error="return"))

    workers = list(client.ncores())
    # One that hangs never answers, and its thread ends with this process.
    asking = [threading.Thread(target=ask, args=[worker], daemon=True) for worker in workers]
    end = time.monotonic() + ANSWER_S
    for thread in asking:
        thread.start()
    for thread in asking:
        thread.join(max(0.0, end - time.monotonic()))
    for worker in set(workers) - {*found}:
        _say(f"{worker} does not answer")
    return dict(found)


def _told(folders: Sequence[str]) -> tuple[str, list[list[str]]]:
    """Asked on each worker."""
    return VERSION, [_seen(Path(folder)) for folder in folders]


def _seen(folder: Path) -> list[str]:
    try:
        return sorted(path.name for path in folder.iterdir())
    except OSError as error:
        return [type(error).__name__]
