"""A step of Accelerate or the Trainer whose optimizer FSDP saved in shards: `optimizer_0/`.

Source: `accelerate/utils/fsdp_utils.py`, 1.15.0. Each optimizer is a folder that
torch.distributed.checkpoint wrote; schedulers and the Trainer's state lie beside it as ever.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from ckptsurgeon import disk
from ckptsurgeon.errors import SurgeryError, count
from ckptsurgeon.files.dcp import METADATA, Saved
from ckptsurgeon.formats.capabilities import HasHeads
from ckptsurgeon.formats.dcp import weights
from ckptsurgeon.formats.dcp.scheduled import ScheduledCheckpoint
from ckptsurgeon.formats.dcp.shards import absent
from ckptsurgeon.formats.fields.values import Decay, Place, Setting, Weight
from ckptsurgeon.formats.heads import head_counts, heads
from ckptsurgeon.formats.heads.heads import Attention
from ckptsurgeon.formats.huggingface.trainer_state import TrainerState
from ckptsurgeon.formats.places.json_beside import transformers_config
from ckptsurgeon.formats.schedules import torch_classes, transformers
from ckptsurgeon.formats.step_folders import listed

OPTIMIZER = "optimizer_0"
NUMBERED = re.compile(r"(?:optimizer|pytorch_model_fsdp)_\d+")
"""The folders of the first and of further optimizers and models: `save_state` pairs them."""
LOCAL = re.compile(r"pytorch_model_fsdp(?:_\d+)?_rank\d+\.bin")
"""What each rank of FSDP1 had of the weights (`LOCAL_STATE_DICT`): objects of a process group."""
UNLOADED = (
    "LOCAL_STATE_DICT saved it, and Accelerate (1.15) loads no such file: a resume from this step "
    "ends with an error"
)


def local(step: Path) -> list[str]:
    """The names of what `LOCAL_STATE_DICT` saved."""
    return [name for name in listed(step) if LOCAL.fullmatch(name)]


def folders(step: Path, kind: str) -> list[Path]:
    """Those of the optimizers or of the models (`pytorch_model_fsdp`), by their numbers."""
    found = (path for path in disk.matching(step, f"{kind}_*") if NUMBERED.fullmatch(path.name))
    return sorted(
        (p for p in found if disk.is_folder(p)), key=lambda p: int(p.name.rpartition("_")[2])
    )


def missing(step: Path) -> list[str]:
    """The files that the folders name and that are not there."""
    inner = [*folders(step, "optimizer"), *folders(step, "pytorch_model_fsdp")]
    return [f"{folder.name}/{file}" for folder in inner for file in absent(folder)]


@dataclass
class FsdpCheckpoint(TrainerState, ScheduledCheckpoint, HasHeads):
    """Schedulers and scalers are torch files beside the folder of the optimizer."""

    counters: ClassVar[Mapping[str, tuple[str, ...]]] = {"iteration": ("global_step",)}

    @property
    def numbered(self) -> bool:
        """The Trainer's steps are; Accelerate counts saves, or takes the script's own names."""
        return bool(self.texts)

    def counted(self, field: str) -> list[Place]:
        """Of the Trainer's state; Accelerate keeps none."""
        return self.in_state(field)

    def find(self, field: str) -> list[Place]:
        """The batch size is in the Trainer's state."""
        return self.in_state(field) if field == "batch_size" else super().find(field)

    def decaying(self, decay: Decay) -> tuple[list[Setting], list[str]]:
        """By the Trainer's arguments where its schedule is one of its own."""
        if self.texts and torch_classes.kind(self.saved_schedule()) == "LambdaLR":
            return transformers.cooldown(self, decay)
        return super().decaying(decay)

    @property
    def asked(self) -> bool:
        """Not of a step that its library saves and does not load."""
        return not local(self.path)

    def notes(self) -> list[str]:
        """What is not loaded under FSDP1, and by older releases: which of the two wrote the folder,
        nothing in it says, nor which release will read it."""
        return [
            *super().notes(),
            *(f"{name}: {UNLOADED}" for name in local(self.path)[:1]),
            "under FSDP1 (fsdp_version 1, the default; tried: 1.15), and before 1.13 under FSDP2 "
            "(tried: 1.11), Accelerate loads no moments from optimizer_0/: after every resume they "
            "begin at 0, and so does Adam's step",
        ]

    # --- the models, each a folder of its own ----------------------------------------------------

    def named_weights(self) -> Iterator[tuple[Saved, str, str]]:
        """Of each model, as the optimizer of the same number has them."""
        optimizers = {each.saved.folder.name.rpartition("_")[2]: each for each in self.optimizers}
        for model in self.models:
            of = optimizers.get(model.folder.name.rpartition("_")[2])
            for name in model.items:
                owner = name.removeprefix("model.")
                yield model, name, self.full((of.saved if of else model).path, owner)

    def attention(self) -> tuple[list[Attention], list[str]]:
        """By transformers' `config.json` in the step or beside it."""
        config, name = transformers_config(self.path), self.path.name
        if config is None:
            raise head_counts.unsaid(name, head_counts.CONFIG)
        if len(self.models) > 1:
            raise head_counts.unknown(name, "it holds several models, and config.json is of one")
        model = head_counts.of_hugging_face(config, name)
        return heads.attentions(self.parts(), model, chunked=True)

    def weights(self) -> Iterator[Weight]:
        """Of `pytorch_model_fsdp_0`. Raises SurgeryError for several models, whose weights may have
        the same names."""
        if (number := len(self.models)) > 1:
            raise SurgeryError(
                f"{self.path.name} holds {count(number, 'model')}, and one export holds one",
                next="load the step in the script, and save the model that you want",
            )
        return (weight for model in self.models for weight in weights.weights(model))


def models(step: Path) -> list[Saved]:
    """What was saved of each model in a folder of its own."""
    inner = folders(step, "pytorch_model_fsdp")
    return [Saved.open(folder) for folder in inner if disk.is_file(folder / METADATA)]
