"""What a shell completes in the arguments of a command."""

from __future__ import annotations

from pathlib import Path

import typer

from ckptsurgeon.errors import SurgeryError


def saved_steps(ctx: typer.Context) -> list[str]:
    """The steps of the run, or nothing when there is no run."""
    from ckptsurgeon.run.run import Run

    above = ctx.parent.params if ctx.parent else {}
    folder = ctx.params.get("run_dir") or above.get("run_dir") or Path()
    try:
        return [str(step) for step in Run.open(Path(folder)).steps()]
    except (SurgeryError, OSError):
        return []
