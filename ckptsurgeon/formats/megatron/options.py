"""The options that the launchers of every Megatron have, and what a checkpoint makes of them.

Sources: `megatron/arguments.py` of NVIDIA's Megatron-LM and of both Megatron-DeepSpeeds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ckptsurgeon.formats.fields.values import State

SCHEDULE: Mapping[str, str] = {
    "lr": "--lr", "min_lr": "--min-lr", "warmup": "--lr-warmup-samples",
    "decay": "--lr-decay-samples", "decay_style": "--lr-decay-style",
}  # fmt: skip
"""Key of the schedule in a recipe → option."""
OPTIONS: Mapping[str, str] = {
    **SCHEDULE, "beta1": "--adam-beta1", "beta2": "--adam-beta2", "eps": "--adam-eps",
    "weight_decay": "--weight-decay", "clip_grad": "--clip-grad", "seed": "--seed",
    "batch_size": "--global-batch-size", "rampup": "--rampup-batch-size",
}  # fmt: skip
"""Key of a recipe → option."""
BATCH = {"batch_size": "global_batch_size", "rampup": "rampup_batch_size"}
"""Field → its name in the saved args, which no loader reads back."""
NEVER = (("finetune", "--finetune"), ("no_load_optim", "--no-load-optim"))
"""Saved argument → the option with which a load leaves a surgery out."""


def batch_of(args: Mapping[str, Any]) -> int | None:
    """Samples of an iteration for a run that counts its schedule in iterations; None where it
    counts samples. The trainer asserts that no option of the other unit is given."""
    by_samples = any(args.get(f"{name}_samples") for name in ("train", "lr_decay", "lr_warmup"))
    by_iterations = any(args.get(f"{name}_iters") for name in ("train", "lr_decay", "lr_warmup"))
    size = args.get("global_batch_size")
    return size if by_iterations and not by_samples and isinstance(size, int) and size else None


def counts(args: Mapping[str, Any], warmup: float, decay: float, otherwise: str) -> Iterator[str]:
    """The options of both step counts where the saved command line says others, in its unit: the
    trainer multiplies iterations by the batch size, and may take the warm-up as a fraction of the
    decay. `otherwise` where a count is not a whole number of iterations."""
    by_samples = any(args.get(f"{n}_samples") for n in ("train", "lr_decay", "lr_warmup"))
    unit, size = ("samples", 1) if by_samples else ("iters", args.get("global_batch_size"))
    length = args.get(f"lr_decay_{unit}") or args.get(f"train_{unit}")
    fraction = args.get("lr_warmup_fraction")
    early = args.get(f"lr_warmup_{unit}")
    if not size:
        return

    def option(name: str, now: float) -> str:
        return f"--lr-{name}-{unit} {now // size:.0f}" if now % size == 0 else otherwise

    if length and length * size != decay:
        yield option("decay", decay)
    if fraction is None and early is not None and early * size != warmup:
        yield option("warmup", warmup)
    elif fraction is not None and fraction * decay != warmup:
        whole = warmup % size == 0
        there = f"{option('warmup', warmup)} (in place of --lr-warmup-fraction)"
        yield there if whole else otherwise


def values(state: State, args: Mapping[str, Any]) -> list[str]:
    """Every option that `state` has a value for, with the value; both counts of the schedule in the
    unit of the saved command line `args`, or not at all where they are not a whole number of it."""
    size = batch_of(args)
    promise, schedule = state.promise, state.schedule or {}
    betas = promise.betas or (None, None)
    settings: dict[str, Any] = {
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
    out = []
    for key, value in settings.items():
        option = OPTIONS[key]
        if key == "warmup" and args.get("lr_warmup_fraction") is not None:
            continue  # neither unit may stand beside it
        if key in ("warmup", "decay") and size is not None and value is not None:
            option = option.replace("-samples", "-iters")
            value = int(value // size) if value % size == 0 else None
        if value is not None:
            out += [option, repr(value) if isinstance(value, float) else str(value)]
    return out
