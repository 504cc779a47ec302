"""What the launcher of BigScience's Megatron-DeepSpeed must be told besides its checkpoint.

Source: `megatron/learning_rates.py` and `megatron/arguments.py` of bigscience-workshop/
Megatron-DeepSpeed. On resume its AnnealingLR asserts that the command line says what the file says,
unless it is told whose word counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ckptsurgeon.formats import Setting

if TYPE_CHECKING:
    from ckptsurgeon.formats.deepspeed_checkpoint import DeepSpeedCheckpoint

FLAGS = {
    "lr": "--lr", "min_lr": "--min-lr", "warmup": "--lr-warmup-samples",
    "decay": "--lr-decay-samples", "decay_style": "--lr-decay-style",
}  # fmt: skip
"""Key of the schedule in a recipe → flag."""
USE = "--use-checkpoint-lr-scheduler"
OVERRIDE = "--override-lr-scheduler"


def schedule_flags(checkpoint: DeepSpeedCheckpoint, settings: Sequence[Setting]) -> list[str]:
    """How to relaunch so that the edited schedule is the one that counts."""
    edited = [item for item in settings if "lr_scheduler" in item.place.path]
    wanted = {item.field: item.value for item in edited if item.field in FLAGS}
    if not wanted:
        return []
    flags = " ".join(f"{FLAGS[key]} {value}" for key, value in wanted.items())
    text = f"relaunch with {USE}"
    overrides = {place.value for place in checkpoint.arguments("override_lr_scheduler")}
    if True in overrides:
        return [
            f"the run was started with {OVERRIDE}, and then the file's schedule is ignored from "
            f"the second step on: {text} instead, or keep it with {flags}"
        ]
    return [f"{text}, or with {flags}: else Megatron-DeepSpeed asserts that both say the same"]
