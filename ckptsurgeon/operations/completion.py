"""What a shell completes in the arguments of a command."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from ckptsurgeon.errors import SurgeryError

if TYPE_CHECKING:
    from ckptsurgeon.run.run import Run

STATES = ("moments", "loss-scale")
"""What `reset` takes."""


def saved_steps(ctx: typer.Context) -> list[str]:
    """The steps of the run, ascending, in the format that `--format` or its settings name; nothing
    when there is no run."""
    run = run_of(ctx)
    return [] if run is None else [str(step) for step in run.steps()]


def surgeries(ctx: typer.Context) -> list[str]:
    """The surgeries of the run that `undo` can take back, the newest first: those in force down to
    the first whose attic was pruned."""
    from ckptsurgeon import disk
    from ckptsurgeon.run.attic import pruned
    from ckptsurgeon.transaction.receipts import standing

    run = run_of(ctx)
    if run is None:
        return []
    found = []
    for item in reversed(standing(run.receipts())):
        if disk.is_there(run.root / pruned(item.id)):
            break
        found.append(item.id)
    return found


def undone(ctx: typer.Context) -> list[str]:
    """The surgeries of the run that `redo` takes, the newest first."""
    from ckptsurgeon.transaction.receipts import taken_back

    run = run_of(ctx)
    if run is None:
        return []
    done = run.receipts()
    back = taken_back(done)
    return [item.id for item in reversed(done) if item.undoes is None and item.id in back]


def states() -> list[str]:
    """Of STATES."""
    return [*STATES]


def run_of(ctx: typer.Context) -> Run | None:
    """The run of what is typed so far."""
    from ckptsurgeon.run.run import Run

    above = ctx.parent.params if ctx.parent else {}
    folder, format = (
        ctx.params.get(name) or above.get(name) for name in ("run_dir", "format_name")
    )
    try:
        return Run.open(Path(folder or "."), format or "")
    except (SurgeryError, OSError):
        return None
