"""A step of Accelerate or the Trainer whose optimizer FSDP saved in shards: `optimizer_0/`.

Source: `accelerate/utils/fsdp_utils.py`, 1.15.0. The optimizer is a folder that
torch.distributed.checkpoint wrote; schedulers and the Trainer's state lie beside it as ever.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.files.dcp import METADATA, Saved
from ckptsurgeon.formats.dcp import weights
from ckptsurgeon.formats.dcp.checkpoint import DcpCheckpoint
from ckptsurgeon.formats.dcp.shards import absent, blobs
from ckptsurgeon.formats.huggingface.checkpoint import global_step, passed_over
from ckptsurgeon.formats.json_beside import JsonBeside
from ckptsurgeon.formats.protocol import Blob, Place, Setting, Weight
from ckptsurgeon.formats.sane import understood
from ckptsurgeon.formats.schedules import annealing, torch

OPTIMIZER, MODEL = "optimizer_0", "pytorch_model_fsdp_0"
SECOND = "optimizer_1"


def missing(folder: Path) -> list[str]:
    """The files that the two folders name and that are not there. Raises SurgeryError for a step
    with several optimizers."""
    if (folder / SECOND).is_dir():
        raise SurgeryError(
            f"{folder.name} holds several optimizers ({OPTIMIZER}, {SECOND}), and only one is "
            "known in FSDP's shards",
            next="set what you want where the script makes its optimizers",
        )
    inner = [name for name in (OPTIMIZER, MODEL) if (folder / name).is_dir()]
    return [f"{name}/{file}" for name in inner for file in absent(folder / name)]


@dataclass
class FsdpCheckpoint(JsonBeside, DcpCheckpoint):
    """`schedulers` and `scalers` are torch files beside the folder of the optimizer."""

    schedulers: tuple[Path, ...] = ()
    scalers: tuple[Path, ...] = ()

    growth: ClassVar[Mapping[str, int]] = {"_growth_tracker": 0}
    counters: ClassVar[Mapping[str, tuple[str, ...]]] = {"iteration": ("global_step",)}

    def find(self, field: str) -> list[Place]:
        """Of the optimizer, and of the files beside it."""
        if field == "scheduler":
            return [Place(file, (), self.trees[file]) for file in self.schedulers]
        if field == "position":
            return [p for file in self.schedulers for p in self.at(file, ("last_epoch",))]
        if field == "loss_scale":
            return [place for file in self.scalers for place in self.at(file, ("scale",))]
        return super().find(field)

    def counted(self, field: str) -> list[Place]:
        """Of the Trainer's state; Accelerate keeps none."""
        return global_step(self)

    def recount(self, counter: str, value: int) -> tuple[list[Setting], list[str]]:
        """As in other steps of the Trainer."""
        settings, notes = super().recount(counter, value)
        return settings, [*notes, *passed_over(settings, value)]

    def of_parameters(self, key: str) -> list[tuple[tuple[str, ...], Place]]:
        """By the names that each group holds; the rates of the groups too."""
        return [(self._parameters(self._owner(str(p.path[0]), key)), p) for p in self.settings(key)]

    def _schedule(self) -> Any:
        return self.trees[self.schedulers[0]] if self.schedulers else None

    def reschedule(self, values: Mapping[str, Any]) -> tuple[list[Setting], list[str]]:
        """By the class of the saved scheduler; lr alone where none is saved."""
        with understood(self.path):
            schedule = self._schedule()
            if torch.is_torch(schedule):
                return torch.reschedule(self, values)
            if schedule is not None:
                raise SurgeryError(
                    "the scheduler's state is of no known class, so what it makes of an lr is "
                    "unknown",
                    next="set lr where the trainer makes its scheduler",
                )
            return annealing.reschedule(self, values)

    def scaler_start(self) -> list[tuple[Place, Any]]:
        """torch's GradScaler begins at 65536 and counts the steps since the last change."""
        start: list[tuple[Place, Any]] = [(place, 65536.0) for place in self.locate("loss_scale")]
        beside = [p for file in self.scalers for p in self.at(file, ("_growth_tracker",))]
        return start + [(place, 0) for place in beside]

    def next_rate(self) -> float | None:
        """The groups' own: the scheduler sets it from the step after."""
        return float(self.agreed("lr")[0])

    def peak(self) -> float | None:
        """What the saved scheduler computes from."""
        if torch.is_torch(self._schedule()):
            return torch.peak(self)
        return max((float(place.value) for place in self.locate("lr")), default=None)

    def scheduler(self) -> str:
        """By its class."""
        schedule = self._schedule()
        if torch.is_torch(schedule):
            return torch.words(schedule)
        return "an unknown schedule" if schedule is not None else ""

    def notes(self) -> list[str]:
        """Also what a scheduler does beside the rate."""
        schedule = self._schedule()
        return [*super().notes(), *(torch.notes(schedule) if torch.is_torch(schedule) else ())]

    # --- the model, which is a folder of its own -------------------------------------------------

    def _model(self) -> Saved | None:
        folder = self.path / MODEL
        return Saved.open(folder) if (folder / METADATA).is_file() else None

    def weights(self) -> Iterator[Weight]:
        """Of `pytorch_model_fsdp_0`."""
        model = self._model()
        return iter(()) if model is None else weights.weights(model)

    def blobs(self) -> list[Blob]:
        """Those of the optimizer and of the model."""
        model = self._model()
        return [*super().blobs(), *(blobs(model) if model is not None else ())]
