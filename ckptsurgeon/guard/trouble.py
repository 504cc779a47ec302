"""What is wrong with a run that trains: by its logs, its saved steps and the clock. Reads only."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path

from ckptsurgeon.guard.policy import COLD, DIVERGED, HUNG, NAN, Policy
from ckptsurgeon.look.advise.advice import DIVERGED as HAS_DIVERGED
from ckptsurgeon.look.advise.advice import Advice
from ckptsurgeon.look.histories import histories
from ckptsurgeon.look.resumed.resume import Stamps, first_save
from ckptsurgeon.plans.frozen import frozen
from ckptsurgeon.run.run import Run


@frozen
class Trouble:
    """One of the policy's causes, in a sentence; where it began, and what moved first. `status` is
    that of a trainer which has ended, where it is known."""

    cause: str
    what: str
    step: int | None = None
    signal: str = ""
    status: int | None = None


def of_the_loss(diagnosis: Advice) -> Trouble | None:
    """A divergence, as advise sees it."""
    from ckptsurgeon.report.advice import verdict

    spike = diagnosis.spike
    if diagnosis.verdict != HAS_DIVERGED or spike is None:
        return None
    lost = spike.broken is not None or any(sign.rule == "nan" for sign in spike.signs)
    signal = spike.signs[0].signal if spike.signs else spike.signal
    return Trouble(NAN if lost else DIVERGED, verdict(diagnosis), spike.first, signal)


def of_silence(run: Run, policy: Policy, since: float, also: Sequence[Path]) -> Trouble | None:
    """No log and no step was written to for as long as the policy says, nor since that time."""
    silent = time.time() - max(since, last_word(run, also))
    if silent < 60 * policy.hung:
        return None
    long = f"{silent / 60:.0f} minutes" if silent >= 120 else f"{silent:.0f} seconds"
    return Trouble(HUNG, f"nothing was logged or saved for {long}")


def last_word(run: Run, also: Sequence[Path]) -> float:
    """When a log, a pointer or the newest step was written to last (Unix time); 0 where none is."""
    steps = run.steps()[-1:]
    saved = [file for step in steps for file in run.format.files(run.root, step)]
    return written([*logs(run), *also, *saved, *(run.root / name for name in run.pointers())])


def logs(run: Run) -> Sequence[Path]:
    """The run's own logs."""
    return [*run.logs.files(), *chain.from_iterable(histories(run))]


def written(files: Iterable[Path]) -> float:
    """When the newest of them was written to; 0 where none is there."""
    newest = 0.0
    for file in files:
        with contextlib.suppress(OSError):
            newest = max(newest, file.stat().st_mtime)
    return newest


def of_the_first_save(run: Run, base: int, there: Stamps) -> tuple[int, Trouble | None] | None:
    """The first step that was saved after `base` and was not `there`, with what does not go on in
    it; None as long as none is."""
    saved = first_save(run.root, base, there)
    if saved is None:
        return None
    step, verdicts = saved
    cold = [each for each in verdicts if each.differs]
    if not cold:
        return step, None
    what = f"step {step} does not go on from step {base}: {cold[0].text}"
    return step, Trouble(COLD, what, step)
