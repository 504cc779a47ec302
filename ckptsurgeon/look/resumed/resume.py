"""Whether a saved step goes on from an earlier one: every verdict that the two allow."""

from __future__ import annotations

from collections.abc import Sequence

from ckptsurgeon.formats import Checkpoint
from ckptsurgeon.look.resumed import counters, tensors
from ckptsurgeon.look.resumed.verdict import Verdict
from ckptsurgeon.plans.plan import Receipt
from ckptsurgeon.progress import Progress
from ckptsurgeon.run.run import Run


def resumed(
    run: Run,
    now: Checkpoint,
    before: Checkpoint,
    receipts: Sequence[Receipt],
    *,
    threads: int = 8,
    progress: Progress | None = None,
) -> list[Verdict]:
    """Counters, data, rate and every tensor of `now`, held against those of `before`. `receipts`
    are the standing surgeries. Raises SurgeryError for a file that can't be read."""
    rate = counters.highest_rate(run, now, before)
    return [
        counters.counted(now, before, receipts),
        counters.of_the_data(now, before, receipts),
        counters.of_the_rate(run, now, before, receipts),
        *tensors.compared(now, before, receipts, rate, threads=threads, progress=progress),
    ]
