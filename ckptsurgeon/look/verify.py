"""Whether one saved step is sound, and still is what the last surgery promised."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ckptsurgeon.edits import Promise, differences
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.files.collector import collector_paused
from ckptsurgeon.formats import Disagreement, State
from ckptsurgeon.look import soundness
from ckptsurgeon.progress import Progress
from ckptsurgeon.run.run import Run
from ckptsurgeon.transaction.receipts import receipt_file, standing, told


@dataclass(frozen=True)
class Verification:
    """What `verify` found at one step; no findings means sound, as far as `level` goes. `no_crc`
    (from level 1) counts bytes that no CRC protects, `moments` are of level 4."""

    step: int
    format: str
    promise: Promise | None
    files: int
    findings: tuple[str, ...]
    level: int
    no_crc: int | None
    moments: Mapping[str, soundness.Moment] | None


@collector_paused()
def inspect(run: Run, step: int | None = None) -> State:
    """One checkpoint, by default the latest, as its trainer would see it."""
    return run.state(run.latest() if step is None else step)


@collector_paused()
def verify(
    run: Run,
    step: int | None = None,
    *,
    level: int = soundness.MEANING,
    jobs: int = 8,
    progress: Progress | None = None,
) -> Verification:
    """Read-only check: pointers, the shards up to `level` of `soundness`, the promise of the last
    surgery when the run still stands at its step, and that none is waiting for `recover`."""
    waiting = run.interrupted()
    findings = [f"a surgery was interrupted: {waiting}: ckptsurgeon recover"] if waiting else []
    if step is None:
        try:
            step = run.latest()
        except SurgeryError as error:
            findings.append(error.what)
            saved = run.steps()
            step = max((s for s in saved if run.complete(s)), default=max(saved, default=None))
            if step is None:
                raise
    if step not in run.steps():
        run.checkpoint(step)
    sound = soundness.check(run.format, run.root, step, level, jobs=jobs, progress=progress)
    findings += sound.findings
    promise: Promise | None = None
    try:
        if sound.checkpoint is not None:
            promise = sound.checkpoint.state().promise
    except SurgeryError as error:
        known = level >= soundness.MEANING and isinstance(error, Disagreement)
        if error.what not in findings and not (known and sound.findings):
            findings.append(error.what)
    if promise is not None:
        promise = told(run.receipts(), promise)
        findings += _broken_promise(run, promise)
    return Verification(
        step=step,
        format=run.format.name,
        promise=promise,
        files=sound.files,
        findings=tuple(findings),
        level=level,
        no_crc=sound.no_crc,
        moments=sound.moments,
    )


def _broken_promise(run: Run, actual: Promise) -> list[str]:
    """How the disk differs from the newest promise in force, if that is for the same next step."""
    receipts = standing(run.receipts())
    newest = receipts[-1].id if receipts else ""
    if lost := {id: wrong for id, wrong in run.damaged_receipts().items() if id > newest}:
        return [
            f"{wrong}: what surgery {id} promised is not known"
            for id, wrong in lost.items()
            if (run.root / receipt_file(id)).is_file()  # else the user has set it aside
        ]
    promised = receipts[-1].promise if receipts else None
    if promised is None or promised.step != actual.step:
        return []
    return [f"receipt {receipts[-1].id}: {text}" for text in differences(promised, actual)]
