"""One saved step of a Hugging Face run: torch's state dicts.

The optimizer is loaded first, then the scheduler (`transformers/trainer.py`,
`_load_optimizer_and_scheduler`); the first step uses the lr of the param groups.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import ClassVar

from ckptsurgeon import disk
from ckptsurgeon.errors import SurgeryError, count
from ckptsurgeon.formats.capabilities import HasHeads, HasWeights
from ckptsurgeon.formats.fields.constants import GROUP, SAFE
from ckptsurgeon.formats.fields.understood import mapping
from ckptsurgeon.formats.fields.values import Decay, Part, Place, Setting, Weight
from ckptsurgeon.formats.heads import head_counts, heads
from ckptsurgeon.formats.heads.heads import Attention
from ckptsurgeon.formats.huggingface import weights
from ckptsurgeon.formats.huggingface.trainer_state import TrainerState
from ckptsurgeon.formats.places.json_beside import JsonBeside, transformers_config
from ckptsurgeon.formats.places.safetensors_beside import SafetensorsBeside
from ckptsurgeon.formats.plain import parts
from ckptsurgeon.formats.plain.checkpoint import TorchCheckpoint
from ckptsurgeon.formats.schedules import torch_classes, transformers
from ckptsurgeon.formats.schedules.check import refuse_several
from ckptsurgeon.hints import command


def batches(checkpoint: JsonBeside, file: Path) -> list[Place]:
    """Where torchdata's StatefulDataLoader counts what it has given out; none where workers, a
    sampler or the data set keep a state of their own, which would have to move too, and none where
    it had given out all: a resume begins the next epoch, whatever it had counted."""
    state = checkpoint.trees[file]
    if not isinstance(state, Mapping) or any(state.get(key) is not None for key in OWN):
        return []
    if state.get(FINISHED):
        return []
    return [place for key in COUNTS for place in checkpoint.at(file, (key,))]


COUNTS = ("_num_yielded", "_sampler_iter_yielded")
OWN = ("_snapshot", "_sampler_iter_state", "_index_sampler_state", "fetcher_state", "dataset_state")
FINISHED = "_iterator_finished"
"""Keys of a loader's state: its two counters, the states of what it is made of, and whether it was
at the end of an epoch."""


@dataclass
class HuggingFaceCheckpoint(SafetensorsBeside, TrainerState, TorchCheckpoint, HasHeads, HasWeights):
    """`optimizer.pt` and `scheduler.pt`, or Accelerate's `optimizer.bin` and `scheduler.bin`."""

    loaders: tuple[Path, ...] = ()

    loose: ClassVar[bool] = True

    @property
    def numbered(self) -> bool:
        """Accelerate counts saves, or takes the script's own names."""
        return self.family != "accelerate"

    def find(self, field: str) -> Sequence[Place]:
        """The Trainer has two in `trainer_state.json`; the position of a loader is in its file."""
        if field in ("iteration", "batch_size"):
            return self.in_state(field)
        if field == "data_batches":
            return [place for file in self.loaders for place in batches(self, file)]
        return super().find(field)

    def weight_parts(self) -> Iterator[Part]:
        """Of every file that has the weights: a load takes one of them, and they stay alike."""
        for cut, files in weights.files(self.path).items():
            for file in files:
                yield from parts.weights(self._tensors(file), cut)

    def weights(self) -> Iterator[Weight]:
        """Of the files that a load takes: of an adapter its own alone. Raises SurgeryError for
        several models, whose weights may have the same names, and where there are none."""
        found = weights.files(self.path)
        if weights.models(found) > 1:
            raise SurgeryError(
                f"{self.path.name} holds {count(weights.models(found), 'model')}, and one export "
                "holds one",
                next="load the step in the script, and save the model that you want",
            )
        if not found:
            raise HasWeights.lacking(self)
        for file in next(iter(found.values())):
            yield from parts.consolidated(self, self._tensors(file))

    def _tensors(self, file: Path) -> Iterable[tuple[str, Place]]:
        if file.name.endswith(SAFE):
            return self.tensors(file).items()
        self.read([file])
        return parts.in_tree(self, (file, ()))

    def attention(self) -> tuple[list[Attention], list[str]]:
        """By transformers' `config.json` in the step or beside it. Every set of files has all of
        the weights."""
        config, name = transformers_config(self.path), self.path.name
        if config is None:
            raise head_counts.unsaid(name, head_counts.CONFIG)
        model = head_counts.of_hugging_face(config, name)
        if weights.models(weights.files(self.path)) > 1:
            raise head_counts.unknown(name, "it holds several models, and config.json is of one")
        return heads.repeated(self.parts(), model, name)

    def notes(self) -> Iterator[str]:
        """And files of optimizers that are the script's own."""
        yield from super().notes()
        known = {file.name for file in self.archives}
        for name in sorted(item.name for item in self.path.iterdir() if disk.is_file(item)):
            if "optim" in name and name not in known:
                yield f"{name} is not loaded by {self.family}: it is left as it is"

    def recount(self, counter: str, value: int) -> tuple[list[Setting], list[str]]:
        """A loader that was at the end of an epoch goes on with the next one. Raises
        SurgeryError."""
        ended = [p for p in self.loaders if mapping(self.trees[p]).get(FINISHED)]
        if counter == "data_batches" and ended:
            raise SurgeryError(
                f"{ended[0].parent.name}/{ended[0].name} was saved at the end of an epoch: a "
                "resume begins the next one, whatever it has counted",
                next=command("status", why="the steps: one inside of an epoch has a position"),
            )
        return super().recount(counter, value)

    def iteration(self) -> int:
        """`global_step`; of Accelerate the number in the name."""
        steps = [place.value for place in self.locate("iteration")]
        return int(steps[0]) if steps else self.step

    def several(self) -> int:
        """Each has a file of its own."""
        return len(self.optimizers)

    def alike(self, field: str) -> list[Sequence[Place]]:
        """Of several optimizers of Accelerate each has a file, which need not agree with others."""
        places = super().alike(field)
        own = (*GROUP, "adam_step", "scheduler")
        if self.family != "accelerate" or self.several() == 1 or field not in own:
            return places
        files: dict[Path, list[Place]] = {}
        for place in chain.from_iterable(places):
            files.setdefault(place.file, []).append(place)
        return [*files.values()]

    def cooldown(self, decay: Decay) -> tuple[list[Setting], list[str]]:
        """By the Trainer's arguments where its schedule is one of its own. Refused for several
        optimizers."""
        refuse_several(self.path.name, self.several())
        if (
            self.family == "transformers"
            and torch_classes.kind(self.saved_schedule()) == "LambdaLR"
        ):
            return transformers.cooldown(self, decay)
        return super().cooldown(decay)
