"""Settings that a trainer makes anew at each start, whatever its checkpoint holds of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ckptsurgeon.formats.capabilities import SetsAnew
from ckptsurgeon.formats.described.description import Description
from ckptsurgeon.formats.described.made_anew import MadeAnew
from ckptsurgeon.formats.fields.values import Place, Setting
from ckptsurgeon.formats.schedules.torch_classes import MULTIPLIER, kind
from ckptsurgeon.formats.schedules.torch_schedulers import TorchSchedulers
from ckptsurgeon.plans.promise import Caveat, Promise

BETAS = ("beta1", "beta2")
BY_BASE = ("LambdaLR", "CosineAnnealingWarmRestarts", MULTIPLIER)
"""Schedulers that make each rate of `base_lrs` alone. Others go on from the one of the group."""


class Anew(TorchSchedulers, SetsAnew):
    """A checkpoint whose page may say `anew`. What is named there wins nowhere and is no promise.
    A rate is written all the same where a scheduler is saved that makes those after the first
    update of base rates of its own; else it is refused."""

    description: Description | None

    def alike(self, field: str) -> list[Sequence[Place]]:
        """Of such a setting no value is agreed on."""
        return [] if self.is_anew(field) else super().alike(field)

    def is_anew(self, field: str) -> bool:
        """Whether the page names the field, or one of Adam's betas."""
        return bool(self._made(field))

    def makes(self, field: str, place: Place) -> bool:
        """Whether the trainer makes the field itself in the param group of its `place`."""
        return any(
            made.takes(lambda key: self.value(place.file, self.beside(place, key)))
            for made in self._made(field)
        )

    def set_anew(self, key: str, value: str) -> str:
        """As the page says."""
        made = self._anew.get(key)
        return "" if made is None else made.instead.replace("{value}", value)

    def anew_in(self, key: str, places: Sequence[Place]) -> tuple[str, list[int]] | None:
        """By what the page says that the groups have."""
        made = self._anew.get(key)
        if made is None or not made.of:
            return None
        numbers = {self.group_of(place) for place in places if self.makes(key, place)}
        return made.groups, sorted(numbers)

    def reschedule(self, values: Mapping[str, Any]) -> tuple[list[Setting], list[str]]:
        """Refused where no saved scheduler makes the rates."""
        if "lr" in values and self.is_anew("lr") and not self._is_scheduled:
            SetsAnew.refuse(self, "lr", values["lr"], self.locate("lr"))
        return super().reschedule(values)

    def promise(self, step: int, lr: float | None) -> Promise:
        """Without the further settings that the trainer makes itself."""
        made = super().promise(step, lr)
        kept = tuple(item for item in made.settings or () if item[0] not in self._anew)
        return replace(made, settings=kept or None)

    def on_anew(self) -> Iterator[str]:
        """What a reader of the promise must know of the rate."""
        if "lr" not in self._anew:
            return
        start = "the trainer makes the rate of the first update itself at each start"
        if not self._is_scheduled:
            yield Caveat(
                f"{start}, and those after it: no lr of the checkpoint is used", "lr", known=False
            )
        else:
            yield Caveat(f"{start}; the saved scheduler makes those after it", "lr", known=False)

    def _made(self, field: str) -> list[MadeAnew]:
        keys = BETAS if field == "betas" else (field,)
        return [self._anew[key] for key in keys if key in self._anew]

    @property
    def _is_scheduled(self) -> bool:
        """Whether a saved scheduler makes the rates after the first update, whatever that is."""
        return kind(self.saved_schedule()) in BY_BASE

    @property
    def _anew(self) -> Mapping[str, MadeAnew]:
        return {} if self.description is None else self.description.anew
