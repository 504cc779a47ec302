"""A LambdaLR in the trainer's code, for what the state of its scheduler has no room for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.formats.fields.values import Decay
from ckptsurgeon.formats.schedules.check import AFTER_LOADING
from ckptsurgeon.formats.schedules.shapes import as_lambda

SHAPE = "cosine"
"""Of a schedule that starts again, where none is asked for."""
Groups = Sequence[Mapping[str, float]]


def decaying(state: Mapping[str, Any], groups: Groups, decay: Decay) -> str:
    """The cooldown `decay` of the rates that the groups have."""
    start, base = _beginning(state, groups)
    rate = max((group["lr"] for group in groups), default=0.0)
    made = as_lambda(decay.shape, start, decay.steps, rate / base, decay.to / base)
    return _words(state, made)


def restarting(state: Mapping[str, Any], groups: Groups, values: Mapping[str, Any]) -> str:
    """A warm-up to `lr` and a decay from there on, by the keys of a recipe; to 0 where it has no
    min_lr."""
    start, base = _beginning(state, groups)
    warmup, shape = values.get("warmup", 0), values.get("decay_style", SHAPE)
    first, last = values["lr"] / base, values.get("min_lr", 0.0) / base
    return _words(state, as_lambda(shape, start, values["decay"] - warmup, first, last, warmup))


def _beginning(state: Mapping[str, Any], groups: Groups) -> tuple[int, float]:
    """The step at which the LambdaLR stands, and the largest rate that it multiplies. It loads both
    from its own state; in place of another class it takes the loaded groups', and counts from 0."""
    if _loads(state):
        base, now = max(map(float, state["base_lrs"]), default=0.0), int(state["last_epoch"])
    else:
        base, now = max((g.get("initial_lr", g["lr"]) for g in groups), default=0.0), 0
    if base <= 0:
        raise SurgeryError(
            "the saved scheduler's base rate is 0, which no factor can change",
            next=AFTER_LOADING,
        )
    return now, base


def _words(state: Mapping[str, Any], function: str) -> str:
    made = f"make the scheduler LambdaLR(optimizer, {function})"
    if _loads(state):
        return f"{made}    it loads last_epoch {state['last_epoch']}"
    return f"{made} once the optimizer is loaded    it can't load the saved one, and begins at 0"


def _loads(state: Mapping[str, Any]) -> bool:
    """Whether a LambdaLR loads `state`: without this key torch's raises KeyError."""
    return "lr_lambdas" in state
