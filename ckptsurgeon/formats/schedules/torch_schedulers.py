"""A checkpoint with torch's schedulers, saved as state dicts, whatever else its trainer is."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from ckptsurgeon.files.pickles.tree import get
from ckptsurgeon.formats.capabilities import Cools
from ckptsurgeon.formats.checkpoint import Checkpoint
from ckptsurgeon.formats.fields.understood import understood
from ckptsurgeon.formats.fields.values import Decay, Located, Place, Setting
from ckptsurgeon.formats.schedules import (
    mmengine,
    mmengine_cooldown,
    saved,
    torch,
    torch_classes,
    torch_cooldown,
)
from ckptsurgeon.formats.schedules.check import refuse_several
from ckptsurgeon.plans.edits import Key

UNKNOWN = "an unknown schedule"
NOT_KNOWN: tuple[str, float | None] = (UNKNOWN, None)
"""What `in_words` says of a schedule that is not understood."""


class TorchSchedulers(Checkpoint, Cools):
    """`schedulers` are (file, path of a scheduler's state); the first one counts."""

    schedulers: tuple[Located, ...]

    def of_schedulers(self, field: str) -> list[Place]:
        """The places of a field of the schedule; none of another field."""
        if field == "scheduler":
            return [Place(file, path, self.saved_by(file, path)) for file, path in self.schedulers]
        return self.below(self.schedulers, "last_epoch") if field == "position" else []

    def saved_by(self, file: Path, path: tuple[Key, ...]) -> Any:
        """The whole state of the scheduler there."""
        return self.numbers(file, get(self.trees[file], path))

    def saved_schedule(self) -> Any:
        """The state of the first scheduler, or None."""
        places = self.locate("scheduler")
        return places[0].value if places else None

    def several(self) -> int:
        """How many optimizers there are: a recipe has one lr."""
        return len(self.schedulers)

    def reschedule(self, values: Mapping[str, Any]) -> tuple[list[Setting], list[str]]:
        """By the class of the saved scheduler; lr alone where none is saved. Refused for several
        optimizers."""
        refuse_several(self.path.name, self.several())
        schedule = self.saved_schedule()
        settings, notes = saved.reschedule(self, schedule, values)
        return settings if schedule is None else self.placed(settings), notes

    def cooldown(self, decay: Decay) -> tuple[list[Setting], list[str]]:
        """By the class of the saved scheduler. Refused for several optimizers."""
        refuse_several(self.path.name, self.several())
        with understood(self.path):
            settings, notes = self.decaying(decay)
            return self.placed(settings), notes

    def decaying(self, decay: Decay) -> tuple[list[Setting], list[str]]:
        """What a cooldown makes of torch's scheduler, or of MMEngine's."""
        if mmengine.is_one(self.saved_schedule()):
            return mmengine_cooldown.cooldown(self, decay)
        if not torch_classes.is_torch(self.saved_schedule()):
            raise Cools.lacking(self)
        return torch_cooldown.cooldown(self, decay)

    def placed(self, settings: list[Setting]) -> list[Setting]:
        """With the places as the files name them."""
        return settings

    def in_words(self) -> tuple[str, float | None]:
        """The schedule in words, and the rate that it decays from: none of several optimizers, as
        each has its own."""
        schedule, one = self.saved_schedule(), self.several() <= 1
        if torch_classes.is_torch(schedule):
            return torch_classes.words(schedule), torch.peak(self) if one and self.locate(
                "lr"
            ) else None
        if mmengine.is_one(schedule):
            states = [place.value for place in self.locate("scheduler")]
            return mmengine.words(states), mmengine.top(self)
        if schedule is not None:
            return UNKNOWN, None
        unseen = saved.is_unseen(self, schedule)
        return UNKNOWN if unseen else "", max(self.rates(), default=None) if one else None

    def on_schedule(self) -> list[str]:
        """What a reader of the promise must know of the saved schedulers."""
        unseen = [saved.UNSEEN] if saved.is_unseen(self, self.saved_schedule()) else []
        states = (place.value for place in self.locate("scheduler"))
        notes = (torch_classes.notes(state) for state in states if isinstance(state, Mapping))
        return [*dict.fromkeys(chain.from_iterable(notes)), *unseen]
