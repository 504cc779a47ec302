"""A step of the Trainer that an engine of DeepSpeed wrote, and one of several such engines.

The Trainer's rates are in its arguments too, which its DeepSpeed config must repeat."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckptsurgeon.errors import NotUnderstood, SurgeryError
from ckptsurgeon.formats.capabilities import Capability
from ckptsurgeon.formats.deepspeed.engine import EngineCheckpoint
from ckptsurgeon.formats.fields.values import Decay, Part, Place, Setting
from ckptsurgeon.formats.places.json_beside import JsonBeside
from ckptsurgeon.formats.schedules import deepspeed, torch_classes, transformers

ARGUMENTS = {"lr": "--learning_rate", "warmup": "--warmup_steps", "decay": "--max_steps"}
"""Key of a recipe → the argument that the Trainer compares with the DeepSpeed config."""


@dataclass
class TrainerEngine(JsonBeside, EngineCheckpoint):
    """As the Trainer resumes it: by `trainer_state.json`, which is among its `texts`."""

    def find(self, field: str) -> Sequence[Place]:
        """The Trainer's own count decides which batches a resume passes over."""
        places = list(super().find(field))
        if field == "iteration":
            places = [place._replace(wins=False) for place in places]
            places += [p for file in self.texts for p in self.at(file, ("global_step",))]
        return places

    def _iteration(self) -> int:
        counts = [p.value for file in self.texts for p in self.at(file, ("global_step",))]
        return int(counts[0]) if counts else super()._iteration()

    def reschedule(self, values: Mapping[str, Any]) -> tuple[list[Setting], list[str]]:
        """Of a scheduler of DeepSpeed, also the Trainer's own arguments: it ends with a ValueError
        where they differ from the config."""
        settings, notes = super().reschedule(values)
        flags = [f"{ARGUMENTS[key]} {values[key]!r}" for key in values if key in ARGUMENTS]
        if notes and flags and not torch_classes.is_torch(self.schedule()):
            notes = [
                *notes,
                f"relaunch with {' '.join(flags)} too: the Trainer compares its arguments with "
                'each copy in the DeepSpeed config that is not "auto"',
            ]
        return settings, notes

    def cooldown(self, decay: Decay) -> tuple[list[Setting], list[str]]:
        """By the Trainer's arguments where its schedule is one of its own; of a scheduler of
        DeepSpeed by both. The Trainer ends with the schedule, so its total is its last step."""
        if torch_classes.kind(self.schedule()) == "LambdaLR":
            return transformers.cooldown(self, decay)
        if deepspeed.is_deepspeed(self.schedule()):
            return deepspeed.cooldown(self, decay, self.step + decay.steps)
        return super().cooldown(decay)


@dataclass
class AccelerateEngine(EngineCheckpoint):
    """As `load_state` loads it, by its folder: the engine's own counters say the step."""

    @property
    def numbered(self) -> bool:
        """A name counts saves, or is the script's own."""
        return False


@dataclass
class SeveralEngines(AccelerateEngine):
    """A model to each engine: the step moves as a whole, and no value of it is read or set, as a
    recipe does not say of which model it is."""

    engines: tuple[str, ...] = ()

    @property
    def unable(self) -> Collection[type]:
        """All that an engine can."""
        return {kind for kind in type(self).__mro__ if issubclass(kind, Capability)}

    def find(self, field: str) -> Sequence[Place]:
        """Refused, but for what only a trainer of its own keeps: an optimizer's name."""
        if field == "optimizer":
            return []
        raise NotUnderstood(self._several().what, next=self._several().hints)

    def parts(self) -> list[Part]:
        """Refused."""
        raise self._several()

    def contradictions(self) -> list[str]:
        """Of files alone, which are checked with the others of the step."""
        return []

    def _several(self) -> SurgeryError:
        return SurgeryError(
            f"{self.path.name} holds {len(self.engines)} engines ({', '.join(self.engines)}), and "
            "of which one a value is meant is not known",
            next="load the step in the script, and set the value of the model that is meant",
        )
