"""What the Trainer's own files say of the updates after a load: their rates, and an epoch's number
of them. Its LambdaLR is a function of arguments that each step has.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.files import json_text
from ckptsurgeon.files.archives.archive import Archive
from ckptsurgeon.formats.fields.constants import TRAINER_STATE
from ckptsurgeon.formats.schedules import torch_classes, transformers

ARGUMENTS = "training_args.bin"


def arguments(step: Path) -> Mapping[str, Any]:
    """The saved TrainingArguments, read and not unpickled; empty where there are none."""
    try:
        values = getattr(Archive.open(step / ARGUMENTS).tree(), "state", None)
    except (SurgeryError, OSError):
        return {}
    return values if isinstance(values, dict) else {}


def of(step: Path, scheduler: Any, rate: float | None) -> Callable[[int], float | None] | None:
    """The rate of the k-th update from a step on, of which the next one has `rate`. None where
    that is not what the arguments give: the schedule is then the user's own."""
    if rate is None or torch_classes.kind(scheduler) != "LambdaLR":
        return None
    share = transformers.schedule(arguments(step), _state(step).get("max_steps"))
    if share is None:
        return None
    base, now = float(scheduler["base_lrs"][0]), int(scheduler["last_epoch"])
    given = share(now)
    if given is None or not math.isclose(base * given, rate, rel_tol=1e-6):
        return None

    def later(k: int) -> float | None:
        factor = share(now + k - 1)
        return None if factor is None else base * factor

    return later


def epoch_steps(step: Path) -> float | None:
    """The updates of an epoch; None where no state says it."""
    state = _state(step)
    count, epoch = state.get("global_step"), state.get("epoch")
    if not isinstance(count, int) or not isinstance(epoch, (int, float)) or not epoch:
        return None
    return count / epoch


def _state(step: Path) -> Mapping[str, Any]:
    """`trainer_state.json`; empty where there is none."""
    try:
        return json_text.mapping(step / TRAINER_STATE)
    except (OSError, SurgeryError):
        return {}
