"""How the norm of each parameter's weights grew since an earlier saved step."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from ckptsurgeon.formats import Checkpoint
from ckptsurgeon.look.vitals.facts import named
from ckptsurgeon.look.vitals.jobs import Source, jobs
from ckptsurgeon.look.vitals.observations import Observation
from ckptsurgeon.look.vitals.reading import Reading
from ckptsurgeon.look.vitals.scan import scan
from ckptsurgeon.plans.frozen import frozen
from ckptsurgeon.progress import Progress
from ckptsurgeon.workers import Workers

WEIGHTS, MASTER = ("weights", ""), ("master",)
"""Kinds of elements; masters count where nothing else is kept under the parameter's name."""
LARGE = 2.0
"""Times by which a norm grew, or fell, from which it is said among what is unusual."""


@frozen
class Growth:
    """The norm of a parameter's weights, and what it was at the earlier step."""

    parameter: str
    norm: float
    before: float

    @property
    def bias(self) -> bool:
        """Whether it is a bias by its name: those begin at 0 and grow to many times as much."""
        return self.parameter.endswith("bias")

    @property
    def times(self) -> float:
        """The norm as a multiple of the earlier one; inf where that was 0 and it is not."""
        if self.before == 0:
            return 1.0 if self.norm == 0 else math.inf
        return self.norm / self.before


def since(
    readings: Iterable[Reading],
    before: Checkpoint,
    sources: Sequence[Source],
    *,
    workers: Workers = 8,
    progress: Progress | None = None,
) -> tuple[list[Growth], list[str]]:
    """The growth of every parameter that both steps have, the most grown first, and a sentence on
    those that could not be compared. Of the earlier step only weights are read. Raises
    SurgeryError for a file that can't be read."""
    mine = list(readings)
    kinds: dict[str, Sequence[str]] = {r.parameter: MASTER for r in mine if "master" in r.kinds}
    kinds |= {r.parameter: WEIGHTS for r in mine if r.kinds.keys() & set(WEIGHTS)}
    found = []
    for job in jobs(before, sources):
        ranges = [item for item in job.ranges if item.kind in kinds.get(job.parameter, ())]
        if ranges:
            found.append(replace(job, ranges=tuple(ranges), coded={}, limit=None))
    earlier = _sums(scan(found, workers=workers, progress=progress), kinds)
    out, apart = [], []
    for parameter, (count, squares) in _sums(mine, kinds).items():
        other = earlier.get(parameter)
        if other is None or other[0] != count:
            apart.append(parameter)
        else:
            out.append(Growth(parameter, math.sqrt(squares), math.sqrt(other[1])))
    note = f"norms of {named(apart)}: step {before.step} does not have them alike"
    return sorted(out, key=lambda item: -item.times), [note] if apart else []


def _sums(
    readings: Iterable[Reading], kinds: Mapping[str, Sequence[str]]
) -> dict[str, tuple[int, float]]:
    """Of each parameter's weights, how many there are and the sum of their squares."""
    out: dict[str, tuple[int, float]] = {}
    for reading in readings:
        for kind in kinds.get(reading.parameter, ()) if reading.parameter else ():
            numbers = reading.kinds.get(kind)
            if numbers is not None and numbers.count:
                count, squares = out.get(reading.parameter, (0, 0.0))
                out[reading.parameter] = (count + numbers.count, squares + numbers.squares)
    return out


def observations(found: Iterable[Growth], before: int) -> list[Observation]:
    """Norms that grew, or fell, to LARGE times and more, but for biases."""
    out = []
    for item in found:
        change = max(item.times, 1 / item.times if item.times else math.inf)
        if change >= LARGE and not item.bias:
            what = f"norm {item.norm:.3g}, at step {before} {item.before:.3g}"
            out.append(Observation(item.parameter, "norm-growth", what, min(change / LARGE, 1e6)))
    return out
