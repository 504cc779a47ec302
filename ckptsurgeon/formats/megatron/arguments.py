"""What only the command line that a Megatron-LM checkpoint saves tells: `args`, by their names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.formats.schedules.names import value


def unsaved(args: Mapping[str, Any]) -> dict[str, Any]:
    """The scheduler's parameters that only the saved args tell: `init_lr`, and those of WSD."""
    out: dict[str, Any] = {"init_lr": args.get("lr_warmup_init") or 0.0}
    iterations, batch = args.get("lr_wsd_decay_iters"), args.get("global_batch_size")
    steps = args.get("lr_wsd_decay_samples")
    if steps is None and iterations is not None and batch is not None:
        steps = iterations * batch
    return {**out, "wsd_decay_steps": steps, "lr_wsd_decay_style": args.get("lr_wsd_decay_style")}


def last_decay(args: Mapping[str, Any], samples: int) -> tuple[str, int]:
    """How the flags of this run count a last decay of so many samples: in samples or in iters.
    Raises SurgeryError for a trainer without WSD, or a length that is no whole number of iters."""
    if "lr_wsd_decay_style" not in args:
        raise SurgeryError(
            "this version of Megatron-LM has no WSD, and so no 1-sqrt",
            next="ckptsurgeon cooldown --shape linear",
        )
    by_samples = any(args.get(f"{n}_samples") for n in ("train", "lr_decay", "lr_warmup"))
    if by_samples or args.get("lr_wsd_decay_samples"):
        return "samples", samples
    size = args.get("global_batch_size") or 0
    if not size or samples % size:
        raise SurgeryError(
            f"the flags count iterations of {size} samples, and {samples} samples are no whole "
            "number of them",
            next="cool down once the batch-size ramp-up is over",
        )
    return "iters", samples // size


def plain(schedule: Mapping[str, Any], group: Mapping[str, Any]) -> dict[str, Any]:
    """The schedule of one param group, by AnnealingLR's names."""
    return {
        "max_lr": group.get("max_lr", value(schedule, "max_lr")),
        "min_lr": group.get("min_lr", value(schedule, "min_lr")),
        "warmup_steps": value(schedule, "warmup"),
        "num_steps": value(schedule, "position"),
        "decay_steps": value(schedule, "decay"),
        "decay_style": value(schedule, "decay_style"),
    }


def rampup(args: Mapping[str, Any]) -> tuple[int, int, int] | None:
    """`--rampup-batch-size`: start, increment, samples."""
    numbers = args.get("rampup_batch_size")
    if not isinstance(numbers, (list, tuple)) or len(numbers) != 3:
        return None
    return int(numbers[0]), int(numbers[1]), int(numbers[2])
