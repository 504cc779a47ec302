"""Whether one saved step is sound, and still is what the last surgery promised."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ckptsurgeon import disk
from ckptsurgeon.errors import SurgeryError, UsageError
from ckptsurgeon.files.collector import collector_paused
from ckptsurgeon.files.one_look import one_look
from ckptsurgeon.formats import Checkpoint, Disagreement, State
from ckptsurgeon.hints import Hint, command
from ckptsurgeon.look import soundness
from ckptsurgeon.look.finding import Finding
from ckptsurgeon.plans.frozen import frozen
from ckptsurgeon.plans.promise import Promise, differences
from ckptsurgeon.progress import Progress
from ckptsurgeon.run.run import Run
from ckptsurgeon.transaction.receipts import receipt_file, set_aside, standing, with_caveats
from ckptsurgeon.workers import Workers

if TYPE_CHECKING:
    from ckptsurgeon.look.resumed.verdict import Verdict
    from ckptsurgeon.look.vitals.facts import Moment


@frozen
class Verification:
    """What `verify` found at one step; nothing means sound, as far as `level` goes. `no_crc`
    (from level 1) counts bytes that no CRC protects; `moments` are of level 4, and so are the
    sentences of `not_compared`, on what could not be held against anything. `against` is the
    earlier step that every tensor was compared with, and `since` are the verdicts on that, or on
    the counters since the step before."""

    step: int
    format: str
    promise: Promise | None
    files: int
    found: tuple[Finding, ...]
    level: int
    no_crc: int | None
    moments: Mapping[str, Moment] | None
    not_compared: tuple[str, ...] = ()
    against: int | None = None
    since: tuple[Verdict, ...] = ()

    @property
    def findings(self) -> tuple[str, ...]:
        """What is wrong, in words."""
        return tuple(finding.what for finding in self.found)


@collector_paused()
@one_look()
def inspect(run: Run, step: int | None = None) -> State:
    """One checkpoint, by default the latest, as its trainer would see it."""
    return run.state(run.latest() if step is None else step)


@collector_paused()
@one_look()
def verify(
    run: Run,
    step: int | None = None,
    *,
    level: int = soundness.MEANING,
    against: int | None = None,
    jobs: Workers = 8,
    progress: Progress | None = None,
) -> Verification:
    """Read-only check: pointers, the shards up to `level` of `soundness`, the promise of the last
    surgery when the run still stands at its step, and that none is waiting for `recover`. At level
    4 also Adam's counter since the step before, and with `against` every tensor since that step.
    Raises UsageError for `against` a step that is not saved or not an earlier one."""
    waiting = run.interrupted()
    found: list[Finding] = []
    if waiting:
        recover = command("recover")
        found.append(Finding(f"a surgery was interrupted: {waiting}: {recover}", recover))
    if step is None:
        try:
            step = run.latest()
        except SurgeryError as error:
            found.append(Finding(error.what, error.hints[0] if error.hints else None))
            saved = run.steps()
            step = max(run.complete_among(saved), default=max(saved, default=None))
            if step is None:
                raise
    if step not in run.steps():
        run.checkpoint(step)
    if against is not None:
        level = max(level, soundness.VALUES)
        run.checkpoint(against, before=step)
        if against >= step:
            raise UsageError(
                f"step {against} is not before step {step}", next=_against(run, step, against)
            )
    sound = soundness.check(
        run.format,
        run.root,
        step,
        level,
        receipts=standing(run.receipts()) if level >= soundness.VALUES else (),
        jobs=jobs,
        progress=progress,
    )
    found += map(Finding, sound.findings)
    not_compared = [] if sound.values is None else list(sound.values.not_compared)
    since: list[Verdict] = []
    if sound.checkpoint is not None and level >= soundness.VALUES:
        from ckptsurgeon.look.resumed.verdict import DIFFERS, NOT_COMPARED

        since = _since(run, sound.checkpoint, against, jobs, progress)
        found += [Finding(each.text) for each in since if each.verdict == DIFFERS]
        not_compared += [str(each) for each in since if each.verdict == NOT_COMPARED]
    promise: Promise | None = None
    try:
        if sound.checkpoint is not None:
            promise = sound.checkpoint.state().promise
    except SurgeryError as error:
        known = level >= soundness.MEANING and isinstance(error, Disagreement)
        told_already = any(finding.what == error.what for finding in found)
        if not told_already and not (known and sound.findings):
            found.append(Finding(error.what))
    if promise is not None:
        promise = with_caveats(run.receipts(), promise)
        found += _broken_promise(run, promise, whole=not sound.findings)
    return Verification(
        step=step,
        format=run.format.name,
        promise=promise,
        files=sound.files,
        found=tuple(found),
        level=level,
        no_crc=sound.no_crc,
        moments=None if sound.values is None else sound.values.moments,
        not_compared=tuple(not_compared),
        against=against,
        since=tuple(since),
    )


def _against(run: Run, step: int, other: int) -> Hint:
    """How to compare the two: the later one with the earlier; of one step, with the one before."""
    if other != step:
        return command("verify", other, "--after", step)
    before = [saved for saved in run.steps() if saved < step]
    if not before:
        return command("verify", step, why="no earlier step is saved to compare it with")
    return command("verify", step, "--after", before[-1])


def _since(
    run: Run,
    checkpoint: Checkpoint,
    against: int | None,
    jobs: Workers,
    progress: Progress | None,
) -> list[Verdict]:
    """What an earlier step says of this one: `against`, or the counters of the one before."""
    from ckptsurgeon.formats.fields.constants import ODD
    from ckptsurgeon.look.resumed.counters import counted
    from ckptsurgeon.look.resumed.resume import resumed
    from ckptsurgeon.look.resumed.verdict import NOT_COMPARED, Verdict

    receipts = standing(run.receipts())
    if against is None:
        earlier = run.complete_among(s for s in run.steps() if s < checkpoint.step)
        if not earlier:
            return []
        try:
            return [counted(checkpoint, run.checkpoint(earlier[-1]), receipts)]
        except (SurgeryError, *ODD):  # what is wrong with the other step is not wrong with this
            return [Verdict("", NOT_COMPARED, f"step {earlier[-1]}, which can't be read")]
    before = run.checkpoint(against)
    return resumed(run, checkpoint, before, receipts, workers=jobs, progress=progress)


def _broken_promise(run: Run, actual: Promise, whole: bool) -> list[Finding]:
    """How the disk differs from the newest promise in force, if that is for the same next step. Of
    a step that is not `whole` only values that it still has: the others are lost with a shard."""
    receipts = standing(run.receipts())
    newest = receipts[-1].id if receipts else ""
    if lost := {id: wrong for id, wrong in run.damaged_receipts().items() if id > newest}:
        return [
            Finding(f"{wrong}: what surgery {id} promised is not known", set_aside(path))
            for id, wrong in lost.items()
            if disk.is_file(path := run.root / receipt_file(id))  # else the user has set it aside
        ]
    promised = receipts[-1].promise if receipts else None
    if promised is None or promised.step != actual.step:
        return []
    if not whole:
        gone: dict[str, Any] = {n: None for n in Promise.values() if getattr(actual, n) is None}
        promised = replace(promised, **gone)
    look = command("log", why="what was done; undo takes the last of it back")
    return [
        Finding(f"receipt {receipts[-1].id}: {text}", look)
        for text in differences(promised, actual)
    ]
