"""Who does the jobs of a long pass: threads of this process, or an executor of the caller."""

from __future__ import annotations

import copyreg
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

if TYPE_CHECKING:
    from concurrent.futures import Executor

T = TypeVar("T")
R = TypeVar("R")
Workers: TypeAlias = "int | Executor"
"""The number of threads, or an executor, whose workers may be processes of other hosts: a job and
what it gives are pickled, it reads the files by their paths, and it may be done twice."""


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


def host() -> str:
    """This one, by the name that SLURM gives it, if that started the worker."""
    return os.environ.get("SLURMD_NODENAME") or os.uname().nodename
