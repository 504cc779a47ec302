"""Who does the jobs of a long pass: threads of this process, or an executor of the caller."""

from __future__ import annotations

import copyreg
from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, TypeAlias

Workers: TypeAlias = int | Executor
"""The number of threads, or an executor, whose workers may be processes of other hosts: a job and
what it gives are pickled, it reads the files by their paths, and it may be done twice."""


def _frozen(mapping: dict[Any, Any]) -> MappingProxyType[Any, Any]:
    return MappingProxyType(mapping)


copyreg.pickle(MappingProxyType, lambda mapping: (_frozen, (dict(mapping),)))


@contextmanager
def at_work(workers: Workers, jobs: int) -> Iterator[Executor]:
    """The executor of so many jobs. Threads end with it; the caller's goes on."""
    if isinstance(workers, int):
        with ThreadPoolExecutor(max(1, min(workers, jobs))) as pool:
            yield pool
    else:
        yield workers
