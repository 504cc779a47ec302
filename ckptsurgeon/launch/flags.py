"""The flags with which a trainer that is not the bundled one goes on from its checkpoint as it is.

Its loader asserts that the command line says what the file says, or computes from the command line
alone; either way a launch script from before the surgery is wrong.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.formats import State
from ckptsurgeon.formats.deepspeed import flags as megatron_deepspeed
from ckptsurgeon.formats.megatron import flags as megatron_flags
from ckptsurgeon.run.run import CONFIG, Run

ADAM = {
    "beta1": "--adam-beta1", "beta2": "--adam-beta2", "eps": "--adam-eps",
    "weight_decay": "--weight-decay", "clip_grad": "--clip-grad", "seed": "--seed",
}  # fmt: skip
LAUNCHERS: Mapping[str, tuple[tuple[str, ...], Mapping[str, str]]] = {
    "deepspeed": (
        ("--load", "{root}", megatron_deepspeed.USE.format("{scheduler}")),
        {**megatron_deepspeed.FLAGS, **ADAM},
    ),
    "megatron": (
        ("--load", "{root}", megatron_flags.USE),
        {**megatron_deepspeed.FLAGS, **ADAM},
    ),
    "fairseq": (("--restore-file", "{file}"), {"clip_grad": "--clip-norm", "seed": "--seed"}),
}
"""Format → what its launcher needs besides values, and recipe key → the flag that says the value.
Sources: `megatron/arguments.py` of both Megatrons, `metaseq/dataclass/configs.py`."""


def launch_flags(run: Run) -> list[str]:
    """Arguments to add to the launch of the latest step, values as the checkpoint has them.

    Raises SurgeryError for a trainer that takes its values from elsewhere."""
    step = run.latest()
    state = run.checkpoint(step).state()
    launcher = LAUNCHERS.get(run.format.name)
    # DeepSpeed's format is Megatron-DeepSpeed's too, if it has a schedule and no bundled trainer.
    other = state.schedule is None or (run.root / CONFIG).is_file()
    if launcher is None or (run.format.name == "deepspeed" and other):
        raise SurgeryError(
            f"this trainer ({state.dialect}) takes no values from flags that are known here",
            next=(
                "ckptsurgeon relaunch       if it is the bundled one",
                "ckptsurgeon plan RECIPE    says which key of its config must follow a change",
            ),
        )
    fixed, flags = launcher
    words = {
        "root": str(run.root),
        "file": str(run.entries(step)[0]),
        "scheduler": megatron_deepspeed.scheduler_name(state.schedule),
    }
    out = [text.format(**words) for text in fixed]
    for key, value in _values(state).items():
        if key in flags and value is not None:
            out += [flags[key], repr(value) if isinstance(value, float) else str(value)]
    return out


def _values(state: State) -> dict[str, Any]:
    promise, schedule = state.promise, state.schedule or {}
    betas = promise.betas or (None, None)
    return {
        "lr": schedule.get("max_lr"),
        "min_lr": schedule.get("min_lr"),
        "warmup": schedule.get("warmup_steps"),
        "decay": schedule.get("decay_steps"),
        "decay_style": schedule.get("decay_style"),
        "beta1": betas[0],
        "beta2": betas[1],
        "eps": promise.eps,
        "weight_decay": max(promise.weight_decay) if promise.weight_decay else None,
        "clip_grad": promise.clip_grad,
        "seed": promise.seed,
    }
