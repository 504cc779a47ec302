"""What Megatron-LM takes from its command line, held against what a checkpoint says.

The loader asserts that both agree, or overwrites one with the other: a surgery that does not say
which flags must follow it would fail, or last for one step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ckptsurgeon.edits import Caveat
from ckptsurgeon.formats.megatron.arguments import plain
from ckptsurgeon.formats.megatron.options import NEVER
from ckptsurgeon.formats.megatron.shards import MegatronShards
from ckptsurgeon.formats.schedules.megatron import in_proportion

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
    groups = [group for item in checkpoint.optimizers() for group in checkpoint.groups(item)]
    schedule = checkpoint.schedule()
    if schedule is not None:
        flags = [*_flags(args, schedule, groups[main]), *_decoupled(args, groups)]
        if flags:
            out.append(
                f"relaunch with {' '.join(dict.fromkeys(flags))}: the trainer asserts that they "
                f"agree with the checkpoint (or add {USE}, and set --lr and "
                "--min-lr all the same; never --override-opt_param-scheduler)"
            )
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
    rerun = checkpoint.in_roots("rerun_state_machine", "state")
    if rerun and str(rerun[0].value) not in ("0", "RerunState.NOT_RUNNING_YET"):
        out.append("a rerun of the last iteration may be pending (rerun_state_machine)")
    return out


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
            yield f"{flag} {now:g}" if isinstance(now, float) else f"{flag} {now}"
    yield from _counts(args, settings["warmup_steps"], settings["decay_steps"])
    if "wd_incr_style" not in schedule:
        return
    start, end = schedule["start_wd"], schedule["end_wd"]
    if schedule["wd_incr_style"] == "constant":
        if args.get("weight_decay") not in (None, end):
            yield f"--weight-decay {end:g}"
    elif (args.get("start_weight_decay"), args.get("end_weight_decay")) != (start, end):
        yield f"--start-weight-decay {start:g} --end-weight-decay {end:g}"


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


def _counts(args: Mapping[str, Any], warmup: float, decay: float) -> Iterator[str]:
    """The flags of both step counts, which `megatron/training/training.py` multiplies: in samples
    or in iterations, the warm-up perhaps as a fraction of the decay."""
    by_samples = any(args.get(f"{n}_samples") for n in ("train", "lr_decay", "lr_warmup"))
    unit, size = ("samples", 1) if by_samples else ("iters", args.get("global_batch_size"))
    length = args.get(f"lr_decay_{unit}") or args.get(f"train_{unit}")
    fraction = args.get("lr_warmup_fraction")
    early = args.get(f"lr_warmup_{unit}")
    if not size:
        return
    if length and length * size != decay:
        yield _count("decay", unit, decay, size)
    if fraction is None and early is not None and early * size != warmup:
        yield _count("warmup", unit, warmup, size)
    elif fraction is not None and fraction * decay != warmup:
        yield f"{_count('warmup', unit, warmup, size)} (in place of --lr-warmup-fraction)"


def _count(name: str, unit: str, now: float, size: int) -> str:
    whole = now % size == 0
    return f"--lr-{name}-{unit} {now // size:.0f}" if whole else USE
