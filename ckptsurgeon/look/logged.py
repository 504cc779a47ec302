"""The curves that a run's own logs hold: TensorBoard's, or the history that its trainer saved."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from ckptsurgeon import disk
from ckptsurgeon.errors import SurgeryError, UsageError
from ckptsurgeon.logs import curves, rows
from ckptsurgeon.logs.curves import Branch, Curves
from ckptsurgeon.logs.databases import found
from ckptsurgeon.logs.mlruns.run_folder import RunFolder
from ckptsurgeon.logs.signals import LOSS
from ckptsurgeon.logs.source import LogSource
from ckptsurgeon.logs.wandb import offline_run
from ckptsurgeon.look.histories import histories
from ckptsurgeon.plans.edits import Move, Replace, Rewrite
from ckptsurgeon.plans.log_fields import LOGS
from ckptsurgeon.plans.plan import Receipt
from ckptsurgeon.run.attic import folders
from ckptsurgeon.run.run import Run
from ckptsurgeon.transaction.home import is_database, is_log, is_rows, is_wandb, stored_run

SAYS = "--log FILE reads it, with --tag loss=NAME, and --step NAME for what counts steps"


def own(
    run: Run,
    tags: Mapping[str, str],
    *,
    branch: Collection[str] = (),
    order: str | None = None,
) -> Curves:
    """The curves of the run's log folders; where these have no loss, those of a history that the
    newest step, the run's root or a log folder holds, or of a tracker's own files. Raises
    SurgeryError when the lineage can't be proven."""
    read = curves.of_folders(run.logs.folders(), tags, branch=branch, order=order)
    if LOSS in read.kept:
        return read
    unclear: list[str] = []
    histories_ = (partial(rows.of_history, starts, tags) for starts in histories(run))
    points = (partial(_of_points, source, tags) for source in run.log_sources())
    for other_log in (*histories_, *points):
        try:
            other = other_log()
        except rows.Unclear as error:
            if error.names:
                unclear.append(f"{error.what}; {SAYS}")
        except UsageError:  # a history without a loss is none
            pass
        else:
            if LOSS in other.kept:
                return other
    per_step = _samples_of_a_step(run) if read.notes else None
    if per_step is None:
        if not read.names:
            unclear += [
                f"{name} may be a log by its {what.by}: --log {name} reads it"
                for name, what in run.logs.unnamed()
            ]
        return replace(read, notes=(*read.notes, *unclear))
    folders = run.logs.folders()
    return curves.of_folders(folders, tags, branch=branch, order=order, per_step=per_step)


def _of_points(source: LogSource, tags: Mapping[str, str]) -> Curves:
    return rows.of_points(source.path, source.points(), tags)


def kept_by(run: Run, receipt: Receipt, surgery: Receipt, after: int) -> Branch:
    """The curves after step `after` in what `receipt` keeps of logs that are no event files, as
    they were before it: those of the first log that has a loss there. It is of `surgery`, or of an
    undo of it."""
    files = [path for folder in folders(run, receipt.id) for path in sorted(disk.below(folder))]
    named = (path for path in files if is_rows(str(path)))
    tables = dict.fromkeys([*named, *_tables(run, receipt, surgery)])
    offline = [path for path in files if is_wandb(path.name)]
    databases = [path for path in files if is_database(path.name)]
    sources = [
        *offline_run.found(offline, run.root),
        *found.found(databases, run.root, run.logs.tracker_runs()),
    ]
    stored = dict.fromkeys(own for file in files if (own := stored_run(str(file))) is not None)
    histories = (partial(rows.of_history, [path], {}) for path in tables)
    points = (partial(rows.of_points, own.path, own.points(), {}) for own in sources)
    metrics = (
        partial(rows.of_points, folder, RunFolder(folder).values(), {})
        for folder in map(Path, stored)
    )
    for read in (*histories, *points, *metrics):
        with contextlib.suppress(UsageError):
            if LOSS in (branch := curves.after(read().kept, after)):
                return branch
    return {}


def _tables(run: Run, receipt: Receipt, surgery: Receipt) -> Iterator[Path]:
    """The tables and lines that the receipt says it keeps, whatever they are called in the attic;
    where that is gone, what was cut off them."""
    logs = (c for c in surgery.changes if isinstance(c, Rewrite) and c.field == LOGS)
    is_new = {c.file: c.new_file for c in logs if is_rows(c.file) or not is_log(c.file)}
    for edit in receipt.inverse:
        if isinstance(edit, Replace) and is_new.get(edit.file) is False:
            yield run.root / edit.staged
    for edit in receipt.inverse:
        if isinstance(edit, Move) and is_new.get(edit.src):
            yield run.root / edit.src


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
