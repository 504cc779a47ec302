"""Back to zero: Adam's moments with their step, or the dynamic loss scale."""

from __future__ import annotations

import math
import re

from ckptsurgeon.edits import ZEROS, AnyChange, Change
from ckptsurgeon.errors import SurgeryError, UsageError
from ckptsurgeon.formats import Checkpoint, Place
from ckptsurgeon.formats.moments import ALL, ALSO
from ckptsurgeon.recipe.recipe import Moments, Recipe
from ckptsurgeon.run.run import Run


def reset(run: Run, recipe: Recipe, checkpoint: Checkpoint) -> tuple[list[AnyChange], list[str]]:
    """Changes for the recipe's `reset`; fp32 masters, schedule and counters are not touched.

    Moments means exp_avg, exp_avg_sq and step together, with what AMSGrad and Muon keep, unless
    `recipe.moments` confines it: zeroing only exp_avg_sq makes the first update up to 79,500 times
    lr and is refused, and keeping step makes it (1 - β1)/√(1 - β2) times lr, which is said."""
    changes: list[AnyChange] = []
    warnings: list[str] = []
    if "moments" in recipe.reset and recipe.moments != Moments():
        changes += _part(run, checkpoint, recipe.moments)
        if changes:
            warnings.append(_first_update(checkpoint, recipe.moments))
    elif "moments" in recipe.reset:
        changes += _moments(run, checkpoint)
        zeroed = any(isinstance(change, Change) and change.new == ZEROS for change in changes)
        if any(change.field == "momentum_buffer" for change in changes):
            warnings.append("the momentum of parameters that are not Adam's (Muon) begins anew too")
        if zeroed and (recipe.rewarm is None or recipe.rewarm.iterations == 0):
            warnings.append("after a moment reset the first update is 1.0 × lr in every weight")
    if "loss_scale" in recipe.reset:
        changes += _loss_scale(run, checkpoint)
    return changes, warnings


def _part(run: Run, checkpoint: Checkpoint, part: Moments) -> list[AnyChange]:
    """exp_avg alone, or the moments of some parameters; the step stays, as others share it."""
    also = [name for name in ALSO if not part.only and checkpoint.locate(name)]
    names = (part.only,) if part.only else ("exp_avg", "exp_avg_sq", *also)
    changes: list[AnyChange] = []
    known: set[str] = set()
    for name in names:
        if part.params is None:
            changes += [
                Change(run.relative(place.file), name, "values", place.zero, place.path)
                for place in _tensors(checkpoint, name)
                if not checkpoint.is_zero(place)
            ]
            continue
        fragments = checkpoint.fragments(name)
        known |= {fragment.parameter for fragment in fragments}
        changes += [
            Change(
                run.relative(place.file), f"{name} of {parameter}", "values", ZEROS, place.path,
                (start, end),
            )
            for parameter, place, start, end in fragments
            if re.search(part.params, parameter)
            if start < end and not checkpoint.is_zero(place, (start, end))
        ]  # fmt: skip
    if part.params is not None and not any(re.search(part.params, name) for name in known):
        raise UsageError(
            f"no parameter matches {part.params!r}: the {len(known)} names are "
            f"{', '.join(sorted(known)[:4])} …",
            next="ckptsurgeon reset moments --params REGEX    that matches some",
        )
    return changes


def _first_update(checkpoint: Checkpoint, part: Moments) -> str:
    """How large the first update of a weight is whose moments are 0 under a step that is not.

    Adam divides by bias corrections that are 1 by then, so a constant gradient moves the weight by
    (1 - β1) / √(1 - β2) times lr, and by less than lr if only exp_avg is 0."""
    promise = checkpoint.state().promise
    if part.only or promise.betas is None:
        return "with exp_avg at 0 the first updates are below lr, until it has filled again"
    beta1, beta2 = promise.betas
    size = (1 - beta1) / math.sqrt(1 - beta2)
    return (
        f"the step is shared and stays, so the first update of these parameters is {size:.3g} × lr "
        f"((1 - β1) / √(1 - β2))"
    )


def _tensors(checkpoint: Checkpoint, name: str) -> list[Place]:
    places = checkpoint.locate(name)
    if not places:
        raise SurgeryError(
            f"{checkpoint.path.name} holds no {name}",
            next="reset moments needs a checkpoint with Adam's state (saved without it?)",
        )
    return places


def _moments(run: Run, checkpoint: Checkpoint) -> list[AnyChange]:
    changes: list[AnyChange] = []
    for name in ALL:
        for place in checkpoint.locate(name) if name in ALSO else _tensors(checkpoint, name):
            if not checkpoint.is_zero(place):
                file = run.relative(place.file)
                changes.append(Change(file, name, "values", place.zero, place.path))
    for place in checkpoint.locate("adam_step"):
        file = run.relative(place.file)
        zero = 0.0 if isinstance(place.value, float) else 0
        changes.append(Change(file, "adam step", place.value, zero, place.path))
    return changes


def _loss_scale(run: Run, checkpoint: Checkpoint) -> list[AnyChange]:
    if not checkpoint.state().dynamic_loss_scale:
        raise SurgeryError(
            "the run has no dynamic loss scale (bf16 and fp32 train without one)",
            next="drop loss_scale from reset",
        )
    changes: list[AnyChange] = []
    for place, start in checkpoint.scaler_start():
        changes.append(
            Change(run.relative(place.file), "loss_scale", place.value, start, place.path)
        )
    return changes
