"""Whether one saved step is sound, and still is what the last surgery promised."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ckptsurgeon.edits import Promise, differences
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.files.collector import collector_paused
from ckptsurgeon.formats import Disagreement, State
from ckptsurgeon.look import soundness
from ckptsurgeon.run.run import Run
from ckptsurgeon.transaction.journal import Progress


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
    return run.checkpoint(run.latest() if step is None else step).state()


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
    receipts = run.receipts()
    undone = {receipt.undoes for receipt in receipts}
    standing = [r for r in receipts if r.undoes is None and r.id not in undone]
    if promise is not None and standing and standing[-1].promise is not None:
        promised = standing[-1].promise
        if promised.step == promise.step:
            told = differences(promised, promise)
            findings += [f"receipt {standing[-1].id}: {sentence}" for sentence in told]
    return Verification(
        step,
        run.format.name,
        promise,
        sound.files,
        tuple(findings),
        level,
        sound.no_crc,
        sound.moments,
    )
