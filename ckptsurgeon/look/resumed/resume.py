"""Whether a saved step goes on from an earlier one: every verdict that the two allow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.formats import Checkpoint
from ckptsurgeon.formats.fields.constants import ODD
from ckptsurgeon.look.resumed import counters, tensors
from ckptsurgeon.look.resumed.verdict import NOT_COMPARED, Verdict
from ckptsurgeon.plans.plan import Receipt
from ckptsurgeon.progress import Progress
from ckptsurgeon.run.run import Run
from ckptsurgeon.transaction.receipts import standing
from ckptsurgeon.workers import Workers


def resumed(
    run: Run,
    now: Checkpoint,
    before: Checkpoint,
    receipts: Sequence[Receipt],
    *,
    workers: Workers = 8,
    progress: Progress | None = None,
) -> list[Verdict]:
    """Counters, data, rate and every tensor of `now`, held against those of `before`. `receipts`
    are the standing surgeries. Raises SurgeryError for a file that can't be read."""
    rate = counters.highest_rate(run, now, before)
    return [
        counters.counted(now, before, receipts),
        counters.of_the_data(now, before, receipts),
        counters.of_the_rate(run, now, before, receipts),
        *tensors.compared(now, before, receipts, rate, workers=workers, progress=progress),
    ]


Stamps = Mapping[int, int]
"""Step → when its newest file was written, in nanoseconds."""


def later_steps(run: Run, before: int) -> Stamps:
    """What is saved beyond step `before`, which a trainer that goes on from that saves over."""
    later = [step for step in run.steps() if step > before]
    return {step: _written(run, step) for step in later}


def _written(run: Run, step: int) -> int:
    files = run.format.files(run.root, step)
    return max((file.stat().st_mtime_ns for file in files), default=0)


def first_save(
    root: Path, before: int, there: Stamps, *, progress: Progress | None = None
) -> tuple[int, list[Verdict]] | None:
    """The first whole step that was saved after step `before`, held against that; None where none
    was saved, or the earlier one is gone. Those `there` before are not meant, unless they were
    saved anew. What can't be read is not compared."""
    run = Run.open(root)
    later = later_steps(run, before)
    steps = [step for step in later if later[step] != there.get(step) and run.complete(step)]
    if not steps or before not in run.steps():
        return None
    return steps[0], held(run, steps[0], before, progress=progress)


def held(
    run: Run, step: int, before: int, *, workers: Workers = 8, progress: Progress | None = None
) -> list[Verdict]:
    """Every verdict on `step` that the earlier one allows. What can't be read is not compared."""
    try:
        now, old = run.checkpoint(step), run.checkpoint(before)
        receipts = standing(run.receipts())
        return resumed(run, now, old, receipts, workers=workers, progress=progress)
    except (SurgeryError, *ODD) as error:
        why = error.what if isinstance(error, SurgeryError) else f"{type(error).__name__}"
        return [Verdict("", NOT_COMPARED, why)]
