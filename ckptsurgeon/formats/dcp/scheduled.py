"""A step of torch.distributed.checkpoint with torch's schedulers and gradient scalers.

They are state dicts in torch files beside the folder, or lie in it, flattened as torch does it:
one value for each key. What FSDP users of Accelerate, Lightning and Composer have in common.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from ckptsurgeon.edits import Key
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.files.pickles.tree import get
from ckptsurgeon.formats.capabilities import AdjustsGroups, Cools
from ckptsurgeon.formats.dcp.checkpoint import DcpCheckpoint
from ckptsurgeon.formats.sane import understood
from ckptsurgeon.formats.schedules import saved, torch, torch_cooldown
from ckptsurgeon.formats.schedules.check import refuse_several
from ckptsurgeon.formats.values import Decay, Located, Place, Setting


@dataclass
class ScheduledCheckpoint(DcpCheckpoint, AdjustsGroups):
    """`schedulers` are (file, path of a scheduler's state), `scales` (file, path of the loss
    scale). In the folder itself the path is what the names begin with."""

    schedulers: tuple[Located, ...] = ()
    scales: tuple[Located, ...] = ()

    growth: ClassVar[Mapping[str, int]] = {"_growth_tracker": 0}

    # --- places ----------------------------------------------------------------------------------

    def find(self, field: str) -> list[Place]:
        """Of the optimizer, and of the schedulers and scalers."""
        if field == "scheduler":
            return [Place(file, path, self._saved_by(file, path)) for file, path in self.schedulers]
        if field == "position":
            return self.below(self.schedulers, "last_epoch")
        if field == "loss_scale":
            return self.below(self.scales)
        return super().find(field)

    def _saved_by(self, file: Path, path: tuple[Key, ...]) -> Any:
        """The whole state of a scheduler, in the folder put together from its values."""
        if file != self.saved.path:
            return get(self.trees[file], path)
        inside = f"{path[0]}."
        return {
            name.removeprefix(inside): self.trees[file][name]
            for name in self.saved.items
            if name.startswith(inside)
        }

    def at(self, file: Path, path: tuple[Key, ...], wins: bool = True) -> list[Place]:
        """Also of what was flattened: (beginning of the name, key, …)."""
        if file == self.saved.path and len(path) > 1 and (file, path[:1]) in self.schedulers:
            path = (f"{path[0]}.{path[1]}", *path[2:])
        return super().at(file, path, wins)

    def of_parameters(self, key: str) -> list[tuple[tuple[str, ...], Place]]:
        """By the names that each group holds; the rates of the groups too."""
        return [(self.parameters_at(place), place) for place in self.settings(key)]

    def scaler_start(self) -> list[tuple[Place, Any]]:
        """Of torch's GradScaler."""
        return saved.scaler_start(self, self.scales)

    def in_group(self, key: str, place: Place, value: Any) -> Any:
        """Refused for a weight decay that the scheduler sets anew, as Megatron's does."""
        schedule = self.schedule()
        if key == "weight_decay" and isinstance(schedule, Mapping) and "end_wd" in schedule:
            raise SurgeryError(
                f"the scheduler of {self.trainer} sets the weight decay of every group when it is "
                "loaded, from start_wd and end_wd of its own",
                next="set the weight decay in the trainer's config, and let it override the "
                "scheduler's state",
            )
        return value

    # --- meaning ---------------------------------------------------------------------------------

    def schedule(self) -> Any:
        """The state of the first scheduler, or None."""
        places = self.locate("scheduler")
        return places[0].value if places else None

    def reschedule(self, values: Mapping[str, Any]) -> tuple[list[Setting], list[str]]:
        """By the class of the saved scheduler; lr alone where none is saved. Refused for several
        optimizers: a recipe has one lr."""
        refuse_several(self.path.name, len(self.optimizers))
        schedule = self.schedule()
        settings, notes = saved.reschedule(self, schedule, values)
        if schedule is None:
            return settings, notes
        return [self._placed(setting) for setting in settings], notes

    def cooldown(self, decay: Decay) -> tuple[list[Setting], list[str]]:
        """By the class of the saved scheduler. Refused for several optimizers."""
        refuse_several(self.path.name, len(self.optimizers))
        if not torch.is_torch(self.schedule()):
            raise Cools.lacking(self)
        with understood(self.path):
            settings, notes = self.decaying(decay)
        return [self._placed(setting) for setting in settings], notes

    def decaying(self, decay: Decay) -> tuple[list[Setting], list[str]]:
        """What a cooldown makes of torch's scheduler."""
        return torch_cooldown.cooldown(self, decay)

    def _placed(self, setting: Setting) -> Setting:
        """With the place as the folder names it."""
        (place,) = self.at(setting.place.file, setting.place.path)
        return setting._replace(place=place)

    def next_rate(self) -> float | None:
        """The groups' own: the scheduler sets it from the step after."""
        return float(self.agreed("lr")[0])

    def peak(self) -> float | None:
        """What the saved scheduler computes from; of several optimizers none."""
        if len(self.optimizers) > 1:
            return None
        if torch.is_torch(self.schedule()):
            return torch.peak(self)
        return max((float(place.value) for place in self.locate("lr")), default=None)

    def scheduler(self) -> str:
        """By its class."""
        schedule = self.schedule()
        if torch.is_torch(schedule):
            return torch.words(schedule)
        seen = schedule is not None or saved.is_unseen(self, schedule)
        return "an unknown schedule" if seen else ""

    def notes(self) -> list[str]:
        """Also what a scheduler does beside the rate."""
        schedule = self.schedule()
        return [*super().notes(), *(torch.notes(schedule) if torch.is_torch(schedule) else ())]
