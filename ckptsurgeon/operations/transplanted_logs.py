"""The event files of a transplant: the curves of the source up to its step become the new run's.

What reads event files is imported where it is used: most transplants leave them alone.
"""

from __future__ import annotations

from pathlib import Path

from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.formats import Checkpoint
from ckptsurgeon.hints import again, command
from ckptsurgeon.operations.events import marks_of
from ckptsurgeon.operations.section import Changes
from ckptsurgeon.plans.edits import AnyChange, Aside
from ckptsurgeon.plans.log_fields import TENSORBOARD
from ckptsurgeon.run.run import Run

LOGS = "--logs"


def logs(run: Run, source: Run, donor: Checkpoint) -> Changes:
    """The events of the source up to the step of `donor` in event files of this run, whose own go
    to the attic: they are of updates that the step no longer has, and TensorBoard hides every step
    after the first one of a newer file. Raises SurgeryError where it is not known which events of
    the source led to the step."""
    from ckptsurgeon.logs import cut

    changes: list[AnyChange] = []
    warnings: list[str] = []
    taken: set[Path] = set()
    marks = marks_of(donor, donor.state().step, None)
    for folder in source.logs.folders():
        here = _counterpart(run, source, folder)
        try:
            made, sentences = cut.copies(folder, here, run.root, marks)
        except SurgeryError as why:
            raise SurgeryError(
                why.what,
                next=(
                    again(
                        without=(LOGS,),
                        why="leave the event files of both runs alone",
                        setting="transplant.logs=false",
                    ),
                    command(
                        "truncate-tb-events",
                        "--after",
                        marks.iteration,
                        "--dry-run",
                        run=str(source.root),
                        why="what is not clear, and how to say it there",
                    ),
                ),
            ) from None
        taken |= {here / name for name in made}
        changes += (change for change in made.values() if change is not None)
        warnings += sentences
    if not taken:
        return [], [f"{source.root} has no events up to step {marks.iteration}: no logs are copied"]
    own = (run.root / file for file in run.logs.event_files())
    left = [file for file in own if file not in taken]
    asides: list[AnyChange] = [Aside(run.relative(file), TENSORBOARD) for file in left]
    return [*asides, *changes], warnings


def _counterpart(run: Run, source: Run, folder: Path) -> Path:
    """The folder here for the event files of one there: the only one, if both runs have one; else
    the one of the same name."""
    own = run.logs.folders()
    if len(own) == len(source.logs.folders()) == 1:
        return own[0]
    there = next(root for root in source.logs.roots() if folder.is_relative_to(root))
    return run.logs.roots()[0] / folder.relative_to(there)
