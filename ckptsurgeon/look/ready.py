"""What the next start of the trainer loads, and whether it is sound. Reads only."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.files.collector import collector_paused
from ckptsurgeon.formats.fields.constants import SAFE, TORCH
from ckptsurgeon.formats.fields.values import OUTLIVES, Rival
from ckptsurgeon.formats.layout import resumes
from ckptsurgeon.hints import DRY_RUN, Hint, again, command
from ckptsurgeon.look import soundness
from ckptsurgeon.look.finding import Finding
from ckptsurgeon.look.verify import verify
from ckptsurgeon.plans.frozen import frozen
from ckptsurgeon.progress import Progress
from ckptsurgeon.run.run import Run


@frozen
class Readiness:
    """What the next start loads: `step`, None where the pointers name no one step or none is saved.
    It is ready without a finding, as far as `level` goes, or where it starts `from_scratch`.
    `sound` is the newest sound step that is not newer than what the start would load, or None: what
    a repair leads to. It is looked for only where the start is not ready. `receipt` is the repair
    that was made."""

    level: int
    step: int | None = None
    path: Path | None = None
    found: tuple[Finding, ...] = ()
    sound: int | None = None
    from_scratch: bool = False
    receipt: str | None = None

    @property
    def ready(self) -> bool:
        """Whether the trainer may start."""
        return not self.found

    @property
    def next(self) -> Hint:
        """What helps where it is not ready."""
        if self.sound is not None and self.sound != self.step:
            why = f"leads it to step {self.sound}, which is sound"
            return again("--repair", without=[*DRY_RUN, "--repair"], why=why)
        given = (finding.next for finding in self.found if finding.next)
        return next(given, command("doctor", why="what is wrong, and what helps"))


def nothing_saved(where: Path, level: int, from_scratch: bool) -> Readiness:
    """Of a run without any step."""
    if from_scratch:
        return Readiness(level, from_scratch=True)
    next = again("--or-from-scratch", why="if it is to start from scratch")
    return Readiness(level, found=(Finding(f"no step is saved in {where}", next),))


def may_hold_steps(folder: Path) -> bool:
    """Whether a file below `folder`, in which no run is recognized, has a name of weights: a start
    from scratch may write over them. Raises OSError for a folder that can't be listed."""
    from ckptsurgeon.files.dcp import METADATA

    def refused(error: OSError) -> None:
        raise error

    return any(
        name.endswith((*TORCH, SAFE, ".distcp")) or name == METADATA
        for _, _, names in os.walk(folder, onerror=refused)
        for name in names
    )


@collector_paused()
def ready(
    run: Run,
    *,
    level: int = soundness.MEANING,
    from_scratch: bool = False,
    jobs: int = 8,
    progress: Progress | None = None,
) -> Readiness:
    """Look at the pointers, and at the one step that they lead to as `verify` does; further steps
    are opened only where that is not sound, and at level 4 the one before, from which every tensor
    must go on. Raises InterruptedSurgery where one waits for
    `recover`, SurgeryError while one is under way."""
    run.refuse_interrupted()
    if not run.steps() and not any(step is not None for step in run.pointers().values()):
        return nothing_saved(run.root, level, from_scratch)
    found: list[Finding] = []
    step = None
    try:
        step = run.latest()
    except SurgeryError as error:
        found.append(Finding(error.what, error.hints[0] if error.hints else None))
    if step is not None:
        found += verify(run, step, level=level, jobs=jobs, progress=progress).found
        found += _shadows(run, step)
    if step is not None and level >= soundness.VALUES and not found:
        found += _cold(run, step, jobs, progress)
    if not found and step is not None:
        return Readiness(level, step, path(run, step))
    return Readiness(level, step, found=tuple(found), sound=_newest_sound(run, level, jobs))


def _cold(run: Run, step: int, jobs: int, progress: Progress | None) -> Iterable[Finding]:
    """What says that the trainer did not go on from the step before: its optimizer is not there."""
    from ckptsurgeon.look.resumed.resume import held

    before = run.complete_among(saved for saved in run.steps() if saved < step)
    if not before:
        return
    look = command("verify", step, "--after", before[-1], why="all that the two steps say")
    for verdict in held(run, step, before[-1], workers=jobs, progress=progress):
        if verdict.differs:
            yield Finding(
                f"step {step} does not go on from step {before[-1]}: {verdict.text}", look
            )


def _shadows(run: Run, step: int) -> Iterable[Finding]:
    """What the trainer would load in place of `step`."""
    for rival in shadows(run, step):
        back = command("rollback", "--to", step, why="moves it to the attic")
        yield Finding(f"{rival.what}, and {rival.harm.format(step)}", rival.remedy or back)


def shadows(run: Run, step: int) -> list[Rival]:
    """What the trainer would load in place of `step`, or may, although the pointers name that."""
    return [each for each in run.format.rivals(run.root, step) if each.harm != OUTLIVES]


def _newest_sound(run: Run, level: int, jobs: int) -> int | None:
    """Not newer than what any pointer names: which of several a trainer goes by is its affair.
    Without a pointer that names a step, the newest of all."""
    named = [step for step in run.pointers().values() if step is not None]
    found = resumes(run.format, run.root)
    limit = min(named, default=found)
    for step in reversed(run.steps()):
        if (limit is None or step <= limit) and run.complete(step):
            try:
                checked = soundness.check(run.format, run.root, step, level, jobs=jobs)
                run.checkpoint(step).state()
            except SurgeryError:
                continue
            if not checked.findings:
                return step
    return None


def path(run: Run, step: int) -> Path:
    """What a launcher's `--resume` takes: the file or the folder that is `step`."""
    entries, folder = run.entries(step), run.directory(step)
    if len(entries) == 1:
        return entries[0]
    return folder if folder != run.root else (entries or run.format.files(run.root, step))[0]
