"""Back to zero: Adam's moments with their step, or the dynamic loss scale."""

from __future__ import annotations

from ckptsurgeon.edits import ZEROS, AnyChange, Change
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.formats import Checkpoint
from ckptsurgeon.recipe import Recipe
from ckptsurgeon.run import Run


def reset(run: Run, recipe: Recipe, checkpoint: Checkpoint) -> tuple[list[AnyChange], list[str]]:
    """Changes for the recipe's `reset`; fp32 masters, schedule and counters are not touched.

    Moments always means exp_avg, exp_avg_sq and step together: zeroing only exp_avg_sq makes the
    first update up to 79,500 times lr, and keeping step makes it (1-β1)/√(1-β2) times lr."""
    changes: list[AnyChange] = []
    warnings: list[str] = []
    if "moments" in recipe.reset:
        changes += _moments(run, checkpoint)
        if any(isinstance(change, Change) and change.new == ZEROS for change in changes):
            warnings.append("after a moment reset the first update is 1.0 × lr in every weight")
    if "loss_scale" in recipe.reset:
        changes += _loss_scale(run, checkpoint)
    return changes, warnings


def _moments(run: Run, checkpoint: Checkpoint) -> list[AnyChange]:
    changes: list[AnyChange] = []
    for name in ("exp_avg", "exp_avg_sq"):
        places = checkpoint.locate(name)
        if not places:
            raise SurgeryError(
                f"{checkpoint.path.name} holds no {name}",
                next="reset moments needs a checkpoint with Adam's state (saved without it?)",
            )
        for place in places:
            if not checkpoint.is_zero(place):
                file = run.relative(place.file)
                changes.append(Change(file, name, "values", ZEROS, place.path))
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
