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
from ckptsurgeon.formats.schedules import annealing
from ckptsurgeon.formats.schedules.rewarm import HOLD
from ckptsurgeon.hints import Hint, command
from ckptsurgeon.plans.promise import Caveat

ELSEWHERE = (*NEVER, ("load_tag", "--load-tag"), ("reset_iteration", "--reset-iteration"))
"""Saved argument → the option with which a load takes another step, or not all of it."""
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
    args = checkpoint.args()
    after = annealing.by_keys(checkpoint.annealed() or {}) | values
    flags = []
    for key in ("lr", "min_lr", "decay_style"):
        said = args.get(SCHEDULE[key].strip("-").replace("-", "_"))
        if key in values or said not in (None, after[key]):
            flags.append(f"{SCHEDULE[key]} {after[key]}")
    flags += options.counts(args, after["warmup"], after["decay"], "")
    return [_relaunch(checkpoint, " ".join(flags) if all(flags) else "")]


def _relaunch(checkpoint: DeepSpeedShards, flags: str) -> str:
    """Without `flags` where none says what the file says."""
    name = scheduler_name(checkpoint.annealed())
    text = f"relaunch with {USE.format(name)}"
    override = OVERRIDE.format(name)
    places = checkpoint.arguments(override.strip("-").replace("-", "_"))
    if any(place.value for place in places):
        keep = f", or keep it with {flags}" if flags else ""
        return Caveat(
            f"the run was started with {override}, and then the file's schedule is ignored from "
            f"the second step on: {text} instead{keep}",
            "lr",
        )
    way = f", or with {flags}" if flags else ""
    return f"{text}{way}: else Megatron-DeepSpeed asserts that both say the same"


def rebatched(checkpoint: DeepSpeedShards) -> list[str]:
    """What a new batch size changes of a command line that counts the schedule in iterations."""
    if not checkpoint.megatron or options.batch_of(checkpoint.args()) is None:
        return []
    use = USE.format(scheduler_name(checkpoint.annealed()))
    return [f"relaunch with {use} too: the command line counts the schedule in iterations"]


def notes(checkpoint: DeepSpeedShards) -> Iterator[str]:
    """Where the saved command line would undo what the checkpoint says."""
    for name, flag in ELSEWHERE:
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


def rewarm(state: State, kind: str, until: str, iterations: int) -> tuple[Hint, ...]:
    """What BigScience did by hand in three job scripts (tr8b-104B, Embed-Norm experiment 6), with
    the rate in the checkpoint: under ZeRO the first update takes that of the groups, whatever
    --lr says."""
    if kind != HOLD:
        return (
            command(
                "reset",
                "moments",
                why="without re-warm: AnnealingLR can't warm up again in the middle of a run",
            ),
            "GLM-130B's trainer has a flag for it: --warmup-samples-after-loading SAMPLES",
        )
    schedule = state.schedule or {}
    rates = (f"{key}={schedule[name]!r}" for key, name in (("lr", "max_lr"), ("min_lr", "min_lr")))
    return (
        command("reset", "moments", why="without re-warm; then"),
        command("set", "lr=0", "min_lr=0", why="both rates; then"),
        f"relaunch with {USE.format(scheduler_name(schedule))} --train-samples {until}, which of a "
        f"run that counts iterations is --train-iters {state.step + iterations}; then",
        command("set", *rates, why="and relaunch as ever"),
    )
