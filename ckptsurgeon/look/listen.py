"""The word of a trainer that was started by hand: what it printed or logged, and the promise."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from ckptsurgeon import disk
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.hints import again
from ckptsurgeon.logs.printed import own_loop, points
from ckptsurgeon.logs.printed.comparison import Comparison, Expected, after
from ckptsurgeon.logs.printed.families import OWN, Family, families
from ckptsurgeon.logs.printed.stated import LoggedUpdate
from ckptsurgeon.look.expected import expected
from ckptsurgeon.run.run import CONFIG, Run
from ckptsurgeon.transaction import receipts


def listen(
    run: Run, step: int | None = None, *, log: Path | None = None, folder: Path | None = None
) -> Comparison:
    """What the trainer says of its first updates after `step` in the file `log` and in the logs
    below `folder`, held against the promise of that step. Reads only.

    By default it is the step of the last surgery if that is still saved, else the latest one.
    Raises SurgeryError where neither says anything of an update after it."""
    if step is None:
        step = _step(run)
    if log is not None:
        _refuse_silent(run, step, log)
    bundled = disk.is_file(run.root / CONFIG) and run.settings.get("relaunch") is None
    speakers = families(run.format.name, own=bundled)
    known = expected(run, step)
    told = _sources(run, log, folder, speakers)
    comparison = _heard(known, told)
    if not any(told) and not bundled:
        own = [own_loop.from_one(each, step) for each in _sources(run, log, folder, (OWN,))]
        comparison = _heard(known, own)
    if not comparison.lines:
        where = " and ".join(str(path) for path in (log, folder) if path is not None)
        names = ", ".join(speaker.name for speaker in speakers) or "no trainer that is known here"
        raise SurgeryError(
            f"{where}: nothing in it is of an update after step {step}, read as {names}",
            untouched="nothing was written",
            next="its output from that start on, with the step and the lr of each update in a line",
        )
    return comparison


def _refuse_silent(run: Run, step: int, log: Path) -> None:
    """Raise SurgeryError for a file that was not written to since the last surgery on this step: of
    what its lines are, no number tells. The surgery's time is the earlier one of this host's clock
    and of the disk's, which a file server may have set."""
    standing = receipts.standing(run.receipts())
    last = next((r for r in reversed(standing) if r.promise and r.promise.step - 1 == step), None)
    with contextlib.suppress(OSError, ValueError):
        if last is None:
            return
        done = (run.root / receipts.receipt_file(last.id)).stat().st_mtime
        if log.stat().st_mtime < min(done, datetime.fromisoformat(last.when).timestamp()):
            raise SurgeryError(
                f"{log} was not written to since surgery {last.id}: the trainer says nothing there "
                "of what it loaded after it",
                untouched="nothing was written",
                next=again(why="once the trainer has begun"),
            )


def _sources(
    run: Run, log: Path | None, folder: Path | None, speakers: Sequence[Family]
) -> list[list[LoggedUpdate]]:
    """The statements in the file, and in each folder of logs that no surgery made for a branch."""
    found = [] if log is None else [list(points.in_file(log, speakers))]
    if folder is not None:
        branches = run.logs.branches()
        below = (here for here in points.below(folder.resolve()) if here not in branches)
        found += [list(points.in_folder(here, speakers)) for here in below]
    return found


def _heard(known: Expected, sources: Sequence[Sequence[LoggedUpdate]]) -> Comparison:
    """What each source says of its start after the checkpoint, compared."""
    comparison = Comparison(known)
    for statements in sources:
        part = Comparison(known)
        for statement in after(statements, known):
            part.feed(statement)
        comparison.add(part)
    return comparison


def _step(run: Run) -> int:
    standing = receipts.standing(run.receipts())
    steps = [r.promise.step - 1 for r in standing[-1:] if r.promise is not None]
    return (
        steps[0] if steps and run.complete(steps[0]) and steps[0] in run.steps() else run.latest()
    )
