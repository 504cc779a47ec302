"""One saved step of a Hugging Face run: torch's state dicts, or a DeepSpeed engine's shards.

The optimizer is loaded first, then the scheduler (`transformers/trainer.py`,
`_load_optimizer_and_scheduler`); the first step uses the lr of the param groups.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.formats.deepspeed.checkpoint import DeepSpeedCheckpoint
from ckptsurgeon.formats.json_beside import JsonBeside
from ckptsurgeon.formats.plain.checkpoint import TorchCheckpoint
from ckptsurgeon.formats.protocol import Decay, Part, Place, Setting
from ckptsurgeon.formats.schedules import torch, transformers


def global_step(checkpoint: JsonBeside) -> list[Place]:
    """The Trainer's counter in `trainer_state.json`."""
    return [place for file in checkpoint.texts for place in checkpoint.at(file, ("global_step",))]


def batches(checkpoint: JsonBeside, file: Path) -> list[Place]:
    """Where torchdata's StatefulDataLoader counts what it has given out; none where workers, a
    sampler or the data set keep a state of their own, which would have to move too."""
    state = checkpoint.trees[file]
    if not isinstance(state, Mapping) or any(state.get(key) is not None for key in OWN):
        return []
    return [place for key in COUNTS for place in checkpoint.at(file, (key,))]


def passed_over(settings: list[Setting], step: int) -> Iterator[str]:
    """What else the Trainer does with a new global_step."""
    if settings:
        yield (
            f"the data moves with it: a resume passes over the batches of {step} updates, "
            "unless --ignore_data_skip was given; the schedule stays where it is"
        )


COUNTS = ("_num_yielded", "_sampler_iter_yielded")
OWN = ("_snapshot", "_sampler_iter_state", "_index_sampler_state", "fetcher_state", "dataset_state")
"""Keys of a loader's state: its two counters, and the states of what it is made of."""

BINS = ("pytorch_model.bin", "model.pt")
"""Files of whole weights beside an engine."""


@dataclass
class HuggingFaceCheckpoint(TorchCheckpoint):
    """`optimizer.pt` and `scheduler.pt`, or Accelerate's `optimizer.bin` and `scheduler.bin`."""

    loaders: tuple[Path, ...] = ()

    loose: ClassVar[bool] = True

    @property
    def numbered(self) -> bool:
        """Accelerate counts saves, or takes the script's own names."""
        return self.family != "accelerate"

    def find(self, field: str) -> list[Place]:
        """The Trainer's step is in `trainer_state.json`, the position of a loader in its file."""
        if field == "iteration":
            return global_step(self)
        if field == "data_batches":
            return [place for file in self.loaders for place in batches(self, file)]
        return super().find(field)

    def iteration(self) -> int:
        """`global_step`; of Accelerate the number in the name."""
        steps = [place.value for place in self.locate("iteration")]
        return int(steps[0]) if steps else self.step

    def recount(self, counter: str, value: int) -> tuple[list[Setting], list[str]]:
        """The Trainer passes over the batches of so many updates when it resumes."""
        settings, notes = super().recount(counter, value)
        return settings, [*notes, *passed_over(settings, value)]

    def reschedule(self, values: Mapping[str, Any]) -> tuple[list[Setting], list[str]]:
        """Refused for several optimizers: a recipe has one lr."""
        if len(self.optimizers) > 1:
            names = ", ".join(path.name for path, _ in self.optimizers)
            raise SurgeryError(
                f"{self.path.name} holds several optimizers ({names}), and a recipe has one lr",
                next="set the lr where the script makes its optimizers",
            )
        return super().reschedule(values)

    def cooldown(self, decay: Decay) -> tuple[list[Setting], list[str]]:
        """By the Trainer's arguments where its schedule is one of its own."""
        if self.family == "transformers" and torch.kind(self.schedule()) == "LambdaLR":
            return transformers.cooldown(self, decay)
        return super().cooldown(decay)


@dataclass
class EngineCheckpoint(DeepSpeedCheckpoint):
    """DeepSpeed's shards, and the scheduler of the Trainer or of Accelerate beside them."""

    schedulers: tuple[Path, ...] = ()

    def find(self, field: str) -> list[Place]:
        """The engine's places, and of the schedulers those beside it."""
        places = super().find(field)
        if field == "scheduler":
            places += [Place(file, (), self.trees[file]) for file in self.schedulers]
        if field == "position":
            places += [p for file in self.schedulers for p in self.at(file, ("last_epoch",))]
        return places

    def parts(self) -> list[Part]:
        """Those of the engine, which is what a resume loads. Refused where the weights are saved
        beside it once more: that copy would stay as it was."""
        copies = [p for p in self.path.iterdir() if p.suffix == ".safetensors" or p.name in BINS]
        if copies:
            raise SurgeryError(
                f"{copies[0].name} repeats the weights of the engine, and would keep the old ones",
                next=f"move {copies[0].name} out of the step, and export it anew afterwards",
            )
        return super().parts()

    def schedule(self) -> Any:
        """The engine's; else that beside it, which is loaded after."""
        inner = super().schedule()
        if inner is None and self.schedulers:
            return self.trees[self.schedulers[0]]
        return inner

    def contradictions(self) -> list[str]:
        """Also two schedulers of different positions."""
        sentences = super().contradictions()
        return [*sentences, *self._positions()]

    def _positions(self) -> Iterator[str]:
        positions = {p.file.name: p.value.get("last_epoch") for p in self.locate("scheduler")}
        if len(set(positions.values())) > 1:
            yield f"schedulers stand at different steps: {positions}"
