"""A step of torch.distributed.checkpoint with torch's schedulers and gradient scalers.

They are state dicts in torch files beside the folder, or lie in it, flattened as torch does it:
one value for each key. What FSDP users of Accelerate, Lightning and Composer have in common.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.files.pickles.tree import Tensor
from ckptsurgeon.formats.capabilities import AdjustsGroups
from ckptsurgeon.formats.dcp.checkpoint import DcpCheckpoint
from ckptsurgeon.formats.fields.values import Located, Place, Setting
from ckptsurgeon.formats.schedules import saved
from ckptsurgeon.formats.schedules.torch_schedulers import TorchSchedulers
from ckptsurgeon.plans.edits import Key

DEEP = 8
"""Names that lead to a value of a scheduler, at most."""


@dataclass
class ScheduledCheckpoint(TorchSchedulers, DcpCheckpoint, AdjustsGroups):
    """`schedulers` are (file, path of a scheduler's state), `scales` (file, path of the loss
    scale). In the folder itself the path is what the names begin with."""

    schedulers: tuple[Located, ...] = ()
    scales: tuple[Located, ...] = ()

    growth: ClassVar[Mapping[str, int]] = {"_growth_tracker": 0}

    # --- places ----------------------------------------------------------------------------------

    def find(self, field: str) -> list[Place]:
        """Of the optimizer, and of the schedulers and scalers."""
        if field in ("scheduler", "position"):
            return self.of_schedulers(field)
        if field == "loss_scale":
            return self.below(self.scales)
        return super().find(field)

    def saved_by(self, file: Path, path: tuple[Key, ...]) -> Any:
        """In the folder put together from its values, each rate of a list too where rates are
        tensors. A tensor of several numbers stays as it is: no class saves one."""
        if file != self.saved.path:
            return super().saved_by(file, path)
        inside = f"{path[0]}."
        names = [name for name in self.saved.items if name.startswith(inside)]
        values = {n.removeprefix(inside): p.value for n in names for p in self.scalar(n)}
        return values if any(isinstance(v, Tensor) for v in values.values()) else nested(values)

    def at(self, file: Path, path: tuple[Key, ...], wins: bool = True) -> list[Place]:
        """Also of what was flattened: (beginning of the name, key, …); of a list that is cut up its
        numbers, at the same path."""
        if file == self.saved.path and (file, path[:1]) in self.schedulers:
            if path[1:] and (numbers := self._cut_up(path)):
                return [Place(file, path, numbers, wins)]
            path = self._named(path)
        return super().at(file, path, wins)

    def has_each(self, file: Path, path: tuple[Key, ...]) -> bool:
        """Also of what was flattened."""
        if file == self.saved.path and (file, path[:1]) in self.schedulers:
            return bool(self._cut_up(path))
        return super().has_each(file, path)

    def _cut_up(self, path: tuple[Key, ...]) -> list[Any]:
        """The numbers of a list of tensors, each of which has a name; of anything else none."""
        return [place.value for place in self.listed(".".join(map(str, path)))]

    def _named(self, path: tuple[Key, ...]) -> tuple[Key, ...]:
        """The name of a value, as torch joins it of keys and numbers, and what is inside of it."""
        name, rest = str(path[0]), path[1:]
        while rest and name not in self.saved.items:
            name, rest = f"{name}.{rest[0]}", rest[1:]
        is_number = not rest and name in self.saved.items and self.saved.items[name].is_tensor
        return (name, 0) if is_number else (name, *rest)

    def of_parameters(self, key: str) -> list[tuple[tuple[str, ...], Place]]:
        """By the names that each group holds; the rates of the groups too."""
        return [(self.parameters_at(place), place) for place in self.settings(key)]

    def scaler_start(self) -> list[tuple[Place, Any]]:
        """Of torch's GradScaler."""
        return saved.scaler_start(self, self.scales)

    def in_group(self, key: str, place: Place, value: Any) -> Any:
        """Refused for a weight decay that the scheduler sets anew, as Megatron's does."""
        schedule = self.saved_schedule()
        if key == "weight_decay" and isinstance(schedule, Mapping) and "end_wd" in schedule:
            raise SurgeryError(
                f"the scheduler of {self.trainer} sets the weight decay of every group when it is "
                "loaded, from start_wd and end_wd of its own",
                next="set the weight decay in the trainer's config, and let it override the "
                "scheduler's state",
            )
        return value

    def of_group(self, key: str, place: Place, value: Any) -> list[Setting]:
        """Refused for what `in_group` refuses."""
        return [Setting(key, place, self.in_group(key, place, value))]

    # --- meaning ---------------------------------------------------------------------------------

    def several(self) -> int:
        """Those of one folder, or each in a folder of its own."""
        return len(self.optimizers)

    def placed(self, settings: list[Setting]) -> list[Setting]:
        """As the folder names them."""
        found = (self.at(setting.place.file, setting.place.path) for setting in settings)
        return [s._replace(place=place) for s, (place,) in zip(settings, found, strict=True)]

    def next_rate(self) -> float | None:
        """The groups' own: the scheduler sets it from the step after."""
        return float(self.agreed("lr")[0])

    def peak(self) -> float | None:
        """What the saved scheduler computes from; of several optimizers none."""
        return self.in_words()[1]

    def scheduler(self) -> str:
        """By its class."""
        return self.in_words()[0]

    def notes(self) -> list[str]:
        """Also what a scheduler does beside the rate."""
        return [*super().notes(), *self.on_schedule()]


def nested(values: Mapping[str, Any]) -> Any:
    """What torch flattened into these values: a list where the keys are 0, 1, and so on, but in
    milestones, the one dict of numbers. They stay as they are where a name begins another one, or
    where more is nested than any class saves."""
    if any(name.count(".") > DEEP for name in values):
        return dict(values)
    out: dict[str, Any] = {}
    inner: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        first, dot, rest = name.partition(".")
        if dot:
            inner.setdefault(first, {})[rest] = value
        else:
            out[first] = value
    if out.keys() & inner.keys():
        return dict(values)
    out |= {key: each if key == "milestones" else nested(each) for key, each in inner.items()}
    numbered = [str(number) for number in range(len(out))]
    return [out[key] for key in numbered] if out and out.keys() == {*numbered} else out
