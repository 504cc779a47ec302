"""What is wrong with a run as a whole, and what to do about each of it. Reads only."""

from __future__ import annotations

import contextlib
import math

from ckptsurgeon import look
from ckptsurgeon.errors import NotUnderstood, SurgeryError, first_few, why_unread
from ckptsurgeon.formats import Checkpoint, State
from ckptsurgeon.formats.capabilities import HasReplicas
from ckptsurgeon.formats.layout import CountsSaves, HasHazards
from ckptsurgeon.hints import Hint, command
from ckptsurgeon.logs.curves import Curves
from ckptsurgeon.look import log_end, retention
from ckptsurgeon.look.advise import DIVERGED, UNKNOWN, Advice, judge
from ckptsurgeon.look.finding import Finding
from ckptsurgeon.look.launch_ranks import torn
from ckptsurgeon.look.logged import own
from ckptsurgeon.operations.replicas import drifted
from ckptsurgeon.plans.promise import Promise
from ckptsurgeon.run.run import Run
from ckptsurgeon.transaction.receipts import changed, standing

STEPS_AHEAD = 5
"""Updates whose size is shown when Adam's step was lost."""
COUNTS = ("adam step", "iteration")
SCHEDULE = {"lr", "min_lr", "warmup", "decay", "decay_style", "position"}
"""Keys of `set` that move the next rate."""


def judged(run: Run) -> Advice:
    """What advise says of the loss; where the logs can't be read it is unknown."""
    try:
        return judge(own(run, {}))
    except (SurgeryError, OSError) as error:
        return Advice(UNKNOWN, Curves({}), reason=str(error).splitlines()[0])


def diagnose(run: Run, loss: Advice | None = None) -> list[Finding]:
    """Everything that is wrong at the latest step; an empty list for a run that can go on. `loss`
    is what was `judged` of it."""
    waiting = run.interrupted()
    if waiting is not None:
        return [Finding(f"a surgery was interrupted: {waiting}", command("recover"))]
    busy = run.under_way()
    if busy is not None:
        return [Finding(f"a surgery is under way: {busy}", "wait until it ends")]
    verification = look.verify(run)
    out = list(verification.found)
    back: Hint = command("rollback", "--to", verification.step, why="moves them aside")
    if any(finding.next is None for finding in out):
        back = _way_back(run, verification.step)
        out = [Finding(finding.what, finding.next or back) for finding in out]
    newer = [step for step in run.steps() if step > verification.step]
    if newer and verification.step in run.steps():
        out.append(
            Finding(
                f"steps newer than {verification.step} are saved, up to {newer[-1]}: a trainer "
                "that picks the highest step resumes that one",
                back,
            )
        )
    if isinstance(run.format, HasHazards):
        out += [Finding(*hazard) for hazard in run.format.hazards(run.root)]
    try:
        out += _logs(run, verification.step, judged(run) if loss is None else loss)
        out += log_end.apart(run, verification.step)
    except OSError as error:  # of a server that does not answer
        next = "let its server answer, or name the folders of its logs in `tensorboard:`"
        out.append(Finding(f"the logs can't be looked at: {why_unread(error)}", next))
    out += retention.few(run, verification.step)
    with contextlib.suppress(SurgeryError):  # what can't be read is among the findings
        checkpoint = run.checkpoint(verification.step)
        with contextlib.suppress(NotUnderstood):
            out += _adam_step(run, checkpoint)
            out += _rate(run, checkpoint.state())
        out += torn(run, checkpoint)
        out += _replicas(checkpoint)
    return out


def _logs(run: Run, step: int, loss: Advice) -> list[Finding]:
    """A loss that left its course and is not back, and logs that end before `step`; nothing where
    the logs do not say."""
    out = []
    if loss.verdict == DIVERGED and loss.spike is not None:
        next = command("advise", why="where to go back to, and what others did")
        out.append(Finding(f"the loss diverged at step {loss.spike.first}", next))
    return [*out, *log_end.early(run, step, loss.curves.kept)]


