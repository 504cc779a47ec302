"""A saved scheduler of any trainer that keeps torch's state dicts, or none: what sets its rates."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.formats.checkpoint import Checkpoint
from ckptsurgeon.formats.fields.understood import understood
from ckptsurgeon.formats.fields.values import Located, Place, Setting
from ckptsurgeon.formats.schedules import annealing, mmengine, nemo, torch, torch_classes
from ckptsurgeon.formats.schedules.check import AFTER_LOADING
from ckptsurgeon.plans.promise import Caveat

UNSEEN = Caveat(
    "initial_lr in the param groups says that a scheduler makes the rate, and its state is not "
    "among what is read here: lr is what the last step used, and what the next one uses is not "
    "known",
    "lr",
    known=False,
)
FOREIGN = Caveat(
    "the saved scheduler is of no class that is known here: lr is what the last step used, and "
    "what the next one uses is not known",
    "lr",
    known=False,
)
SCALED = (
    "initial_lr of the param groups is scaled as lr is: code that computes the rate from it, as "
    "torch's schedulers do, goes on from the new one"
)


def reschedule(
    checkpoint: Checkpoint, schedule: Any, values: Mapping[str, Any]
) -> tuple[list[Setting], list[str]]:
    """By the class of `schedule`; lr alone where none is saved. Raises SurgeryError for a class
    that no rule is known of."""
    with understood(checkpoint.path):
        if torch_classes.is_torch(schedule):
            return torch.reschedule(checkpoint, values)
        if mmengine.is_one(schedule):
            return mmengine.reschedule(checkpoint, values)
        if schedule is not None:
            why = "no scheduler of torch saves such keys"
            if (
                isinstance(schedule, Mapping)
                and schedule.keys() - torch_classes.COMMON == nemo.SHARED
            ):
                why = (
                    "WarmupPolicy, WarmupAnnealing and three more of NeMo's save the same keys, "
                    "and above a min_lr of 0 they differ"
                )
            raise SurgeryError(
                f"what the saved scheduler makes of an lr is not known here: {why}",
                next=AFTER_LOADING,
            )
        settings, notes = annealing.reschedule(checkpoint, values)
        return settings, [*notes, *([SCALED] if is_unseen(checkpoint, schedule) else [])]


def is_unseen(checkpoint: Checkpoint, schedule: Any) -> bool:
    """Whether a scheduler of torch made the rates, and its state is not in what is read here: it
    left `initial_lr` in the groups."""
    return schedule is None and bool(checkpoint.locate("initial_lr"))


def scaler_start(checkpoint: Checkpoint, scales: Iterable[Located]) -> list[tuple[Place, Any]]:
    """torch's GradScaler begins at 65536 and counts the steps since the last change."""
    start: list[tuple[Place, Any]] = [(place, 65536.0) for place in checkpoint.locate("loss_scale")]
    for file, path in scales:
        start += [(place, 0) for place in checkpoint.at(file, (*path[:-1], "_growth_tracker"))]
    return start
