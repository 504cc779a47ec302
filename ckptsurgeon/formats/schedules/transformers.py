"""The schedules of the Hugging Face Trainer, which its checkpoint keeps as arguments.

Source: `transformers/optimization.py` (`_get_linear_schedule_with_warmup_lr_lambda` and its kin)
and `TrainingArguments.get_warmup_steps` of 5.23.0; `warmup_ratio` is of older releases.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.formats.checkpoint import Checkpoint
from ckptsurgeon.formats.fields.values import Decay, Setting
from ckptsurgeon.formats.schedules import torch_cooldown
from ckptsurgeon.formats.schedules.check import one_scheduler, refuse_no_rate

Share = Callable[[int], float | None]


def schedule(arguments: Mapping[str, Any], total: Any) -> Share | None:
    """What the base rate is multiplied by at a step, by the saved arguments and `max_steps`.

    None where they do not say: a schedule with arguments of its own, or none at all."""
    name = _name(arguments.get("lr_scheduler_type"))
    if name is None or not isinstance(total, int) or total <= 0:
        return None
    if arguments.get("lr_scheduler_kwargs"):
        return None
    warmup = _warmup(arguments, total)
    if warmup is None:
        return None

    def share(now: int) -> float | None:
        if name == "constant":
            return 1.0
        if now < warmup:
            return now / max(1, warmup)
        if name == "constant_with_warmup":
            return 1.0
        left = max(1, total - warmup)
        if name == "linear":
            return max(0.0, (total - now) / left)
        return max(0.0, 0.5 * (1.0 + math.cos(math.pi * (now - warmup) / left)))

    return share if name in ("linear", "cosine", "constant", "constant_with_warmup") else None


def cooldown(checkpoint: Checkpoint, decay: Decay) -> tuple[list[Setting], list[str]]:
    """The rate of the next step as the base rate, and the arguments that make the Trainer's
    warmup_stable_decay of it. Raises SurgeryError with them where nothing else is to do."""
    (state, *_) = (place.value for place in one_scheduler(checkpoint))
    top = max((float(place.value) for place in checkpoint.locate("lr")), default=0.0)
    refuse_no_rate(top)
    settings = torch_cooldown.rebased(checkpoint)
    kwargs = {
        "num_decay_steps": decay.steps,
        "decay_type": decay.shape,
        "min_lr_ratio": decay.to / top,
    }
    last = int(state["last_epoch"]) + decay.steps
    options = (
        f"--lr_scheduler_type warmup_stable_decay --lr_scheduler_kwargs '{json.dumps(kwargs)}' "
        f"--warmup_steps 0 --max_steps {last}"
    )
    if not settings:
        raise SurgeryError(
            "the checkpoint keeps the base rate and the step; the decay is in the Trainer's "
            "arguments",
            next=f"relaunch with {options}",
        )
    return settings, [f"relaunch with {options}: the shape of the decay is in no checkpoint"]


def _name(value: Any) -> str | None:
    """The word of an enumeration, as a pickle keeps it: a call with the word. Some releases of
    Python 3.11 keep the name of the member, which is the word in capitals."""
    if isinstance(value, str):
        return value
    arguments = getattr(value, "args", None)
    word = arguments[0] if isinstance(arguments, (tuple, list)) and arguments else None
    return word.lower() if isinstance(word, str) else None


def _warmup(arguments: Mapping[str, Any], total: int) -> int | None:
    """`warmup_steps`, below 1 a share of all steps; else that share, `warmup_ratio`."""
    steps, ratio = arguments.get("warmup_steps") or 0, arguments.get("warmup_ratio") or 0.0
    if not isinstance(steps, (int, float)) or not isinstance(ratio, (int, float)):
        return None
    if steps >= 1:
        return int(steps)
    return math.ceil(total * (steps or ratio))
