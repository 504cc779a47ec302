"""What Megatron-LM takes from its command line, held against what a checkpoint says.

The loader asserts that both agree, or overwrites one with the other: a surgery that does not say
which flags must follow it would fail, or last for one step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.formats.schedules.megatron import value

if TYPE_CHECKING:
    from ckptsurgeon.formats.megatron.checkpoint import MegatronCheckpoint

FIELDS = ("iteration", "checkpoint_version", "opt_param_scheduler", "lr_scheduler")
PARALLEL = ("tensor_model_parallel_size", "pipeline_model_parallel_size")
USE = "--use-checkpoint-opt_param-scheduler"
NEVER = (("finetune", "--finetune"), ("no_load_optim", "--no-load-optim"))
"""Saved argument → the flag, of every Megatron, with which a load leaves a surgery out."""
CKPT_STEP = (
    "distrib_optim.pt is read through the tracker: resuming with --ckpt-step would pair weights of "
    "one step with the moments of another, so let the tracker name the step instead"
)


def unsaved(args: Mapping[str, Any]) -> dict[str, Any]:
    """The scheduler's parameters that only the saved args tell: `init_lr`, and those of WSD."""
    out: dict[str, Any] = {"init_lr": args.get("lr_warmup_init") or 0.0}
    iterations, batch = args.get("lr_wsd_decay_iters"), args.get("global_batch_size")
    steps = args.get("lr_wsd_decay_samples")
    if steps is None and iterations is not None and batch is not None:
        steps = iterations * batch
    return {**out, "wsd_decay_steps": steps, "lr_wsd_decay_style": args.get("lr_wsd_decay_style")}


def plain(schedule: Mapping[str, Any], group: Mapping[str, Any]) -> dict[str, Any]:
    """The schedule of one param group, by AnnealingLR's names."""
    return {
        "max_lr": group.get("max_lr", value(schedule, "max_lr")),
        "min_lr": group.get("min_lr", value(schedule, "min_lr")),
        "warmup_steps": value(schedule, "warmup"),
        "num_steps": value(schedule, "num_steps"),
        "decay_steps": value(schedule, "decay"),
        "decay_style": value(schedule, "decay_style"),
    }


def rampup(args: Mapping[str, Any]) -> tuple[int, int, int] | None:
    """`--rampup-batch-size`: start, increment, samples."""
    held = args.get("rampup_batch_size")
    if not isinstance(held, (list, tuple)) or len(held) != 3:
        return None
    return int(held[0]), int(held[1]), int(held[2])


def notes(checkpoint: MegatronCheckpoint, main: int) -> list[str]:
    """What to start the trainer with, where the saved command line says something else, and what
    not to start it with."""
    out = []
    args = checkpoint.args()
    groups = [group for item in checkpoint.optimizers() for group in checkpoint.groups(item)]
    schedule = checkpoint.schedule()
    if schedule is not None:
        flags = list(_flags(args, schedule, groups[main]))
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
            "the run was started with --override-opt_param-scheduler: with it, the schedule in the "
            "checkpoint is ignored, and num_steps becomes the consumed samples"
        )
    rerun = checkpoint.in_roots("rerun_state_machine", "state")
    if rerun and str(rerun[0].value) not in ("0", "RerunState.NOT_RUNNING_YET"):
        out.append("a rerun of the last iteration may be pending (rerun_state_machine)")
    return out


def _flags(
    args: Mapping[str, Any], schedule: Mapping[str, Any], group: Mapping[str, Any]
) -> Iterator[str]:
    held = plain(schedule, group)
    for name, flag, now in (
        ("lr", "--lr", held["max_lr"]),
        ("min_lr", "--min-lr", held["min_lr"]),
        ("lr_decay_style", "--lr-decay-style", held["decay_style"]),
    ):
        if name in args and args[name] is not None and args[name] != now:
            yield f"{flag} {now:g}" if isinstance(now, float) else f"{flag} {now}"
    yield from _counts(args, held["warmup_steps"], held["decay_steps"])
    if "wd_incr_style" not in schedule:
        return
    start, end = schedule["start_wd"], schedule["end_wd"]
    if schedule["wd_incr_style"] == "constant":
        if args.get("weight_decay") not in (None, end):
            yield f"--weight-decay {end:g}"
    elif (args.get("start_weight_decay"), args.get("end_weight_decay")) != (start, end):
        yield f"--start-weight-decay {start:g} --end-weight-decay {end:g}"


