"""The file of one metric: a line `timestamp value step …` for each point, in order of logging."""

from __future__ import annotations

import heapq
import math
import os
from array import array
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptsurgeon.plans.edits import Span

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

END = 64 << 10
"""Bytes at either end of a file in which its first and its last step are looked for."""


class MetricFile:
    """Where each line ends, and its step, its time in seconds and its value. A line that is not
    understood, as the last one of a killed trainer, goes the way of the one before it. With `runs`
    only the lines count that say one of these: in the file of a model each names its run."""

    def __init__(self, path: Path, runs: Collection[str] | None = None) -> None:
        import numpy as np

        ends, steps, own = array("Q"), array("q"), array("B")
        walls, values = array("d"), array("d")
        point, end, mine = (0, math.nan, math.nan), 0, runs is None
        with path.open("rb") as file:
            for line in file:
                end += len(line)
                words = line.split()
                known = said(words)
                if known is not None:
                    point = known
                    mine = runs is None or (len(words) > 3 and words[3].decode() in runs)
                ends.append(end)
                own.append(mine)
                steps.append(point[0])
                walls.append(point[1])
                values.append(point[2])
        self.path, self.ends = path, ends
        self.steps = np.array(steps, np.int64)
        self.walls, self.values = np.array(walls, float), np.array(values, float)
        self.own: NDArray[np.bool_] = np.array(own, bool)

    def __len__(self) -> int:
        return len(self.ends)

    def span(self, name: str, first: int, after: int) -> Span:
        """The bytes of lines [first, after)."""
        return Span(name, self.ends[first - 1] if first else 0, self.ends[after - 1])

    def spans(self, name: str, flags: NDArray[np.bool_]) -> Iterator[Span]:
        """The bytes of the lines with a flag."""
        import numpy as np

        edges = np.diff(np.concatenate(([0], flags, [0])).astype(np.int8)).nonzero()[0]
        for first, after in edges.reshape(-1, 2).tolist():
            yield self.span(name, first, after)


def said(words: Sequence[bytes]) -> tuple[int, float, float] | None:
    """The step, the time and the value of a line of these words; in the oldest files it has no
    step, which is 0."""
    try:
        step = int(words[2]) if len(words) > 2 else 0
        time, value = int(words[0]) / 1000, float(words[1])
    except (ValueError, IndexError):
        return None
    return (step, time, value) if abs(step) < 1 << 62 else None


def at_the_end(path: Path) -> list[tuple[int, float, float]]:
    """The last points of a file, as far as they lie in its last bytes."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        file.seek(max(0, size - END))
        lines = file.read(END).splitlines()
    return _known(lines[1:] if size > END else lines)


def at_the_start(path: Path) -> list[tuple[int, float, float]]:
    """The first points, by the same rule."""
    with path.open("rb") as file:
        return _known(file.read(END).splitlines())


def _known(lines: Iterable[bytes]) -> list[tuple[int, float, float]]:
    return [point for line in lines if (point := said(line.split())) is not None]


def merged(
    parts: Sequence[tuple[str, MetricFile, NDArray[np.bool_]]],
) -> Iterator[Span]:
    """The lines with a flag of several files as those of one, by their times; each has a name.
    Those of one file stay in their order."""

    def lines(which: int) -> Iterator[tuple[float, int, int]]:
        _, file, flags = parts[which]
        latest: Any = -math.inf
        for line in flags.nonzero()[0].tolist():
            latest = max(latest, file.walls[line]) if not math.isnan(file.walls[line]) else latest
            yield latest, which, line

    open: tuple[int, int, int] | None = None  # file, first line, line after the last
    for _, which, line in heapq.merge(*map(lines, range(len(parts)))):
        if open is not None and open[0] == which and open[2] == line:
            open = (which, open[1], line + 1)
            continue
        if open is not None:
            yield parts[open[0]][1].span(parts[open[0]][0], *open[1:])
        open = (which, line, line + 1)
    if open is not None:
        yield parts[open[0]][1].span(parts[open[0]][0], *open[1:])
