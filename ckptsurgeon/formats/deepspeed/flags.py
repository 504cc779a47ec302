"""What the launcher of Megatron-DeepSpeed must be told besides its checkpoint.

Source: `megatron/learning_rates.py` and `megatron/arguments.py` of bigscience-workshop/
Megatron-DeepSpeed, `megatron/optimizer_param_scheduler.py` of deepspeedai/Megatron-DeepSpeed. On
resume the scheduler asserts that the command line says what the file says, unless it is told whose
word counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ckptsurgeon.formats.advice import loaded
from ckptsurgeon.formats.deepspeed.shards import DeepSpeedShards
from ckptsurgeon.formats.fields.values import Setting, State
from ckptsurgeon.formats.megatron import options
from ckptsurgeon.formats.megatron.options import NEVER, SCHEDULE
from ckptsurgeon.formats.schedules.rewarm import HOLD
from ckptsurgeon.hints import Hint, command
from ckptsurgeon.plans.promise import Caveat

USE, OVERRIDE = "--use-checkpoint-{}", "--override-{}"
"""With the name of the scheduler's class, as the trainer's flags spell it."""


def scheduler_name(schedule: Mapping[str, Any] | None) -> str:
    """As flags spell it. OptimizerParamScheduler saves a weight decay, AnnealingLR none."""
    return "opt_param-scheduler" if "start_wd" in (schedule or {}) else "lr-scheduler"


def schedule_flags(checkpoint: DeepSpeedShards, settings: Sequence[Setting]) -> list[str]:
    """How to relaunch so that the edited schedule is the one that counts."""
    edited = [item for item in settings if "lr_scheduler" in item.place.path]
    values = {item.field: item.value for item in edited if item.field in SCHEDULE}
    if not values:
        return []
    flags = " ".join(f"{SCHEDULE[key]} {value}" for key, value in values.items())
    return [_relaunch(checkpoint, flags)]


def _relaunch(checkpoint: DeepSpeedShards, flags: str) -> str:
    name = scheduler_name(checkpoint.annealed())
    text = f"relaunch with {USE.format(name)}"
    override = OVERRIDE.format(name)
    places = checkpoint.arguments(override.strip("-").replace("-", "_"))
    if any(place.value for place in places):
        return Caveat(
            f"the run was started with {override}, and then the file's schedule is ignored from "
            f"the second step on: {text} instead, or keep it with {flags}",
            "lr",
        )
    return f"{text}, or with {flags}: else Megatron-DeepSpeed asserts that both say the same"


def notes(checkpoint: DeepSpeedShards) -> Iterator[str]:
    """Where the saved command line would undo what the checkpoint says."""
    for name, flag in NEVER:
        if any(place.value for place in checkpoint.arguments(name)):
            yield (
                f"the run was started with {flag}: relaunch without it, or the trainer leaves what "
                "the checkpoint says aside, wholly or in part"
            )
    schedule = checkpoint.annealed() or {}
    if "end_wd" not in schedule:
        return
    start, end = schedule["start_wd"], schedule["end_wd"]
    pairs = [(p.value, start) for p in checkpoint.arguments("start_weight_decay")]
    pairs += [(p.value, end) for p in checkpoint.arguments("end_weight_decay")]
    if any(flag not in (None, value) for flag, value in pairs):
        constant = schedule.get("wd_incr_style") == "constant"
        both = f"--start-weight-decay {start:g} --end-weight-decay {end:g}"
        yield _relaunch(checkpoint, f"--weight-decay {end:g}" if constant else both)


def launch(run: Path, state: State, args: Mapping[str, Any]) -> list[str]:
    """The folder, the file's schedule, and every value, which the loader compares."""
    use = USE.format(scheduler_name(state.schedule))
    return [*loaded("--load", run), use, *options.values(state, args)]


def rewarm(schedule: Mapping[str, Any], kind: str, until: str) -> tuple[Hint, ...]:
    """What BigScience did by hand in three job scripts (tr8b-104B, Embed-Norm experiment 6).
    Megatron-LM's trainer finds no param group again under another --lr, so this is not for it."""
    override = OVERRIDE.format(scheduler_name(schedule))
    if kind != HOLD:
        return (
            command(
                "reset",
                "moments",
                why="without re-warm: AnnealingLR can't warm up again in the middle of a run",
            ),
            "GLM-130B's trainer has a flag for it: --warmup-samples-after-loading SAMPLES",
        )
    return (
        command("reset", "moments", why="without re-warm; then three launches of your trainer:"),
        f"1. --lr 0 --min-lr 0 {override} --train-samples {until}",
        f"2. --lr, --min-lr and --train-samples as ever, and {override}",
        f"3. from then on the same without {override}",
    )
