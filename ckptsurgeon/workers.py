"""Who does the jobs of a long pass: threads of this process, or an executor of the caller."""

from __future__ import annotations

import copyreg
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

if TYPE_CHECKING:
    from concurrent.futures import Executor

T = TypeVar("T")
R = TypeVar("R")
Workers: TypeAlias = "int | Executor"
"""The number of threads, or an executor, whose workers may be processes of other hosts: a job and
what it gives are pickled, it reads the files by their paths, and it may be done twice."""

FEW = 3
"""Up to this many calls are made one after the other: starting threads would take longer."""
_at_once: ContextVar[int | None] = ContextVar("_at_once", default=None)


def _frozen(mapping: dict[Any, Any]) -> MappingProxyType[Any, Any]:
    return MappingProxyType(mapping)


copyreg.pickle(MappingProxyType, lambda mapping: (_frozen, (dict(mapping),)))


class Mapped(Protocol):
    """The signature of `map`."""

    def __call__(self, function: Callable[[T], R], jobs: Sequence[T], /) -> Iterator[R]: ...


@contextmanager
def at_work(workers: Workers, jobs: int) -> Iterator[Mapped]:
    """What calls a function for each of so many jobs, in their order. Threads end with it, and a
    single one is this one; the executor of a caller goes on."""
    if not isinstance(workers, int):
        yield workers.map
    elif min(workers, jobs) <= 1:
        yield map
    else:
        from concurrent.futures import ThreadPoolExecutor

        with ThreadPoolExecutor(min(workers, jobs)) as pool:
            yield pool.map


@contextmanager
def files_at_once(number: int) -> Iterator[None]:
    """Inside, `side_by_side` has so many threads; in a part of what says a number already, as many
    as that."""
    if _at_once.get() is not None:
        yield
        return
    token = _at_once.set(number)
    try:
        yield
    finally:
        _at_once.reset(token)


def side_by_side(function: Callable[[T], R], items: Iterable[T]) -> list[R]:
    """What a function that reads the disk says of each, in their order; the error is that of the
    first that has one. They are asked at once, as `files_at_once` says: then their waits for a
    server overlap. One after the other where nothing says so, and so in these threads too."""
    return each(function, list(items), _at_once.get() or 1)


def each(
    call: Callable[[T], R],
    items: Sequence[T],
    jobs: int,
    done: Callable[[int], None] = lambda _: None,
) -> list[R]:
    """Call for every item, in up to `jobs` threads; `done(1)` in this thread for each. The first
    error, in the order of the items, is raised after all calls that had begun are over, so that
    none still works on what the caller closes; no further call begins."""
    results: list[R] = []
    if jobs <= 1 or len(items) <= FEW:
        for item in items:
            results.append(call(item))
            done(1)
        return results
    from concurrent.futures import Future, ThreadPoolExecutor, wait

    pool = ThreadPoolExecutor(min(jobs, len(items)))
    futures: list[Future[R]] = []
    try:
        for item in items:
            futures.append(pool.submit(call, item))
        for future in futures:
            results.append(future.result())
            done(1)
        return results
    finally:
        over = False
        while not over:
            with suppress(KeyboardInterrupt):  # a second one while the first one waits
                pool.shutdown(wait=False, cancel_futures=True)
                wait([future for future in futures if not future.cancelled()])
                over = True


def host() -> str:
    """This one, by the name that SLURM gives it, if that started the worker."""
    return os.environ.get("SLURMD_NODENAME") or os.uname().nodename
