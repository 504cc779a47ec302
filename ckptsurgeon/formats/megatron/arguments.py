"""What only the command line that a Megatron-LM checkpoint saves tells: `args`, by their names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ckptsurgeon.errors import SurgeryError, count
from ckptsurgeon.formats.schedules.names import value
from ckptsurgeon.hints import command

STEPS = re.compile(r"([\d.]+)([KMBT]?):([\d.]+)([KMBT]?)", re.IGNORECASE)
SUFFIXES = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


def sizes(args: Mapping[str, Any]) -> tuple[tuple[int, int], ...]:
    """`--step-batch-size-schedule`: from which sample on, and the batch size; tokens in the option
    where the sequence length is known. Empty without one, or for what the trainer refuses."""
    text, length = args.get("step_batch_size_schedule"), args.get("seq_length")
    steps = []
    for entry in str(text or "").replace(",", " ").split():
        match = STEPS.fullmatch(entry)
        if match is None:
            return ()
        start = int(float(match[1]) * SUFFIXES[match[2].upper()])
        size = int(float(match[3]) * SUFFIXES[match[4].upper()])
        steps.append((start // length if isinstance(length, int) and length else start, size))
    steps.sort(key=lambda step: step[0])
    starts = [start for start, _ in steps]
    sound = starts[:1] == [0] and len(set(starts)) == len(starts)
    return tuple(steps) if sound and all(size > 0 for _, size in steps) else ()


def data(args: Mapping[str, Any], pending: int | None) -> str:
    """Why the consumed samples do not decide which data comes next; empty where they do. `pending`
    is the iteration that is to be run again, or None."""
    if args.get("dataloader_save"):
        return (
            "the position in the data is what its loader saved in "
            f"{args['dataloader_save']} (--dataloader-save), not the consumed samples"
        )
    if pending is not None:
        return (
            f"iteration {pending} is to be run again with the micro-batches that the checkpoint "
            "holds (rerun_state_machine), not with those at the consumed samples"
        )
    return ""


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
    Raises SurgeryError for a trainer without WSD, or a length that is not a whole number of
    iters."""
    if "lr_wsd_decay_style" not in args:
        raise SurgeryError(
            "this version of Megatron-LM has no WSD, and so no 1-sqrt",
            next=command("cooldown", "--shape", "linear"),
        )
    by_samples = any(args.get(f"{n}_samples") for n in ("train", "lr_decay", "lr_warmup"))
    if by_samples or args.get("lr_wsd_decay_samples"):
        return "samples", samples
    size = args.get("global_batch_size") or 0
    if not size or samples % size:
        raise SurgeryError(
            f"the flags count iterations of {count(size, 'sample')}, and "
            f"{count(samples, 'sample is', 'samples are')} not a whole number of them",
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
    """`--rampup-batch-size`: start, increment, samples. Versions that have
    `--step-batch-size-schedule` ignore it."""
    numbers = args.get("rampup_batch_size")
    if "step_batch_size_schedule" in args:
        return None
    if not isinstance(numbers, (list, tuple)) or len(numbers) != 3:
        return None
    return int(numbers[0]), int(numbers[1]), int(numbers[2])
