"""What to say of a run by its logs: the verdict, the evidence, and where to go back to."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace

from ckptsurgeon.errors import SurgeryError, count, first_few
from ckptsurgeon.logs.curves import Curve, Curves
from ckptsurgeon.logs.signals import LOSS
from ckptsurgeon.look import soundness
from ckptsurgeon.look.advise.candidates import Candidate, back_to, candidates, not_tied
from ckptsurgeon.look.advise.courses import from_nought
from ckptsurgeon.look.advise.remedies import Remedy, remedies
from ckptsurgeon.look.advise.signs import Spike
from ckptsurgeon.look.advise.spikes import find, needed, unjudged
from ckptsurgeon.plans.frozen import frozen
from ckptsurgeon.run.run import Run

DIVERGED, RECOVERED, HEALTHY, OPEN, UNKNOWN = (
    "diverged", "recovered", "healthy", "too early", "unknown"
)  # fmt: skip
GROWS = (
    "the loss began at 0, as that of a policy (GRPO, PPO), and has risen: nothing tells that from "
    "a divergence; --rule cusum calls it one"
)


@frozen
class Advice:
    """The `verdict` is one of the five words above, `reason` why there is none. Of a run that has
    `diverged`, `spike` is the one to undo, `back_to` the saved step to go back to, and `remedies`
    are recipes that do it, the best first. `newest` is the last logged step; the first `unjudged`
    of the points have too few before them for the rules."""

    verdict: str
    curves: Curves
    spikes: tuple[Spike, ...] = ()
    spike: Spike | None = None
    newest: int | None = None
    points: int = 0
    unjudged: int = 0
    candidates: tuple[Candidate, ...] = ()
    back_to: int | None = None
    remedies: tuple[Remedy, ...] = ()
    reason: str = ""


def advise(
    curves: Curves,
    run: Run | None = None,
    *,
    rule: str | None = None,
    level: int = soundness.MEANING,
    jobs: int = 8,
) -> Advice:
    """Judge the kept history of a run by `rule`, or by all rules that apply. Reads only.

    Without a run, or for one without checkpoints, there are neither candidates nor recipes."""
    diagnosis = judge(curves, rule)
    if diagnosis.verdict != DIVERGED or diagnosis.spike is None or run is None or run.bare:
        return diagnosis
    found = candidates(run, diagnosis.spike, curves.kept, level, jobs)
    why = not_tied(run, curves.kept)
    if why:
        curves = replace(curves, notes=(*curves.notes, why))
    to = back_to(found)
    recipes: Sequence[Remedy] = ()
    if to is not None:
        with contextlib.suppress(SurgeryError):  # a step that can't be opened is among the findings
            item = next(item for item in found if item.step == to)
            state = run.checkpoint(to).state()
            cut = None if why or state.step == item.at else item.cut
            recipes = remedies(diagnosis.spike, curves.kept, to, item.at, state, cut)
    return Advice(
        diagnosis.verdict, curves, diagnosis.spikes, diagnosis.spike, diagnosis.newest,
        diagnosis.points, diagnosis.unjudged, tuple(found), to, tuple(recipes),
    )  # fmt: skip


def judge(curves: Curves, rule: str | None = None) -> Advice:
    """The verdict alone, from the curves."""
    import numpy as np

    loss = curves.kept.get(LOSS)
    if loss is None or not len(loss):
        where = ", ".join(map(str, curves.sources)) or "the run's folders"
        has = f"; it has {first_few(curves.names)}" if curves.names else ""
        reason = (
            f"no tag in {where} is known to be the loss{has}; --tag loss=NAME says which one is"
        )
        if not curves.sources and not curves.kept:
            reason = "no logs were found in the run's folders; --tb DIR or --log FILE names them"
        if not curves.names:
            reason = next(iter(curves.notes), reason)
        return Advice(UNKNOWN, curves, reason=reason)
    newest, points = int(loss.steps[-1]), len(loss)
    spikes = tuple(find(curves.kept, rule))
    bad = [spike for spike in spikes if spike.last is None and spike.malignant]
    least = needed(rule)
    spike: Spike | None = None
    reason = ""
    if bad:
        verdict, spike = DIVERGED, bad[0]
    elif int(np.isfinite(loss.values).sum()) < least:
        verdict = UNKNOWN
        reason = f"a rule needs {count(least, 'point')} of the loss, and the log has {points}"
    else:
        waiting = [spike for spike in spikes if spike.last is None and spike.malignant is None]
        was = [spike for spike in spikes if spike.malignant]
        verdict = OPEN if waiting else RECOVERED if was else HEALTHY
        spike = waiting[0] if waiting else was[-1] if was else None
        if rule is None and spike is None and _grows(curves, loss):
            verdict, reason = UNKNOWN, GROWS
    return Advice(
        verdict, curves, spikes, spike, newest, points, unjudged(rule), reason=reason
    )  # fmt: skip


def _grows(curves: Curves, loss: Curve) -> bool:
    """Whether the loss rose from 0 so that by `cusum` it would have diverged."""
    import numpy as np

    rises = from_nought(loss.values[np.isfinite(loss.values)]) and find(curves.kept, "cusum")
    return any(spike.malignant is not False for spike in rises or ())
