"""A DeepSpeed step inside the checkpoint of another trainer, which keeps a scheduler of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ckptsurgeon import disk
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.formats.deepspeed.checkpoint import DeepSpeedCheckpoint
from ckptsurgeon.formats.deepspeed.layout import DeepSpeed
from ckptsurgeon.formats.deepspeed.shards import POSITIONS
from ckptsurgeon.formats.fields.constants import SAFE
from ckptsurgeon.formats.fields.values import Box, Located, Part, Place, State
from ckptsurgeon.formats.places.safetensors_beside import SafetensorsBeside

BINS = ("pytorch_model.bin", "model.pt")
"""Files of whole weights beside an engine."""


class Engine(DeepSpeed):
    """A DeepSpeed step whose folder is known, whatever its name."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    def directory(self, run: Path, step: int) -> Path:
        """The folder."""
        return self._folder


@dataclass
class EngineCheckpoint(SafetensorsBeside, DeepSpeedCheckpoint):
    """`schedulers` are (file, path of the state) that the engine's trainer loads after it;
    `doubts` what else a reader of its promise must know."""

    schedulers: tuple[Located, ...] = ()
    doubts: tuple[str, ...] = ()

    def find(self, field: str) -> Sequence[Place]:
        """The engine's places, and of the schedulers those beside it."""
        places = [*super().find(field)]
        if field == "scheduler":
            places += self.below(self.schedulers)
        if field == "position":
            places += [p for key in POSITIONS for p in self.below(self.schedulers, key)]
        return places

    def schedule(self) -> Any:
        """The engine's; else that beside it, which is loaded after."""
        inner = super().schedule()
        if inner is None and self.schedulers:
            return self.value(*self.schedulers[0])
        return inner

    def parts(self) -> list[Part]:
        """Those of the engine, which is what a resume loads. Refused where the weights are saved
        beside it once more: that copy would stay as it was."""
        self._refuse((SAFE, *BINS))
        return super().parts()

    def all_parts(self) -> list[Part]:
        """Of safetensors, as each file has its names; refused for the others."""
        self._refuse(BINS)
        found = self.with_still(super().parts())
        cuts = {part.parameter: part.cut for part in found}
        for file in disk.matching(self.path, f"*{SAFE}"):
            for name, place in self.tensors(file).items():
                if name in cuts:
                    box = Box.all(place.value.size, replica=True)
                    found.append(Part.whole(name, cuts[name], "weights", place, box))
        return found

    def _refuse(self, ends: tuple[str, ...]) -> None:
        """Raise SurgeryError where a file of such a name repeats the weights."""
        copies = sorted(path.name for path in self.path.iterdir() if path.name.endswith(ends))
        if copies:
            step, name = self.path.name, copies[0]
            raise SurgeryError(
                f"{step}/{name} repeats the weights of the engine, and would keep the old ones",
                next=f"move it out of {step}, and out of each other step that the command reads; "
                f"export {step} anew afterwards",
            )

    def read_state(self) -> State:
        """The engine's, with the doubts."""
        state = super().read_state()
        return replace(state, notes=(*state.notes, *self.doubts))

    def contradictions(self) -> list[str]:
        """Also two schedulers of different positions."""
        sentences = super().contradictions()
        return [*sentences, *self._positions()]

    def _positions(self) -> Iterator[str]:
        positions = {
            place.file.name: next((place.value[k] for k in POSITIONS if k in place.value), None)
            for place in self.locate("scheduler")
        }
        if len(set(positions.values())) > 1:
            yield f"schedulers stand at different steps: {positions}"
