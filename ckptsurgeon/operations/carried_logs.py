"""The logs of another run up to its step become those of this one: in a transplant, or in a fork.

What reads logs is imported where it is used: most surgeries leave them alone.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.formats import Checkpoint
from ckptsurgeon.hints import Hint, again, command
from ckptsurgeon.operations.events import marks_at
from ckptsurgeon.operations.section import Changes
from ckptsurgeon.plans.edits import AnyChange, Aside, Rewrite
from ckptsurgeon.plans.frozen import held
from ckptsurgeon.plans.log_fields import LOGS, TENSORBOARD
from ckptsurgeon.run.log_numbers import doubtful, not_known, tied
from ckptsurgeon.run.run import Run
from ckptsurgeon.transaction.home import PARTIAL

if TYPE_CHECKING:
    from ckptsurgeon.logs.marks import Marks
    from ckptsurgeon.logs.source import LogSource

OPTION = "--logs"


def reads(source: Run) -> list[Path]:
    """The logs of a run that may be carried."""
    files = source.logs.by_kind()
    return [*source.logs.files(), *files.rows, *files.wandb]


def logs(run: Run, source: Run, donor: Checkpoint, without: Hint) -> Changes:
    """The points of the source up to the step of `donor` in logs of this run, whose own of the same
    kind go to the attic: they are of updates that the step no longer has, and TensorBoard hides
    every step after the first one of a newer file. What can't be carried is named. Raises
    SurgeryError where it is not known which points of the source led to the step, with the hint
    `without`."""
    _refuse_shared(run, source, without)
    number = donor.state().step
    last = number + (source.logs.offset() or 0)
    found = tied(source, donor, source.log_sources(), number)
    at = {log: marks_at(place, donor, None) for log, place in found.at.items()}
    try:
        events = _events(run, source, at)
        others = _others(run, source, at)
    except SurgeryError as why:
        look = command(
            "truncate-logs",
            "--after",
            last,
            "--dry-run",
            run=str(source.root),
            why="what is not clear, and how to say it there",
        )
        raise SurgeryError(why.what, next=(without, look)) from None
    told = [*events.warnings, *others.warnings]
    if found.unknown:
        told.append(f"not carried: {not_known(source, found.unknown)}")
    if found.doubtful:
        told.append(doubtful(donor.step, found.doubtful))
    if not events.files and not others.files:
        none = f"{source.root} has no events up to step {last}: no logs are copied"
        return [], [none, *told]
    return [*events.changes, *others.changes], told


def _refuse_shared(run: Run, source: Run, without: Hint) -> None:
    """Raise SurgeryError where a log of the source is one of this run as well: a cut of it here
    would be one there."""
    shared = {*source.logs.all()}.intersection(run.logs.all())
    if shared:
        name = run.root.name.removesuffix(PARTIAL)
        raise SurgeryError(
            f"{min(shared)} is a log of {source.root} and of {name}: a cut of it would be one of "
            "both",
            next=(without, "name log folders of their own in `tensorboard:` of ckptsurgeon.yaml"),
        )


def leave_alone() -> Hint:
    """What to do in a transplant where they can't be carried."""
    return again(
        without=(OPTION,),
        why="leaves the logs of both runs alone",
        setting="transplant.logs=false",
    )


@held
class _Carried:
    """The files here that have what is carried, and what becomes of this run for that."""

    files: Collection[Path]
    changes: list[AnyChange]
    warnings: list[str]


def _events(run: Run, source: Run, at: Mapping[LogSource, Marks]) -> _Carried:
    """The event files."""
    from ckptsurgeon.logs import cut
    from ckptsurgeon.logs.event_folder import EventFolder, of_all

    changes: list[AnyChange] = []
    warnings: list[str] = []
    taken: set[Path] = set()
    folders = {log.path: marks for log, marks in at.items() if isinstance(log, EventFolder)}
    for folder, marks in folders.items():
        here = _counterpart(run, source, folder)
        made, sentences = cut.copies(folder, here, run.root, marks)
        taken |= {here / name for name in made}
        changes += (change for change in made.values() if change is not None)
        warnings += sentences
    if not taken:
        return _Carried([], [], [])
    own = (run.root / file for file in run.logs.event_files())
    left = [file for file in own if file not in taken]
    asides: list[AnyChange] = [Aside(run.relative(file), TENSORBOARD) for file in left]
    return _Carried(taken, [*asides, *changes], of_all(warnings, list(folders)))


def _others(run: Run, source: Run, at: Mapping[LogSource, Marks]) -> _Carried:
    """All others: those that can be carried, and the names of those that can't."""
    from ckptsurgeon.logs.event_folder import EventFolder
    from ckptsurgeon.logs.source import Carry

    made: dict[Path, Rewrite | None] = {}
    warnings: list[str] = []
    for log, marks in at.items():
        if not isinstance(log, EventFolder):
            there = Carry(run.root, marks, lambda folder: _beside(run, source, folder))
            new, sentences = log.carried(there)
            made |= new
            warnings += sentences
    suffixes = {path.suffix for path in made}
    files = run.logs.by_kind()
    own = [path for path in (*files.rows, *files.wandb) if path.suffix in suffixes]
    left = [Aside(run.relative(path), LOGS) for path in own if path not in made]
    rewritten = [change for change in made.values() if change is not None]
    return _Carried(made, [*left, *rewritten], warnings)


def _counterpart(run: Run, source: Run, folder: Path) -> Path:
    """The folder here for the event files of one there: the only one, if both runs have one; else
    the one of the same name."""
    own = run.logs.folders()
    if len(own) == len(source.logs.folders()) == 1:
        return own[0]
    return _beside(run, source, folder)


def _beside(run: Run, source: Run, folder: Path) -> Path:
    """The folder here that lies in the first log folder as that one does there."""
    there = next(root for root in source.logs.roots() if folder.is_relative_to(root))
    return run.logs.roots()[0] / folder.relative_to(there)
