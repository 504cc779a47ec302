"""A step of Accelerate or the Trainer whose optimizer FSDP saved in shards: `optimizer_0/`.

Source: `accelerate/utils/fsdp_utils.py`, 1.15.0. The optimizer is a folder that
torch.distributed.checkpoint wrote; schedulers and the Trainer's state lie beside it as ever.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.files.dcp import METADATA, Saved
from ckptsurgeon.formats.dcp import weights
from ckptsurgeon.formats.dcp.scheduled import ScheduledCheckpoint
from ckptsurgeon.formats.dcp.shards import absent, blobs
from ckptsurgeon.formats.huggingface import batch
from ckptsurgeon.formats.huggingface.checkpoint import global_step, passed_over
from ckptsurgeon.formats.json_beside import JsonBeside
from ckptsurgeon.formats.values import Blob, Place, Setting, Weight

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

    def find(self, field: str) -> list[Place]:
        """The batch size is in the Trainer's state."""
        return batch.places(self) if field == "batch_size" else super().find(field)

    def rebatch(
        self, size: int | None, ramp: Sequence[int] | None, own_config: bool
    ) -> tuple[list[Setting], list[str]]:
        """As in other steps of the Trainer."""
        return batch.rebatch(self, size, ramp)

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
