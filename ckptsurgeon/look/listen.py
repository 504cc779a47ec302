"""The word of a trainer that was started by hand: what it printed or logged, and the promise."""

from __future__ import annotations

from pathlib import Path

from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.logs.printed import points
from ckptsurgeon.logs.printed.comparison import Comparison, after
from ckptsurgeon.logs.printed.families import families
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
    bundled = (run.root / CONFIG).is_file() and run.settings.get("relaunch") is None
    speakers = families(run.format.name, own=bundled)
    comparison = Comparison(expected(run, step))
    sources: list[list[LoggedUpdate]] = []
    if log is not None:
        sources.append(list(points.in_file(log, speakers)))
    if folder is not None:
        branches = run.logs.branches()
        for here in points.below(folder.resolve()):
            if here in branches:
                continue
            sources.append(list(points.in_folder(here, speakers)))
    for statements in sources:
        part = Comparison(comparison.expected)
        for statement in after(statements, comparison.expected):
            part.feed(statement)
        comparison.add(part)
    if not comparison.lines:
        where = " and ".join(str(path) for path in (log, folder) if path is not None)
        names = ", ".join(speaker.name for speaker in speakers) or "no trainer that is known here"
        raise SurgeryError(
            f"{where}: nothing in it is of an update after step {step}, read as {names}",
            untouched="nothing was written",
            next="the file with the trainer's own output from its start on, stdout and stderr",
        )
    return comparison


def _step(run: Run) -> int:
    standing = receipts.standing(run.receipts())
    steps = [r.promise.step - 1 for r in standing[-1:] if r.promise is not None]
    return (
        steps[0] if steps and run.complete(steps[0]) and steps[0] in run.steps() else run.latest()
    )
