"""What `set` makes of each kind of key: its changes, and what is worth a warning."""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from ckptsurgeon.errors import NotUnderstood, SurgeryError, count
from ckptsurgeon.formats import Checkpoint, Place
from ckptsurgeon.formats.capabilities import AdjustsGroups, SetsAnew
from ckptsurgeon.formats.fields.understood import understood
from ckptsurgeon.formats.schedules.check import refuse_computed
from ckptsurgeon.hints import command
from ckptsurgeon.operations.place_changes import PlaceChanges
from ckptsurgeon.plans.promise import Caveat, Promise
from ckptsurgeon.run.run import Run
from ckptsurgeon.transaction.receipts import standing

SCHEDULE = ("lr", "min_lr", "warmup", "decay", "decay_style", "position")
OF_ADAM = ("beta1", "beta2", "eps", "weight_decay")
"""What a key may have been meant to be that no param group holds."""
LEAP = 10.0
"""A peak that grows by at least this factor gets a warning."""
FALL = 1000.0
"""A peak that shrinks by at least this factor gets one, too."""
MOVED: Mapping[str, Callable[[Promise], float | None]] = {
    "lr": lambda promise: promise.lr,
    "weight_decay": lambda promise: max(promise.weight_decay or (), default=None),
    "beta1": lambda promise: None if promise.betas is None else promise.betas[0],
    "beta2": lambda promise: None if promise.betas is None else promise.betas[1],
}
"""What code may move from update to update, as a step has it."""


def short(value: object) -> str:
    """A number without digits that say nothing, as it could have been typed: 300000, 1e-05."""
    if isinstance(value, list):
        return f"[{', '.join(map(short, value))}]"
    digits = f"{value:g}" if isinstance(value, float) else str(value)
    return digits if not isinstance(value, float) or float(digits) == value else repr(value)


