"""What others did in such a case, as recipes: what speaks for each, and where it is told.

Advice, not proof: no log says why a run diverged. The order is that of the evidence, and the first
one is the least that may help.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ckptsurgeon.errors import count
from ckptsurgeon.formats import State
from ckptsurgeon.logs.curves import Branch
from ckptsurgeon.logs.signals import GRAD_NORM, LOSS, LOSS_SCALE, LR
from ckptsurgeon.look.advise.signs import Spike
from ckptsurgeon.plans.frozen import frozen

AROUND = 100
"""Batches that are passed over before the first sign, and after it: PaLM took 200 to 500."""
ROSE = 1.05
"""A rate this many times that of the step to go back to has risen."""
LOWER_BETA2 = 0.95


@frozen
class Remedy:
    """A recipe as plain data. `others` say the same for trainers that can't express it so; `why`
    is what in the logs speaks for it, `source` who did it."""

    name: str
    why: str
    source: str
    recipe: Mapping[str, Any]
    others: tuple[Mapping[str, Any], ...] = ()


def remedies(
    spike: Spike, branch: Branch, back: int, at: int, state: State, cut: int | None
) -> list[Remedy]:
    """Recipes that go back to the step `back`, which the log has `at` its own count, and whose
    checkpoint is `state`; the best first. They say where the logs are `cut`, where the rollback by
    itself does not know it."""
    signals = {sign.signal: sign.step for sign in spike.signs}
    scored = [
        (_for_rate(spike, branch, at), _lower_rate(branch, spike, back, state)),
        (2 if LOSS_SCALE in signals else -1, _reset_scale(back)),
        (2 if _at_once(spike, branch) else 1, _skip(spike, back, at)),
        (2 if _norm_first(signals) else 0, _lower_beta2(back, state)),
        (0, _reset_moments(back)),
    ]
    kept = [(score, item) for score, item in scored if item is not None and score >= 0]
    found = [item for _, item in sorted(kept, key=lambda pair: -pair[0])]
    return found if cut is None else [_with_cut(item, cut) for item in found]


def _with_cut(remedy: Remedy, at: int) -> Remedy:
    """The same with the logs cut `at` their own count, where the number of the step is another."""
    cut = {"tensorboard": {"truncate": False}, "logs": {"after": at}}
    forms = tuple({**each, **cut} for each in remedy.others)
    return replace(remedy, recipe={**remedy.recipe, **cut}, others=forms)


# --- what speaks for what ------------------------------------------------------------------------


def _for_rate(spike: Spike, branch: Branch, at: int) -> int:
    """3 where the rate has risen since the step to go back to, else 0."""
    rate = branch.get(LR)
    before, then = (rate.at(at), rate.at(spike.first + 1)) if rate else (None, None)
    return 3 if before and then and then > ROSE * before else 0


def _at_once(spike: Spike, branch: Branch) -> bool:
    """Whether the first bad loss is at least half as high as the worst: one batch did it."""
    import numpy as np

    if spike.level is None or spike.peak is None:
        return False
    loss = branch[LOSS]
    k = int(np.searchsorted(loss.steps, spike.signs[0].step))
    first = float(np.nanmax(loss.values[k : k + 2], initial=-np.inf))
    return first - spike.level >= 0.5 * (spike.peak - spike.level)


def _norm_first(signals: Mapping[str, int]) -> bool:
    return GRAD_NORM in signals and signals[GRAD_NORM] < signals.get(LOSS, 1 << 60)


# --- the recipes ---------------------------------------------------------------------------------


def _skip(spike: Spike, back: int, at: int) -> Remedy:
    begin, end = max(at + 1, spike.first - AROUND), spike.first + AROUND
    span = f"steps {begin} to {end}"
    why = f"leave out the data of {span}: from the same weights, other data may train well"
    base: dict[str, Any] = {"rollback": {"to": back}, "skip": [f"{begin}-{end}"]}
    return Remedy(
        "skip the data",
        why,
        'PaLM (arXiv 2204.02311), section 5.1, "Training instability"',
        base,
        ({**base, "skip_by_counters": True},),
    )


def _lower_rate(branch: Branch, spike: Spike, back: int, state: State) -> Remedy:
    """Half of the peak. In a warm-up that still climbs: half of the rate at `back`, and the climb
    ends there."""
    schedule = state.schedule
    values: dict[str, Any] = {"lr": "0.5x"}
    why = "half the rate"
    if schedule is not None and state.promise.lr:
        now, warmup = int(schedule["num_steps"]), int(schedule["warmup_steps"])
        if 0 < now < warmup:
            rate = float(f"{state.promise.lr / 2:.3g}")
            values = {"lr": rate, "warmup": now}
            if float(schedule["min_lr"]) > rate:
                values["min_lr"] = rate
            why = f"end the warm-up here, at half of the rate of step {back}"
    rate_curve = branch.get(LR)
    at = None if rate_curve is None else rate_curve.at(spike.first)
    shown = "" if at is None else f"; it was {at:.3g} at step {spike.first}"
    return Remedy(
        "lower the lr",
        why + shown,
        "GLM-130B, logs/main-log-en.md, 2022-06-02 15:00; OPT-175B and IDEFICS halved theirs too",
        {"rollback": {"to": back}, "set": values},
    )


def _reset_scale(back: int) -> Remedy:
    return Remedy(
        "reset the loss scale, lower the lr",
        "the loss scale fell: reset it, and halve the rate so that it holds",
        "OPT-175B logbook, runs 12.17-12.34",
        {"rollback": {"to": back}, "reset": ["loss_scale"], "set": {"lr": "0.5x"}},
    )


def _lower_beta2(back: int, state: State) -> Remedy | None:
    betas = state.promise.betas
    if betas is None or len(betas) < 2 or betas[1] <= LOWER_BETA2:
        return None
    return Remedy(
        "lower beta2",
        f"beta2 {betas[1]:g} averages over {count(round(1 / (1 - betas[1])), 'update')}: "
        "it is late when gradients grow",
        'bigscience, train/tr8-104B-wide/chronicles.md, "Experiment 4"',
        {"rollback": {"to": back}, "set": {"beta2": LOWER_BETA2}},
    )


def _reset_moments(back: int) -> Remedy:
    base: dict[str, Any] = {"rollback": {"to": back}, "reset": ["moments"]}
    return Remedy(
        "reset the moments, re-warm",
        "if nothing else helps: forget what Adam remembers, and warm the rate up again",
        "SPAM (arXiv 2501.06842): a warm-up of 150 steps after each reset; "
        'bigscience, train/tr8b-104B/chronicles.md, "Embed-Norm Experiment 6"',
        {**base, "rewarm": {"iterations": 150, "kind": "ramp"}},
        (base,),
    )
