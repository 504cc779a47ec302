"""Curriculum on the sequence length: short samples first, as in DeepSpeed and its Megatron."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Optional  # OmegaConf evaluates these annotations, on 3.10 as well

from .errors import UsageError

SCHEDULES = ("fixed_linear", "fixed_root", "fixed_discrete")


@dataclass
class Curriculum:
    """DeepSpeed's `curriculum_learning` section of type seqlen, its `schedule_config` in line.

    Lengths are tokens, steps are iterations. `fixed_discrete` has a `difficulty` for each stretch
    that ends at a `max_step`, and one more for the rest.
    """

    min_difficulty: int = 8
    max_difficulty: Optional[int] = None  # default seq_length  # noqa: UP045
    schedule_type: str = "fixed_linear"
    total_curriculum_step: int = 1
    difficulty_step: int = 8
    root_degree: int = 2
    difficulty: list[int] = field(default_factory=list)
    max_step: list[int] = field(default_factory=list)

    def length(self, iteration: int, seq_length: int) -> int:
        """The tokens of each sample in the 1-based `iteration`.

        Source: `deepspeed/runtime/data_pipeline/curriculum_scheduler.py`."""
        if self.schedule_type == "fixed_discrete":
            stages = zip(self.max_step, self.difficulty, strict=False)
            return next((d for last, d in stages if iteration <= last), self.difficulty[-1])
        most = self.max_difficulty or seq_length
        degree = self.root_degree if self.schedule_type == "fixed_root" else 1
        share = math.pow(iteration / self.total_curriculum_step, 1.0 / degree)
        length = math.floor(share * (most - self.min_difficulty) + self.min_difficulty)
        return min(length - length % self.difficulty_step, most)


def check_curriculum(curriculum: Curriculum, seq_length: int) -> None:
    """Refuse a curriculum that has no length for an iteration. Raises UsageError."""
    c = curriculum
    if c.schedule_type not in SCHEDULES:
        raise _wrong("schedule_type", c.schedule_type, " or ".join(SCHEDULES))
    if c.schedule_type == "fixed_discrete":
        if len(c.difficulty) != len(c.max_step) + 1:
            raise _wrong("difficulty", c.difficulty, "one longer than max_step")
        if c.difficulty != sorted(c.difficulty) or c.max_step != sorted(c.max_step):
            raise _wrong("difficulty", c.difficulty, "ascending, and so must max_step")
        lengths = c.difficulty
    else:
        for key in ("total_curriculum_step", "difficulty_step", "root_degree"):
            if getattr(c, key) < 1:
                raise _wrong(key, getattr(c, key), "at least 1")
        if c.min_difficulty % c.difficulty_step:
            raise _wrong("min_difficulty", c.min_difficulty, "a multiple of difficulty_step")
        most = c.max_difficulty or seq_length
        if c.min_difficulty > most:
            raise _wrong("min_difficulty", c.min_difficulty, f"at most {most}")
        lengths = [c.min_difficulty, most]
    for length in lengths:
        if not 1 <= length <= seq_length:
            raise _wrong("difficulty", length, f"in 1 … seq_length {seq_length}")


def _wrong(key: str, value: object, must: str) -> UsageError:
    return UsageError(
        f"curriculum.{key} is {value}; it must be {must}", next=f"change curriculum.{key}"
    )