def _counts(args: Mapping[str, Any], warmup: float, decay: float) -> Iterator[str]:
    """The flags of both step counts, which `megatron/training/training.py` multiplies: in samples
    or in iterations, the warm-up perhaps as a fraction of the decay."""
    by_samples = any(args.get(f"{n}_samples") for n in ("train", "lr_decay", "lr_warmup"))
    unit, size = ("samples", 1) if by_samples else ("iters", args.get("global_batch_size"))
    told = args.get(f"lr_decay_{unit}") or args.get(f"train_{unit}")
    fraction = args.get("lr_warmup_fraction")
    early = args.get(f"lr_warmup_{unit}")
    if not size:
        return
    if told and told * size != decay:
        yield _count("decay", unit, decay, size)
    if fraction is None and early is not None and early * size != warmup:
        yield _count("warmup", unit, warmup, size)
    elif fraction is not None and fraction * decay != warmup:
        yield f"{_count('warmup', unit, warmup, size)} (in place of --lr-warmup-fraction)"


def _count(name: str, unit: str, now: float, size: int) -> str:
    whole = now % size == 0
    return f"--lr-{name}-{unit} {now // size:.0f}" if whole else USE


def contradictions(checkpoint: MegatronCheckpoint) -> list[str]:
    """One sentence for each field in which shards differ, and each number that can't be."""
    out: list[str] = []
    for look in (_values, _steps, _rates):
        try:
            out += look(checkpoint)
        except SurgeryError as error:
            out.append(error.what)
    return list(dict.fromkeys(out))


def _values(checkpoint: MegatronCheckpoint) -> Iterator[str]:
    for name in (
        "betas",
        "eps",
        "weight_decay",
        "max_lr",
        "min_lr",
        "warmup",
        "decay",
        "num_steps",
        "decay_style",
        "lr",
        "consumed_samples",
        "loss_scale",
        "iteration",
    ):
        try:
            by_path: dict[Any, list[Any]] = {}
            for place in checkpoint.locate(name):
                by_path.setdefault(place.path, []).append(place)
        except SurgeryError as error:
            yield error.what
            continue
        for path, places in by_path.items():
            for place in places[1:]:
                if place.value != places[0].value:
                    yield (
                        f"shards disagree on {name} ({'.'.join(map(str, path[-3:]))}): "
                        f"{places[0].value!r} in {_short(places[0].file)}, {place.value!r} in "
                        f"{_short(place.file)}"
                    )


def _steps(checkpoint: MegatronCheckpoint) -> Iterator[str]:
    steps = {place.value for place in checkpoint.locate("adam_step")}
    if len(steps) > 1:
        yield f"the param groups count different Adam steps, and the loader asserts one: {steps}"
    for place in checkpoint.in_roots("iteration"):
        # `set iteration` leaves Adam's step; a shard of another step has its own.
        if place.value != checkpoint.step and (not steps or place.value in steps):
            yield f"{_short(place.file)}: holds iteration {place.value}, not {checkpoint.step}"


def _rates(checkpoint: MegatronCheckpoint) -> Iterator[str]:
    """The saved lr and the schedule: what differs was edited by hand, or is of another step."""
    if checkpoint.schedule() is None:
        return
    for item in checkpoint.optimizers():
        for i, group in enumerate(checkpoint.groups(item)):
            saved, wanted = group.get("lr"), checkpoint.rate(group)
            if isinstance(saved, (int, float)) and abs(saved - wanted) > 1e-6 * abs(wanted):
                yield (
                    f"{_short(item.file)}: param group {i} has lr {saved!r}, which the loader "
                    f"replaces by {wanted!r} from its max_lr and min_lr"
                )


def _short(file: Any) -> str:
    return f"{file.parent.name}/{file.name}"


__all__ = ["contradictions", "notes", "plain", "rampup", "unsaved"]
