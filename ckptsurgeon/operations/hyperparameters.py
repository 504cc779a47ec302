"""Wanted hyperparameters: lr schedule, betas, eps, weight decay, clipping, seed, loss scale."""

from __future__ import annotations

from typing import Any

from ckptsurgeon.edits import AnyChange, Change
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.formats import Checkpoint, Place
from ckptsurgeon.recipe.recipe import Recipe
from ckptsurgeon.run.run import Run

SCHEDULE = ("lr", "min_lr", "warmup", "decay", "decay_style", "position")
LEAP = 10.0
"""A peak that becomes so many times larger is pointed out."""


def hyperparameters(
    run: Run, recipe: Recipe, checkpoint: Checkpoint
) -> tuple[list[AnyChange], list[str]]:
    """Changes for the recipe's `set`, in every place of every shard.

    What the format does not keep is refused with the trainer's flag to use instead."""
    wanted = recipe.set.given()
    if not wanted:
        return [], []
    surgeon = _Setter(run, checkpoint)
    surgeon.schedule(wanted)
    for key in ("beta1", "beta2"):
        if key in wanted:
            surgeon.beta(int(key[-1]) - 1, wanted[key])
    if "eps" in wanted:
        surgeon.groups("eps", wanted["eps"])
    if "weight_decay" in wanted:
        surgeon.groups("weight_decay", wanted["weight_decay"])
    for key in ("clip_grad", "seed"):
        if key in wanted:
            surgeon.flagged(key, wanted[key])
    if "loss_scale" in wanted:
        surgeon.loss_scale(wanted["loss_scale"])
    if "beta2" in wanted and "moments" not in recipe.reset:
        surgeon.warn_young_moments(wanted["beta2"])
    if "lr" in wanted:
        surgeon.warn_leap(wanted["lr"])
    return list(surgeon.changes.values()), surgeon.warnings


class _Setter:
    """The changes so far; a later one to the same place replaces the earlier (beta1, beta2)."""

    def __init__(self, run: Run, checkpoint: Checkpoint) -> None:
        self.run = run
        self.checkpoint = checkpoint
        self.changes: dict[tuple[Any, ...], AnyChange] = {}
        self.warnings: list[str] = []

    def put(self, field: str, place: Place, new: Any) -> None:
        """Keeps the place's type: an int field stays an int where the value is whole."""
        if isinstance(place.value, int) and isinstance(new, float) and new.is_integer():
            new = int(new)
        file = self.run.relative(place.file)
        change = Change(file, field, place.value, new, place.path)
        earlier = self.changes.get((file, place.path))
        if isinstance(earlier, Change):
            change = Change(file, earlier.field, earlier.old, new, place.path)
        self.changes[(file, place.path)] = change

    def schedule(self, wanted: dict[str, Any]) -> None:
        """lr, min_lr, warmup, decay, decay_style, position, as the format keeps them."""
        given = {key: wanted[key] for key in SCHEDULE if key in wanted}
        if "position" in given and not self.checkpoint.locate("position"):
            raise SurgeryError(
                "this checkpoint keeps no position of a scheduler that could be set",
                next="its trainer derives it from a counter: set iteration or consumed_samples",
            )
        if given:
            settings, warnings = self.checkpoint.reschedule(given)
            for field, place, value in settings:
                self.put(field, place, value)
            self.warnings += warnings

    def beta(self, index: int, value: float) -> None:
        for place in self._places("betas", "set betas on the trainer's command line"):
            known = self.changes.get((self.run.relative(place.file), place.path))
            betas = list(known.new if isinstance(known, Change) else place.value)  # type: ignore[arg-type]
            betas[index] = float(value)
            self.put("betas", place, type(place.value)(betas))

    def groups(self, key: str, value: float) -> None:
        """A weight decay of 0 marks biases and layer norms: such a group keeps it."""
        places = self._places(key, f"set {key} on the trainer's command line")
        if key == "weight_decay":
            places = [place for place in places if place.value != 0]
            if places and value == 0:
                self.warnings.append(
                    "with weight decay 0 in every group none says which ones should decay: "
                    "only undo brings it back"
                )
            if not places and value != 0:
                raise SurgeryError(
                    "every param group has weight decay 0, so none says which ones should decay",
                    next="set the weight decay in the trainer, which knows its parameters",
                )
        for place in places:
            self.put(key, place, value)

    def flagged(self, key: str, value: float) -> None:
        places = self.checkpoint.locate(key)
        if not any(place.wins for place in places):
            raise SurgeryError(
                f"this checkpoint does not decide {key}: the trainer's command line does",
                next=self.run.format.advise(key, value),
            )
        for place in places:
            self.put(key, place, value)

    def loss_scale(self, value: float) -> None:
        settings = self.checkpoint.rescale(value)
        if not self.checkpoint.state().dynamic_loss_scale or not settings:
            raise SurgeryError(
                "the run has no dynamic loss scale (bf16 and fp32 train without one)",
                next="drop loss_scale",
            )
        for field, place, new in settings:
            self.put(field, place, new)

    def warn_young_moments(self, beta2: float) -> None:
        promise = self.checkpoint.state().promise
        if promise.betas is None or promise.adam_step is None or promise.betas[1] == beta2:
            return
        horizon = 3 / (1 - max(beta2, promise.betas[1]))
        if promise.adam_step < horizon:
            self.warnings.append(
                f"exp_avg_sq has seen only {promise.adam_step} steps under beta2 "
                f"{promise.betas[1]:g}; the bias correction of the new one is off until about "
                f"step {horizon:.0f}"
            )

    def warn_leap(self, lr: float) -> None:
        """3e5 where 3e-5 was meant is a rate like any other, to a format."""
        state = self.checkpoint.state()
        peak = (state.schedule or {}).get("max_lr", state.peak_lr)
        if peak and lr >= LEAP * float(peak):
            self.warnings.append(
                f"the peak rises to {lr / float(peak):,.0f} times what it was: {float(peak):.3e} → "
                f"{lr:.3e}"
            )

    def _places(self, name: str, advice: str) -> list[Place]:
        places = self.checkpoint.locate(name)
        if not places:
            raise SurgeryError(f"this checkpoint keeps no {name}", next=advice)
        return places
