"""torch's schedulers, made to decay from the step at which they stand.

What a class can't hold is refused with the LambdaLR that can.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ckptsurgeon.errors import SurgeryError, count
from ckptsurgeon.formats.checkpoint import Checkpoint
from ckptsurgeon.formats.fields.values import Decay, Setting
from ckptsurgeon.formats.schedules import fairseq2, in_code, nemo
from ckptsurgeon.formats.schedules.check import one_scheduler, refuse_no_rate
from ckptsurgeon.formats.schedules.torch import (
    STRATEGIES,
    New,
    group_rates,
    one_cycle,
    settings_of,
    warnings_of,
)
from ckptsurgeon.formats.schedules.torch_classes import kind
from ckptsurgeon.plans.edits import Key

DECAYS = {
    "LinearLR": "linear", "PolynomialLR": "linear", "CosineAnnealingLR": "cosine",
    nemo.NAME: "cosine", fairseq2.POLYNOMIAL: "linear", fairseq2.COSINE: "cosine",
}  # fmt: skip
"""Class → the shape of a cooldown that it can hold; OneCycleLR holds those of STRATEGIES."""


def cooldown(checkpoint: Checkpoint, decay: Decay) -> tuple[list[Setting], list[str]]:
    """The parameters of the class that make it decay so, from its step 0 or, with OneCycleLR and
    the classes of NeMo and fairseq2, from where it stands. `decay.steps` are the scheduler's.

    Raises SurgeryError for a class that can't, with the LambdaLR that can."""
    places = one_scheduler(checkpoint)
    state = places[0].value
    name, groups = kind(state), group_rates(checkpoint, places[0])
    rates = [group["lr"] for group in groups]
    top = max(rates, default=0.0)
    if DECAYS.get(name, "") != decay.shape and not (
        name == "OneCycleLR" and decay.shape in STRATEGIES
    ):
        raise SurgeryError(
            f"{name} can't decay {decay.shape} by what its state holds",
            next=in_code.decaying(state, groups, decay),
        )
    refuse_no_rate(top)
    if name == "PolynomialLR" and decay.to:
        raise SurgeryError("PolynomialLR decays to 0", next="cooldown --to 0")
    warnings = warnings_of(state, {})
    if name == "OneCycleLR":
        new = one_cycle(*_as_cycle(state, groups, decay))
    else:
        if name == nemo.NAME:
            values = nemo.decaying(state, decay, rates)
        elif name in fairseq2.KINDS:
            values = fairseq2.decaying(name, state, decay, rates)
        else:
            values = {"last_epoch": 0, "base_lrs": rates, **_decaying(name, decay, top)}
            values |= {"_step_count": 1} if state.get("_step_count") else {}
        changed: dict[tuple[Key, ...], Any] = {(key,): value for key, value in values.items()}
        changed["_last_lr",] = rates
        new = New(rates, changed, [{"lr": rate, "initial_lr": rate} for rate in rates])
    if name in ("CosineAnnealingLR", fairseq2.COSINE):
        warnings.append(
            f"{name} rises again after its {count(decay.steps, 'step')}: end the run there"
        )
    if len(set(rates)) > 1 and name != "LinearLR":
        warnings.append(f"all param groups end at {decay.to:g}, whatever they start from")
    return list(settings_of(checkpoint, places, new)), warnings


def rebased(checkpoint: Checkpoint) -> list[Setting]:
    """A LambdaLR whose base rates are the rates of the next step: nothing where they are."""
    places = one_scheduler(checkpoint)
    rates = [group["lr"] for group in group_rates(checkpoint, places[0])]
    groups = [{"initial_lr": rate} for rate in rates]
    return list(settings_of(checkpoint, places, New(rates, {("base_lrs",): rates}, groups)))


def _decaying(name: str, decay: Decay, top: float) -> dict[str, Any]:
    if name == "LinearLR":
        return {"start_factor": 1.0, "end_factor": decay.to / top, "total_iters": decay.steps}
    if name == "PolynomialLR":
        return {"power": 1.0, "total_iters": decay.steps}
    return {"eta_min": decay.to, "T_max": decay.steps}


def _as_cycle(
    state: Mapping[str, Any], groups: Sequence[Mapping[str, float]], decay: Decay
) -> tuple[dict[str, Any], list[dict[str, float]], float, dict[str, Any]]:
    """OneCycleLR with its last phase from here on: what `one_cycle` takes."""
    now, phases = int(state["last_epoch"]), state["_schedule_phases"]
    if now < len(phases) - 1:
        raise SurgeryError(
            f"OneCycleLR stands at step {now}, too early for a last phase",
            next="roll back to a later step, or ask the trainer for the decay",
        )
    ends = [*[float(now - i) for i in range(len(phases) - 1)][::-1], float(now + decay.steps)]
    new = {**state, "_anneal_func_type": STRATEGIES[decay.shape]}
    new["_schedule_phases"] = [
        {**phase, "end_step": end} for phase, end in zip(phases, ends, strict=True)
    ]
    rates = [
        {"initial_lr": group["lr"], "max_lr": group["lr"], "min_lr": decay.to} for group in groups
    ]
    return new, rates, 1.0, {"decay": now + decay.steps + 1, "decay_style": decay.shape}
