"""What the checkpoint, not the config, decides about the way ahead of a resumed run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from .config import Config
from .curriculum import Curriculum
from .rewarm import Rewarm, open_window


@dataclass
class Course:
    """Iterations to skip, the seed of the data order, the open re-warm window, the curriculum."""

    skip: list[list[int]]
    seed: int
    rewarm: Rewarm | None = None
    curriculum: Curriculum | None = None

    def length(self, iteration: int, seq_length: int) -> int:
        """The tokens of each sample in the 1-based `iteration`."""
        if self.curriculum is None:
            return seq_length
        return self.curriculum.length(iteration, seq_length)

    def as_saved(self) -> dict[str, Any]:
        """Top-level keys of the client state (the seed is among Megatron's `args`)."""
        return {
            "skip_train_iteration_range": [list(pair) for pair in self.skip],
            "rewarm": [] if self.rewarm is None else self.rewarm.as_saved(),
            "curriculum": None if self.curriculum is None else asdict(self.curriculum),
        }


def course_of(config: Config) -> Course:
    """The course of a new run."""
    return Course(config.skip_train_iteration_range, config.seed, None, config.curriculum)


def saved_course(state: Mapping[str, Any], schedule_samples: int) -> Course:
    """The course in a client state whose schedule is at `schedule_samples`. Raises TrainError."""
    curriculum = state.get("curriculum")
    return Course(
        skip=[[int(a), int(b)] for a, b in state["skip_train_iteration_range"]],
        seed=int(state["args"].seed),
        rewarm=open_window(state.get("rewarm") or [], schedule_samples),
        curriculum=None if curriculum is None else Curriculum(**curriculum),
    )
