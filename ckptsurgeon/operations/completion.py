"""What a shell completes in the arguments of a command."""

from __future__ import annotations

from pathlib import Path

import typer

from ckptsurgeon.errors import SurgeryError


def saved_steps(ctx: typer.Context) -> list[str]:
    """The steps of the run, in the format that `--format` or its settings name; nothing when there
    is no run."""
    from ckptsurgeon.run.run import Run

    above = ctx.parent.params if ctx.parent else {}
    folder, format = (
        ctx.params.get(name) or above.get(name) for name in ("run_dir", "format_name")
    )
    try:
        run = Run.open(Path(folder or "."), format or "")
        return [str(step) for step in run.steps()]
    except (SurgeryError, OSError):
        return []
