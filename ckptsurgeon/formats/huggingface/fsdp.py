"""A step of Accelerate or the Trainer whose optimizer FSDP saved in shards: `optimizer_0/`.

Source: `accelerate/utils/fsdp_utils.py`, 1.15.0. The optimizer is a folder that
torch.distributed.checkpoint wrote; schedulers and the Trainer's state lie beside it as ever.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.files.dcp import METADATA, Saved
from ckptsurgeon.formats.dcp import weights
from ckptsurgeon.formats.dcp.scheduled import ScheduledCheckpoint
from ckptsurgeon.formats.dcp.shards import absent
from ckptsurgeon.formats.huggingface.checkpoint import global_step, passed_over
from ckptsurgeon.formats.json_beside import JsonBeside
from ckptsurgeon.formats.schedules import torch, transformers
from ckptsurgeon.formats.values import Decay, Place, Setting, Weight

OPTIMIZER, MODEL = "optimizer_0", "pytorch_model_fsdp_0"
SECOND, SECOND_MODEL = "optimizer_1", "pytorch_model_fsdp_1"


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
class FsdpCheckpoint(JsonBeside, ScheduledCheckpoint):
    """Schedulers and scalers are torch files beside the folder of the optimizer."""

    counters: ClassVar[Mapping[str, tuple[str, ...]]] = {"iteration": ("global_step",)}

    def counted(self, field: str) -> list[Place]:
        """Of the Trainer's state; Accelerate keeps none."""
        return global_step(self)

    def recount(self, counter: str, value: int) -> tuple[list[Setting], list[str]]:
        """As in other steps of the Trainer."""
        settings, notes = super().recount(counter, value)
        return settings, [*notes, *passed_over(settings, value)]

    def decaying(self, decay: Decay) -> tuple[list[Setting], list[str]]:
        """By the Trainer's arguments where its schedule is one of its own."""
        if self.texts and torch.kind(self.schedule()) == "LambdaLR":
            return transformers.cooldown(self, decay)
        return super().decaying(decay)

    # --- the model, which is a folder of its own -------------------------------------------------

    def weights(self) -> Iterator[Weight]:
        """Of `pytorch_model_fsdp_0`."""
        return iter(()) if self.model is None else weights.weights(self.model)

    def named_weights(self) -> Iterator[tuple[Saved, str, str]]:
        """The same. Refused for several models: whose the moments are is not known."""
        if (self.path / SECOND_MODEL).is_dir():
            raise SurgeryError(
                f"{self.path.name} holds several models ({MODEL}, {SECOND_MODEL}), and only one is "
                "known in FSDP's shards",
                next="graft and reset work on the moments",
            )
        if (model := self.model) is not None:
            yield from ((model, name, name.removeprefix("model.")) for name in model.items)


def model(folder: Path) -> Saved | None:
    """What was saved of the model, where it lies in a folder of its own."""
    inner = folder / MODEL
    return Saved.open(inner) if (inner / METADATA).is_file() else None
