"""Saved steps from before a spike: which are sound, and how much going back to each throws away."""

from __future__ import annotations

from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.files.one_look import one_look
from ckptsurgeon.logs.curves import Branch, Curve
from ckptsurgeon.logs.signals import LOSS, SAMPLES, TOKENS
from ckptsurgeon.look import soundness
from ckptsurgeon.look.advise.signs import Spike
from ckptsurgeon.look.advise.spikes import PATIENCE
from ckptsurgeon.plans.frozen import frozen
from ckptsurgeon.run.log_numbers import logged_at
from ckptsurgeon.run.run import Run

MOST = 8
"""Steps that are looked at: those before them are further back than anybody needs."""
MARGIN = 10
"""Steps by which the first sign may be late: what was saved so shortly before it is not trusted."""
OVERFLOWED = 0.1
"""The share of the updates that may have overflowed."""
SHARE = 0.01
"""The same as a share of the steps so far; the larger of both counts."""


@frozen
class Distance:
    """What is trained again from a step on: up to the newest logged one. None: the log does not
    say it."""

    steps: int
    samples: int | None
    tokens: int | None
    hours: float | None


@frozen
class Candidate:
    """A saved step before the first sign, which the log has `at` its own count, and whether it is
    `sound` up to a level of `verify`; `findings` are what is wrong with it. `too_near`: so close to
    the first sign that it may carry it. `cut` is the last point of the log when it was saved, where
    its optimizer alone says where that is: of updates that overflowed it counts none."""

    step: int
    at: int
    cut: int | None
    sound: bool
    too_near: bool
    distance: Distance
    findings: tuple[str, ...]


@one_look()
def candidates(
    run: Run, spike: Spike, branch: Branch, level: int, jobs: int = 8
) -> list[Candidate]:
    """The MOST newest saved steps before the first sign of `spike`, newest first. A slow rise
    begins long before it can be seen."""
    margin = PATIENCE if spike.slow else max(MARGIN, round(spike.first * SHARE))
    found: list[Candidate] = []
    for step in reversed(run.steps()):
        at = _logged(run, step, spike, branch)
        if at is not None and at < spike.first and len(found) < MOST:
            bad = _findings(run, step, level, jobs)
            near = at > spike.first - margin
            cut = _cut(run, step, at, branch[LOSS])
            found.append(Candidate(step, at, cut, not bad, near, distance(branch, at), bad))
    return found


def _cut(run: Run, step: int, at: int, loss: Curve) -> int | None:
    """The last point of the log when `step` was saved, where no rollback knows it. None where the
    times say nothing, or less than the optimizer, or more than so many overflows are likely."""
    then = _saved(run, step, loss)
    if at == step or then is None:
        return None
    return then if at - loss.spacing < then <= at + max(at * OVERFLOWED, loss.spacing) else None


def _logged(run: Run, step: int, spike: Spike, branch: Branch) -> int | None:
    """Where the log has `step`, if that is before the first sign. Where its numbers are not tied to
    those of the steps the time of the save says it; where they are so by the updates alone, that
    time must not say otherwise."""
    loss = branch[LOSS]
    at = logged_at(run, step, int(loss.steps[-1]), loss.spacing)
    if at == step:
        return at if at < spike.first else None
    then = _saved(run, step, loss)
    return then if at is None or (then is not None and then >= spike.first) else at


def _saved(run: Run, step: int, loss: Curve) -> int | None:
    """The last point of `loss` when `step` was saved; None where its times do not reach there."""
    import numpy as np

    try:
        saved = run.state(step).saved_at
    except SurgeryError:
        return None
    begun, ended = float(loss.walls[0]), float(loss.walls[-1])
    if not begun <= saved <= ended:
        return None
    return int(loss.steps[int(np.searchsorted(loss.walls, saved, "right")) - 1])


def not_tied(run: Run, branch: Branch) -> str:
    """That the log counts what the saved steps do not, in a sentence; "" where that is not so."""
    loss, newest = branch[LOSS], max(run.steps(), default=0)
    last = int(loss.steps[-1])
    if logged_at(run, newest, last, loss.spacing) is not None:
        return ""
    return (
        f"not known what the numbers of the log count: it ends at {last}, and step {newest} is the "
        "newest"
    )


def back_to(found: list[Candidate]) -> int | None:
    """The newest sound one that is not too near, else None."""
    return next((item.step for item in found if item.sound and not item.too_near), None)


def distance(branch: Branch, step: int) -> Distance:
    """From the newest point of the loss back to `step`."""
    newest = int(branch[LOSS].steps[-1])
    begun, ended = branch[LOSS].time(step), branch[LOSS].time(newest)
    hours = None if begun is None or ended is None or ended < begun else (ended - begun) / 3600
    return Distance(
        newest - step, _between(branch, SAMPLES, step), _between(branch, TOKENS, step), hours
    )


def _between(branch: Branch, signal: str, step: int) -> int | None:
    curve = branch.get(signal)
    if curve is None:
        return None
    begun, ended = curve.at(step), curve.at(int(branch[LOSS].steps[-1]))
    return None if begun is None or ended is None else round(ended - begun)


def _findings(run: Run, step: int, level: int, jobs: int) -> tuple[str, ...]:
    if not run.complete(step):
        return ("incomplete",)
    try:
        return tuple(soundness.check(run.format, run.root, step, level, jobs=jobs).findings)
    except (SurgeryError, OSError) as error:
        return (getattr(error, "what", None) or str(error),)