def _rate(run: Run, state: State) -> list[Finding]:
    """A next rate of 0 in the middle of a run. Where the decay has ended, so has the training; and
    a warm-up begins at 0."""
    if state.promise.lr != 0 or state.step == 0 or "lr" in state.promise.one_step:
        return []
    receipts, schedule = standing(run.receipts()), state.schedule
    set_here = [r for r in receipts if SCHEDULE & (r.recipe.get("set") or {}).keys()]
    under_way = schedule is not None and int(schedule["num_steps"]) < int(schedule["decay_steps"])
    if schedule is not None and not schedule["num_steps"]:
        under_way = bool(state.promise.adam_step)  # else every update so far was skipped
    if not set_here and not under_way:
        return []
    next = command("show", why="where the rate and the position of its schedule are kept")
    if set_here:
        next = command("undo", set_here[-1].id, why=f"takes back: {set_here[-1].title}")
    what = f"the learning rate of step {state.promise.step} is 0: that update changes nothing"
    return [Finding(what, next)]


def _way_back(run: Run, step: int) -> Hint:
    for older in reversed([other for other in run.steps() if other < step]):
        if run.complete(older) and not look.verify(run, older).findings:
            return command("rollback", "--to", older, why="the newest sound step before it")
    return "restore its files from a copy: no older step here is sound"


def _adam_step(run: Run, checkpoint: Checkpoint) -> list[Finding]:
    """Adam's step is the iteration less the skipped ones, or what a surgery made of either. Where
    steps count saves, or iterations of several updates, only one that was lost is found."""
    state = checkpoint.state()
    promise, step = state.promise, state.promise.adam_step
    if step is None or promise.not_understood.keys() & {"skip", "iteration"}:
        return []
    skipped = max((int(place.value) for place in checkpoint.locate("skipped_steps")), default=0)
    skipped += promise.passed(0, state.step)
    taken = state.step - skipped
    moments = [place for name in ("exp_avg", "exp_avg_sq") for place in checkpoint.locate(name)]
    if step == 0 and taken > 0 and not all(checkpoint.is_zero(place) for place in moments):
        return [
            Finding(
                "Adam's step is 0 and its moments are not: the next updates are "
                f"{_factors(promise)} times too large",
                command("reset", "moments", why="restarts the moments too"),
            )
        ]
    if not checkpoint.numbered or _counted_anew(run):
        return []
    if step > taken and isinstance(run.format, CountsSaves):
        return []
    if abs(step - taken) > 1:  # 16-bit wrappers without ZeRO count one more
        return [
            Finding(
                f"Adam's step is {step} at iteration {state.step} with {skipped} skipped, and no "
                "surgery here changed either",
                command("show", why="where it is kept; a trainer may have restarted it"),
            )
        ]
    return []


def _counted_anew(run: Run) -> bool:
    """Whether a surgery that is in force set Adam's step, or what it is held to: the iteration, and
    the skip ranges, where some were forgotten."""
    return changed(run.receipts(), COUNTS) or any(
        receipt.recipe.get("clear_skip")
        or "moments" in receipt.recipe.get("reset", ())  # also where the step was 0 already
        for receipt in standing(run.receipts())
    )


def _replicas(checkpoint: Checkpoint) -> list[Finding]:
    """What tensor-parallel ranks should keep equal and do not; raises SurgeryError without them."""
    names = sorted(
        {item.parameter for item in drifted(checkpoint, HasReplicas.of(checkpoint).replicas())}
    )
    if not names:
        return []
    shown = first_few(names)
    return [
        Finding(
            f"parameters differ between tensor-parallel ranks that each keep them whole: {shown}",
            command("sync-replicas"),
        )
    ]


def lost_step(beta1: float, beta2: float, updates: int) -> list[float]:
    """How many times too large each of the next `updates` is when Adam's step restarts at 0 under
    moments that have long filled: √(1 - β2^k) / (1 - β1^k), where it should be 1.

    Adam, Kingma & Ba 2015, algorithm 1: both moments are divided by their bias corrections."""
    return [math.sqrt(1 - beta2**k) / (1 - beta1**k) for k in range(1, updates + 1)]


def _factors(promise: Promise) -> str:
    if promise.betas is None:
        return "up to √(1 - β2) / (1 - β1)"
    factors = (
        lost_step(promise.betas[0], promise.betas[1], STEPS_AHEAD)
        if promise.betas[0] > 0
        else [1.0]
    )
    return ", ".join(f"{factor:.3f}" for factor in factors)
