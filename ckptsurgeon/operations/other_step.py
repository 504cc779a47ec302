"""Another step that an operation takes numbers from, of this run or of another one.

`folder` is that run as it was named, for the commands of a refusal; empty for the run that is
edited.
"""

from __future__ import annotations

from ckptsurgeon.errors import SurgeryError, UsageError
from ckptsurgeon.formats import Checkpoint
from ckptsurgeon.hints import command
from ckptsurgeon.run.run import Run


def refuse_incomplete(run: Run, step: int, folder: str = "") -> None:
    """Raise UsageError for a step that is not saved, or lacks a file."""
    if step not in run.steps():
        raise UsageError(
            f"step {step} is not saved in {run.root}",
            next=command("status", why="list the saved steps", run=folder),
        )
    if missing := run.format.missing(run.root, step):
        raise UsageError(
            f"step {step} lacks {missing[0]}, so nothing is taken from it",
            next=command("status", why="list the complete steps", run=folder),
        )


def refuse_unsound(checkpoint: Checkpoint, folder: str = "") -> None:
    """Raise SurgeryError where a step contradicts itself."""
    if sentences := checkpoint.contradictions():
        raise SurgeryError(
            f"step {checkpoint.step} is not sound: {sentences[0]}",
            next=command("verify", checkpoint.step, run=folder),
        )
