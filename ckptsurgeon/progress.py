"""How long work says how far it is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")

Progress = Callable[[str, int, int], None]
"""Called with the phase, how much of it is done, and how much there is."""


def silent(phase: str, done: int, total: int) -> None:
    """Nobody listens."""


def counted(
    results: Iterable[T], phase: str, sizes: Sequence[int], progress: Progress | None
) -> Iterator[T]:
    """The results; `progress` counts their sizes, and hears of the phase before the first is
    there: its time and its rate are those of the whole phase."""
    tell, done, total = progress or silent, 0, sum(sizes)
    tell(phase, done, total)
    for result, size in zip(results, sizes, strict=True):
        done += size
        tell(phase, done, total)
        yield result