class Setter(PlaceChanges):
    """The changes and warnings of `set`, one method for each kind of key."""

    def __init__(self, run: Run, checkpoint: Checkpoint) -> None:
        super().__init__(run)
        self.checkpoint = checkpoint
        self.warnings: list[str] = []

    def schedule(self, values: dict[str, Any]) -> None:
        """lr, min_lr, warmup, decay, decay_style, position, as the format keeps them."""
        given = {key: values[key] for key in SCHEDULE if key in values}
        if "position" in given and not self.checkpoint.locate("position"):
            raise SurgeryError(
                "this checkpoint keeps no scheduler position to set",
                next="its trainer derives it from a counter: set iteration or consumed_samples",
            )
        if "lr" in given:
            refuse_computed(self.checkpoint)
        if given:
            settings, warnings = self.checkpoint.reschedule(given)
            for field, place, value in settings:
                self.put(field, place, value)
            self.warnings += warnings

    def beta(self, index: int, value: float) -> None:
        """One of Adam's two, in every param group."""
        key, places = f"beta{index + 1}", self.checkpoint.locate("betas")
        SetsAnew.refuse(self.checkpoint, key, value, places)
        for place in self._places("betas", self.run.format.advise_setting("betas")):
            self.put_nth("betas", place, index, float(value))
        own: list[Place] = []
        with contextlib.suppress(NotUnderstood), understood(self.checkpoint.path):
            own = self.checkpoint.settings(key)
        if own:
            groups = count(len({place.path for place in own}), "param group")
            held = ", ".join(dict.fromkeys(short(place.value) for place in own))
            self.warnings.append(
                f"{key} of {groups} stays {held}: it is a number of its own there, none of betas"
            )

    def groups(self, key: str, value: float) -> None:
        """A weight decay of 0 marks biases and layer norms, unless a multiplier does: such a group
        keeps it."""
        SetsAnew.refuse(self.checkpoint, key, value)
        places = self._places(key, self.run.format.advise_setting(key))
        if any(isinstance(place.value, (list, tuple)) for place in places):
            raise SurgeryError(
                f"this optimizer has two numbers for {key}: {short(places[0].value)}",
                next=command("set", f"{key}1=NUMBER", f"{key}2=NUMBER"),
            )
        own = AdjustsGroups.optional(self.checkpoint)
        if key == "weight_decay" and not (own is not None and own.multiplied()):
            places = [place for place in places if place.value != 0]
            if places and value == 0:
                self.warnings.append(
                    "with weight decay 0 in every group, no group shows which should decay: only "
                    "undo can restore it"
                )
        SetsAnew.refuse(self.checkpoint, key, value, places)
        for place in places:
            self.put(key, place, value if own is None else own.in_group(key, place, value))

    def setting(self, key: str, value: float) -> None:
        """A number that the param groups hold under a name of its own, or as the n-th of several:
        beta3 of `betas`, eps2 of Adafactor's `eps`."""
        places = self.checkpoint.settings(key)
        SetsAnew.refuse(self.checkpoint, key, value, places)
        if not places and key[-1].isdigit():
            plural, index = {"beta": "betas"}.get(key[:-1], key[:-1]), int(key[-1]) - 1
            several = self.checkpoint.settings(plural)
            places = [p for p in several if isinstance(p.value, (list, tuple))]
            places = [place for place in places if len(place.value) > index]
            for place in places:
                self.put_nth(plural, place, index, value)
            if places:
                return
        for place in places:
            if isinstance(place.value, bool) or not isinstance(place.value, (int, float)):
                raise SurgeryError(
                    f"{key} is {place.value!r} here, not a number",
                    next="set it in param_groups in the trainer's code, once the checkpoint is "
                    "loaded: what the code sets before is replaced on resume",
                )
            self.put(key, place, value)
        if not places:
            promise = self.checkpoint.state().promise
            names = [name for name, _ in promise.settings or ()]
            held = f"they hold: {', '.join(names)}" if names else "the checkpoint keeps"
            near = difflib.get_close_matches(key, [*OF_ADAM, *names], n=2, cutoff=0.7)
            meant = " or ".join(f"`set.{name}`" for name in sorted(near))
            raise SurgeryError(
                f"the param groups of {promise.optimizer or 'the optimizer'} hold no {key}",
                next=(
                    *([f"did you mean {meant}?"] if near else []),
                    command("show", why=f"what {held}"),
                ),
            )

    def flagged(self, key: str, value: float) -> None:
        """What a trainer may take from its command line instead. Raises SurgeryError where it
        does."""
        places = self.checkpoint.locate(key)
        if not any(place.wins for place in places):
            raise SurgeryError(
                f"this checkpoint does not decide {key}: the trainer's command line does",
                next=self.run.format.advise(key, value),
            )
        for place in places:
            self.put(key, place, value)

    def loss_scale(self, value: float) -> None:
        """The scale, as the format keeps it. Raises SurgeryError where none changes by itself."""
        settings = self.checkpoint.rescale(value)
        if not self.checkpoint.state().dynamic_loss_scale or not settings:
            raise SurgeryError(
                "the run has no dynamic loss scale (bf16 and fp32 train without one)",
                next=command("show", why="what the checkpoint keeps"),
            )
        for field, place, new in settings:
            self.put(field, place, new)

    def warn_leap(self, lr: float) -> None:
        """3e5 where 3e-5 was meant, or 3e-5x, is a rate like any other, to a format."""
        state = self.checkpoint.state()
        peak = float((state.schedule or {}).get("max_lr", state.peak_lr) or 0.0)
        if not peak or peak / FALL < lr < LEAP * peak:
            return
        share = f"rises to {lr / peak:,.0f}" if lr > peak else f"falls to {lr / peak:.3g}"
        self.warnings.append(f"the peak {share} times what it was: {peak:.3e} → {lr:.3e}")

    def warn_moving(self, keys: Collection[str]) -> None:
        """A value that moved since the step before, by nothing that was saved: code moves it, and
        may replace the new one. Nothing is said of a trainer whose loader was asked, nor of what a
        surgery has set."""
        promise, moved = self.checkpoint.state().promise, MOVED.keys() & keys
        if not moved or promise.asked or self.checkpoint.locate("scheduler"):
            return
        earlier = [step for step in self.run.steps() if step < self.checkpoint.step]
        if not earlier:
            return
        with contextlib.suppress(SurgeryError):
            before = self.run.checkpoint(earlier[-1]).state().promise
            done = [receipt.recipe.get("set") or {} for receipt in standing(self.run.receipts())]
            for key in moved:
                old, now = MOVED[key](before), MOVED[key](promise)
                if old is None or now is None or old == now or any(key in item for item in done):
                    continue
                text = (
                    f"{key} was {old:.4g} at step {earlier[-1]} and is {now:.4g} here, and no "
                    "scheduler is saved: where the trainer's code makes it, set it there"
                )
                self.warnings.append(Caveat(text, key, known=False))

    def _places(self, name: str, advice: str) -> Sequence[Place]:
        places = self.checkpoint.locate(name)
        if not places:
            raise SurgeryError(f"this checkpoint keeps no {name}", next=advice)
        return places
