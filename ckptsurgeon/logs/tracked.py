"""A store of a tracker, which has many runs: which are meant, and what a cut makes of one."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

from ckptsurgeon.errors import SurgeryError, UsageError, share
from ckptsurgeon.logs.history import NEAR
from ckptsurgeon.logs.marks import Marks
from ckptsurgeon.logs.source import Cut, LogSource, Subject, keep_in_the_attic, leave
from ckptsurgeon.plans.edits import relative
from ckptsurgeon.plans.frozen import frozen


@frozen
class TrackedRun:
    """One run of a store: the highest step that it has, and the times of its first and its last
    point, in seconds."""

    id: str
    name: str
    highest: int
    begun: float
    ended: float


class TrackedRuns(LogSource):
    """A run is cut that has points after the step: the newest one that led there, and those that
    were begun after it from a later step, or all that `named` names. What is cut becomes a run of
    its own beside it; a run of which nothing stays gets that name itself."""

    def __init__(self, path: Path, root: Path, named: Sequence[str] = ()) -> None:
        super().__init__(path, root)
        self.named = named

    def _subject(self, run: TrackedRun) -> Subject:
        file = relative(self.path, self.root)
        return Subject(f"{file}: {run.name}", leave(file, "runs"))

    def _meant(self, runs: Sequence[TrackedRun]) -> list[TrackedRun]:
        """Those that the user named, or all."""
        if not self.named:
            return list(runs)
        return [run for run in runs if run.id in self.named or run.name in self.named]

    def _newest_of(self, runs: Sequence[TrackedRun]) -> TrackedRun | None:
        return max(self._meant(runs), key=lambda run: run.ended, default=None)

    def _passed(
        self, runs: Sequence[TrackedRun], marks: Marks, first: Callable[[TrackedRun], Sequence[int]]
    ) -> list[TrackedRun]:
        """Those with points after a step, the newest first; `first` are the steps of the first
        points of one. Raises SurgeryError where they may be two trainings, of which nothing says
        whose the step is."""
        step = marks.iteration
        runs = [run for run in self._meant(runs) if run.highest > step]
        runs.sort(key=lambda run: run.ended, reverse=True)
        if self.named:
            return runs
        for later, earlier in pairwise(runs):
            if later.begun < earlier.ended:
                why = f"were logged to at the same time, and both have points after step {step}"
                raise self._two_trainings(earlier, later, why)
        passed = [run for run in runs if min(first(run), default=step) <= step]
        if len(passed) > 1 and not _saved_during(passed[0], marks.saved_at):
            why = f"both passed step {step}, whose checkpoint was not saved while the newer one ran"
            raise self._two_trainings(passed[1], passed[0], why)
        return runs

    def _two_trainings(self, earlier: TrackedRun, later: TrackedRun, why: str) -> SurgeryError:
        return SurgeryError(
            f"{relative(self.path, self.root)}: the runs {earlier.name!r} ({earlier.id}) and "
            f"{later.name!r} ({later.id}) {why}",
            next=f"tracker_runs: [{later.id}] in ckptsurgeon.yaml says which are this run's",
        )

    def _there_is(self, name: str) -> UsageError:
        """The refusal of a cut branch whose run is there already."""
        return UsageError(
            f"{self.path} has a run {name}, so a cut branch can't be kept as that",
            next=keep_in_the_attic(f"the run {name}"),
        )


def branch(run: TrackedRun, cut: Cut) -> tuple[str, str]:
    """The id and the name of the run that the cut branch of a run becomes."""
    id = uuid.uuid5(uuid.NAMESPACE_OID, f"{run.id}-{cut.keep_as}").hex
    return id, f"{run.name}-{cut.keep_as}"


def note(stay: int, total: int, run: TrackedRun, cut: Cut) -> str:
    """What a plan says of a cut."""
    text = (
        f"{run.name}: {share(stay, total, 'point', 'stays', 'stay')}, to step {cut.marks.iteration}"
    )
    if cut.keep_as is not None:
        text += f"; {'the others become' if stay else 'it becomes'} the run {branch(run, cut)[1]}"
    return text


def _saved_during(run: TrackedRun, saved_at: float | None) -> bool:
    return saved_at is not None and run.begun - NEAR <= saved_at <= run.ended + NEAR
