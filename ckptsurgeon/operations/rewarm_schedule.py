"""The schedule starts again: warm-up to a peak and decay, as continued pre-training does it.

Sources: Gupta et al. 2308.04014, Ibrahim et al. 2403.08763 (re-warming and re-decaying).
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from ckptsurgeon.errors import SurgeryError, UsageError, count
from ckptsurgeon.formats import Checkpoint
from ckptsurgeon.hints import command
from ckptsurgeon.operations.cooldown import Cooldown, refuse_both, samples_to
from ckptsurgeon.operations.hyperparameters import DECAY_STYLES
from ckptsurgeon.operations.key import Key
from ckptsurgeon.operations.limits import COUNT, Limits
from ckptsurgeon.operations.place_changes import PlaceChanges
from ckptsurgeon.operations.section import Changes, Recipe, Section
from ckptsurgeon.plans.frozen import held
from ckptsurgeon.run.run import Run


@held
class RewarmSchedule(Section):
    """From 0 to the peak `to` in `warmup` trained iterations, then along `shape` to `min_lr` in
    `decay` more: the scheduler stands at its start again. What is not given stays."""

    key: ClassVar[str] = "rewarm_schedule"

    to: Annotated[
        float,
        Key(
            "the schedule starts again, with this peak (`set-lr --restart`)", limits=Limits(above=0)
        ),
    ]
    warmup: Annotated[int, Key("trained iterations from here to the peak", limits=COUNT)]
    decay: Annotated[
        int, Key("trained iterations from the peak to the floor", limits=Limits(least=1))
    ]
    min_lr: Annotated[
        float | None, Key("the floor; it stays if it is not given", limits=Limits(least=0))
    ] = None
    shape: Annotated[str | None, Key("it stays if it is not given", one_of=DECAY_STYLES)] = None

    def check(self, recipe: Recipe) -> None:
        if recipe.get(Cooldown):
            raise UsageError(
                "both `cooldown` and `rewarm_schedule` decide the schedule",
                next="rewarm_schedule: its decay is the cooldown",
            )
        refuse_both(recipe, self.key)

    def title(self, run: Run, step: int) -> list[str]:
        return [f"re-warm to {self.to:g} in {count(self.warmup, 'step')}, decay in {self.decay}"]

    def changes(self, run: Run, recipe: Recipe, checkpoint: Checkpoint) -> Changes:
        if not checkpoint.locate("position"):
            raise SurgeryError(
                "this checkpoint keeps no scheduler position, so the schedule can't start again",
                next="start a new run from these weights, with the new schedule in its config",
            )
        warmup, end = self.warmup, self.warmup + self.decay
        if checkpoint.state().schedule is not None:
            counts = [samples_to(run, recipe, checkpoint, n) for n in (warmup, end)]
            if None in counts:
                raise SurgeryError(
                    "the schedule counts samples, and nothing in the checkpoint says how many an "
                    "iteration takes",
                    next=command("set", "lr=LR", "warmup=SAMPLES", "decay=SAMPLES", "position=0"),
                )
            warmup, end = (count or 0 for count in counts)
        values: dict[str, Any] = {"lr": self.to, "decay": end, "position": 0}
        if self.warmup or checkpoint.state().schedule is not None:
            values["warmup"] = warmup
        values |= {} if self.min_lr is None else {"min_lr": self.min_lr}
        values |= {} if self.shape is None else {"decay_style": self.shape}
        settings, warnings = checkpoint.reschedule(values)
        places = PlaceChanges(run)
        for name, place, value in settings:
            places.put(name, place, value)
        return list(places.changes.values()), warnings
