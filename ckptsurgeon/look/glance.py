"""The loss at a glance: its last points, from the ends of the newest event files, without NumPy.

`status` shows it. What is read is bounded, however long the run is.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ckptsurgeon.logs import signals
from ckptsurgeon.logs.axis import ITERATION, axis
from ckptsurgeon.logs.signals import LOSS
from ckptsurgeon.logs.tensorboard import event_file
from ckptsurgeon.logs.tensorboard.frame import Opened, first_good
from ckptsurgeon.logs.tensorboard.scalars import numbers
from ckptsurgeon.run.run import Run

BYTES = 2 << 20 if event_file.native is not None else 256 << 10
"""Bytes that are read in all: some 700 steps of a trainer that logs 35 tags."""
FILES = 4
SPAN, SETTLED = 50, 11
"""Points of a mean, and of the median at the end: as in advise's rules."""


@dataclass(frozen=True)
class Glance:
    """Steps, ascending, and the loss at them; at least one."""

    steps: Sequence[int]
    values: Sequence[float]

    @property
    def calm(self) -> bool:
        """Whether the loss ends at its best level, give or take its noise. Then no rule of advise
        says that it diverged within these points."""
        if not all(map(math.isfinite, self.values)) or len(self.values) < 2 * SPAN:
            return False
        sums = [0.0]
        for value in self.values:
            sums.append(sums[-1] + value)
        means = [(b - a) / SPAN for a, b in zip(sums, sums[SPAN:], strict=False)]
        jumps = [abs(b - a) for a, b in zip(self.values, self.values[1:], strict=False)]
        noise = statistics.median(jumps) / (0.6745 * 2**0.5)
        ends = statistics.median(self.values[-SETTLED:])
        return means[-1] <= min(means) + noise / 2 and ends <= min(means) + noise


def glance(run: Run) -> Glance | None:
    """The last points of the loss in the run's event files; None where no tag is known to be it.
    Damage ends what is read of a file."""
    points: list[tuple[int, float]] = []
    left = BYTES
    for path in reversed(_newest(run)):
        read = _end(path, left)
        older = [point for point in read if not points or point[0] < points[0][0]]
        points = older + points
        left -= min(left, path.stat().st_size)
        if left < 4096:
            break
    return Glance(*zip(*points, strict=True)) if points else None


def _newest(run: Run) -> list[Path]:
    """The newest event files of the folder that was written to last, oldest first."""
    dated = [(path.stat().st_mtime_ns, path) for path in run.logs.files()]
    dated = [(when, path) for when, path in dated if not path.name.endswith(".ckptsurgeon")]
    if not dated:
        return []
    folder = max(dated)[1].parent
    return [path for _, path in sorted(dated) if path.parent == folder][-FILES:]


def _end(path: Path, most: int) -> list[tuple[int, float]]:
    """The points of the loss in the last `most` bytes, from where the step went back the last time
    on; of several at one step the last."""
    with Opened(path) as (data, _):
        start = max(0, len(data) - most)
        end = bytes(data[first_good(data, start) if start else 0 :])
    index = event_file.index(end, path, salvage=True)
    names = {tag for group in index.names for tag in group if axis(tag, {}) == ITERATION}
    tag = signals.found(names, {}).get(LOSS)
    if tag is None:
        return []
    wanted = {i for i, group in enumerate(index.names) if tag in group}
    points: dict[int, float] = {}
    for record, series in enumerate(index.tags):
        if series in wanted:
            step = int(index.steps[record])
            if points and step < next(reversed(points)):
                points = {at: value for at, value in points.items() if at < step}
            for name, value in numbers(end, index, record):
                if name == tag:
                    points[step] = value
    return list(points.items())
