"""fairseq2's schedulers, which are of torch's kind: a warm-up, then the decay of each.

The rates between are a mix of base_lrs, start_lrs and final_lrs by the step alone, so a peak, a
floor, or a length has a place in the state. TriStageLR derives its start and its floor from the
peak, and they follow it.
Source: `fairseq2/optim/lr_schedulers/` of fairseq2 0.8.1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ckptsurgeon.errors import UsageError
from ckptsurgeon.formats.fields.values import Decay
from ckptsurgeon.formats.schedules.check import refuse_foreign, refuse_low_peak
from ckptsurgeon.plans.edits import Key

COSINE, POLYNOMIAL = "CosineAnnealingLR of fairseq2", "PolynomialDecayLR of fairseq2"
MYLE, NOAM, TRI_STAGE = "MyleLR of fairseq2", "NoamLR of fairseq2", "TriStageLR of fairseq2"
KINDS: Mapping[str, frozenset[str]] = {
    COSINE: frozenset(
        {"cycle_len", "cycle_mul", "num_warmup_steps", "lr_mul", "start_lrs", "final_lrs"}
    ),
    POLYNOMIAL: frozenset({"num_steps", "num_warmup_steps", "power", "start_lrs", "final_lrs"}),
    MYLE: frozenset({"num_warmup_steps", "start_lrs"}),
    NOAM: frozenset({"num_warmup_steps"}),
    TRI_STAGE: frozenset(
        {
            "num_steps", "num_stage_steps", "start_lrs", "final_lrs", "start_lr_scales",
            "final_lr_scales",
        }
    ),
}  # fmt: skip
"""Class → what its state has beside that of every scheduler of torch."""
KEPT: Mapping[str, frozenset[str]] = {
    COSINE: frozenset({"lr", "min_lr", "warmup", "decay", "position"}),
    POLYNOMIAL: frozenset({"lr", "min_lr", "warmup", "decay", "position"}),
    MYLE: frozenset({"lr", "warmup", "position"}),
    NOAM: frozenset({"lr", "warmup", "position"}),
    TRI_STAGE: frozenset({"lr", "position"}),
}
"""Recipe keys that its state can express."""
State = Mapping[str, Any]


def rates(name: str, state: State) -> list[float]:
    """The rate of each group at `last_epoch`."""
    base = [float(rate) for rate in state["base_lrs"]]
    zeros = [0.0] * len(base)
    start = [float(rate) for rate in state.get("start_lrs") or zeros]
    last = [float(rate) for rate in state.get("final_lrs") or zeros]
    now = state["last_epoch"]
    if name == TRI_STAGE:
        return _in_stages(state, base, start, last)
    warmup = state["num_warmup_steps"]
    if name == POLYNOMIAL and now >= state["num_steps"]:
        return last
    if name == NOAM:
        share = now * warmup**-1.5 if now < warmup else now**-0.5 if now else 1.0
        return [rate * share for rate in base]
    if now < warmup:
        return _mixed(start, base, now / warmup)
    if name == MYLE:
        return [rate * (warmup / now) ** 0.5 for rate in base]
    if name == POLYNOMIAL:
        left = (state["num_steps"] - now) / (state["num_steps"] - warmup)
        return _mixed(last, base, left ** state["power"])
    cycle, done = _cycle(state, now - warmup)
    share = 0.5 * (1 + math.cos(math.pi * done))
    return [rate * state["lr_mul"] ** cycle for rate in _mixed(last, base, share)]


def _mixed(first: Sequence[float], last: Sequence[float], share: float) -> list[float]:
    return [a + (b - a) * share for a, b in zip(first, last, strict=True)]


def _cycle(state: State, step: int) -> tuple[int, float]:
    """Which cycle of the cosine it is, from 0, and how much of it is done."""
    length, grows = state["cycle_len"], state["cycle_mul"]
    if grows == 1.0:
        return step // length, step % length / length
    cycle = int(math.log(1 - step / length * (1 - grows), grows))
    begun = int((1 - grows**cycle) / (1 - grows) * length)
    return cycle, (step - begun) / int(grows**cycle * length)


def _in_stages(
    state: State, base: list[float], start: list[float], last: list[float]
) -> list[float]:
    now = state["last_epoch"]
    rise, hold, fall = state["num_stage_steps"]
    if now < rise:
        return _mixed(start, base, now / rise)
    if now < rise + hold:
        return base
    if now < rise + hold + fall:
        done = (now - rise - hold) / fall
        scales = state["final_lr_scales"]
        return [rate * scale**done for rate, scale in zip(base, scales, strict=True)]
    return last


def recomputed(
    name: str, state: State, factor: float, values: Mapping[str, Any]
) -> tuple[list[float], dict[tuple[Key, ...], Any]]:
    """The rates at the position and what the state keeps, for base rates times `factor` and the
    `values` of a recipe: `decay` is the step at which the first decay ends.

    Raises SurgeryError for a state whose last rates this is not the formula of, UsageError for an
    end that comes before the warm-up's or the position."""
    refuse_foreign(state, name, [rates(name, state)])
    new = {**state, "base_lrs": [float(rate) * factor for rate in state["base_lrs"]]}
    new["last_epoch"] = values.get("position", state["last_epoch"])
    if name == TRI_STAGE:
        for key in ("start_lrs", "final_lrs"):
            new[key] = [float(rate) * factor for rate in state[key] or ()] or state[key]
    else:
        new["num_warmup_steps"] = values.get("warmup", state["num_warmup_steps"])
    if "min_lr" in values:
        new["final_lrs"] = [float(values["min_lr"])] * len(new["base_lrs"])
    if name in (COSINE, POLYNOMIAL) and values.keys() & {"warmup", "decay"}:
        new |= _ending(name, state, new, values)
    for base, floor in zip(new["base_lrs"], new.get("final_lrs") or (), strict=False):
        refuse_low_peak(base, floor)
    out = rates(name, new)
    changed: dict[tuple[Key, ...], Any] = {
        (key,): value for key, value in new.items() if value != state[key]
    }
    return out, {**changed, ("_last_lr",): out}


def decaying(name: str, state: State, decay: Decay, base: Sequence[float]) -> dict[str, Any]:
    """What makes it go from `base` at its position to `decay.to`: a warm-up that is over here, and
    one cycle of the cosine, or a polynomial of power 1."""
    refuse_foreign(state, name, [rates(name, state)])
    now = state["last_epoch"]
    ending = {"cycle_len": decay.steps, "cycle_mul": 1.0}
    if name == POLYNOMIAL:
        ending = {"num_steps": now + decay.steps, "power": 1.0}
    last = [decay.to] * len(base)
    return {"num_warmup_steps": now, "base_lrs": list(base), "final_lrs": last, **ending}


def _ending(
    name: str, state: State, new: Mapping[str, Any], values: Mapping[str, Any]
) -> dict[str, int]:
    """The length that makes the first decay end at `decay`, or where it ended before."""
    warmup = new["num_warmup_steps"]
    if name == POLYNOMIAL:
        end = values.get("decay", state["num_steps"])
    else:
        end = values.get("decay", state["num_warmup_steps"] + state["cycle_len"])
    least = max(warmup, new["last_epoch"] if "decay" in values else 0)
    if end <= least:
        raise UsageError(
            f"decay {end} is not beyond step {least}, where the warm-up ends or the run stands",
            next=f"decay counts the scheduler's steps and must be above {least}",
        )
    return {"num_steps": end} if name == POLYNOMIAL else {"cycle_len": end - warmup}
