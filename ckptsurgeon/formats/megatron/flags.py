"""What Megatron-LM takes from its command line, held against what a checkpoint says.

The loader asserts that both agree, or overwrites one with the other: a surgery that does not say
which flags must follow it would fail, or last for one step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ckptsurgeon.errors import count
from ckptsurgeon.formats.megatron import identity, tiers
from ckptsurgeon.formats.megatron.arguments import plain
from ckptsurgeon.formats.megatron.options import NEVER, counts
from ckptsurgeon.formats.megatron.shards import MegatronShards
from ckptsurgeon.formats.schedules.megatron import in_proportion
from ckptsurgeon.plans.promise import Caveat

USE = "--use-checkpoint-opt_param-scheduler"
CKPT_STEP = (
    "distrib_optim.pt is read through the tracker: resuming with --ckpt-step would pair weights of "
    "one step with the moments of another, so let the tracker name the step instead"
)


def notes(checkpoint: MegatronShards, main: int) -> list[str]:
    """What to start the trainer with, where the saved command line says something else, and what
    not to start it with."""
    out: list[str] = []
    args = checkpoint.args()
    groups = checkpoint.all_groups()
    schedule = checkpoint.schedule()
    if schedule is not None:
        flags = [*_flags(args, schedule, groups[main]), *_decoupled(args, groups)]
        if flags:
            decay = any("weight-decay" in flag for flag in flags)
            same = "--lr, --min-lr and --weight-decay" if decay else "--lr and --min-lr"
            first = ": the first update takes the decay from there" if decay else ""
            out.append(
                f"relaunch with {' '.join(dict.fromkeys(flags))}: the trainer asserts that they "
                f"agree with the checkpoint (or add {USE}, and set {same} all the same{first}; "
                "never --override-opt_param-scheduler)"
            )
        if checkpoint.found_by_settings:
            out += identity.notes([checkpoint.groups(item) for item in checkpoint.optimizers()])
    if any(path.name == "distrib_optim.pt" for path in checkpoint.trees):
        out.append(CKPT_STEP)
    for name, flag in NEVER:
        if args.get(name):
            out.append(
                f"the run was started with {flag}: relaunch without it, or the trainer loads "
                "neither the optimizer nor the schedule"
            )
    if args.get("override_opt_param_scheduler"):
        out.append(
            Caveat(
                "the run was started with --override-opt_param-scheduler: with it, the schedule in "
                "the checkpoint is ignored, and num_steps becomes the consumed samples",
                "lr",
                known=False,
            )
        )
    out += tiers.notes(args, _run(checkpoint.path), checkpoint.step)
    pending = checkpoint.pending()
    if pending is not None:
        out.append(
            f"iteration {pending} is to be run again with micro-batches that the checkpoint holds: "
            "resume it as it is once, or relaunch with --rerun-mode disabled to leave that out"
        )
    skipped = args.get("skipped_train_samples")
    if skipped:
        out.append(
            f"{count(skipped, 'sample was', 'samples were')} skipped (--iterations-to-skip): they "
            "are among the consumed ones, and the schedule stands that much earlier"
        )
    own = any(group.get("start_wd") is not None for group in groups)
    if own and checkpoint.found_by_settings:
        out.append(
            "param groups have a weight decay of their own (start_wd, end_wd), and are found by "
            "it: what the trainer gives them (its config overrides) must be the same"
        )
    return out


def _run(folder: Path) -> Path:
    return folder.parent.parent if folder.parent.name == tiers.OTHER else folder.parent


def _flags(
    args: Mapping[str, Any], schedule: Mapping[str, Any], group: Mapping[str, Any]
) -> Iterator[str]:
    settings = plain(schedule, group)
    for name, flag, now in (
        ("lr", "--lr", settings["max_lr"]),
        ("min_lr", "--min-lr", settings["min_lr"]),
        ("lr_decay_style", "--lr-decay-style", settings["decay_style"]),
    ):
        if name in args and args[name] is not None and args[name] != now:
            yield f"{flag} {now!r}" if isinstance(now, float) else f"{flag} {now}"
    yield from counts(args, settings["warmup_steps"], settings["decay_steps"], USE)
    if "wd_incr_style" not in schedule:
        return
    if _increase(args) not in (None, schedule.get("wd_incr_steps")):
        yield USE
    start, end = schedule["start_wd"], schedule["end_wd"]
    if schedule["wd_incr_style"] == "constant":
        if args.get("weight_decay") not in (None, end):
            yield f"--weight-decay {end!r}"
    elif (args.get("start_weight_decay"), args.get("end_weight_decay")) != (start, end):
        yield f"--start-weight-decay {start!r} --end-weight-decay {end!r}"


def _increase(args: Mapping[str, Any]) -> float | None:
    """Over how many samples the weight decay goes to its end: all of the training."""
    iterations, size = args.get("train_iters"), args.get("global_batch_size")
    if args.get("train_samples"):
        return float(args["train_samples"])
    return iterations * size if iterations and size else None


def _decoupled(args: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """The rates of embedding and output where they have flags of their own."""
    for base, key in (("lr", "max_lr"), ("min_lr", "min_lr")):
        own, old = args.get(f"decoupled_{base}"), args.get(base)
        rates = {group[key] for group in groups if key in group}
        if own is None or not old or own in rates:
            continue
        for new in rates:
            if in_proportion(own, old, new) in rates:
                yield f"--decoupled-{base.replace('_', '-')} {in_proportion(own, old, new)!r}"
