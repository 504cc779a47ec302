"""The curves that a run's own logs hold: TensorBoard's, or the history that its trainer saved."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping

from ckptsurgeon.errors import SurgeryError, UsageError
from ckptsurgeon.logs import curves, rows
from ckptsurgeon.logs.curves import Curves
from ckptsurgeon.logs.signals import LOSS
from ckptsurgeon.logs.wandb.offline_run import OfflineRun
from ckptsurgeon.look.histories import histories
from ckptsurgeon.run.run import Run


def own(
    run: Run,
    tags: Mapping[str, str],
    *,
    branch: Collection[str] = (),
    order: str | None = None,
) -> Curves:
    """The curves of the run's log folders; where these have no loss, those of a history that the
    newest step, the run's root or a log folder holds, or of an offline run of W&B. Raises
    SurgeryError when the lineage can't be proven."""
    read = curves.of_folders(run.logs.folders(), tags, branch=branch, order=order)
    if LOSS in read.kept:
        return read
    for path in histories(run):
        with contextlib.suppress(UsageError):  # a history without a loss is none
            other = rows.of_history(path, tags)
            if LOSS in other.kept:
                return other
    for source in run.log_sources():
        if isinstance(source, OfflineRun):
            with contextlib.suppress(UsageError):
                other = rows.of_points(source.path, source.points(), tags)
                if LOSS in other.kept:
                    return other
    per_step = _samples_of_a_step(run) if read.notes else None
    if per_step is None:
        return read
    folders = run.logs.folders()
    return curves.of_folders(folders, tags, branch=branch, order=order, per_step=per_step)


def _samples_of_a_step(run: Run) -> int | None:
    """By the first and the newest saved step; None where they do not agree on one number."""
    steps, sizes = run.steps(), set()
    for step in {*steps[:1], *steps[-1:]}:
        try:
            promise = run.checkpoint(step).state().promise
        except SurgeryError:
            continue
        samples, updates = promise.consumed_samples, promise.step - 1
        if samples is None or updates < 1 or samples % updates:
            return None
        sizes.add(samples // updates)
    return sizes.pop() if len(sizes) == 1 else None
