"""The batch size of a trainer with Megatron's arguments: what keeps it, and what must follow it.

The command line decides it: `megatron/training/checkpointing.py` 0.16 to 0.20 compares the saved
`global_batch_size` (with --phase-transition-iterations) and never loads it. The scheduler's state
and the consumed samples count samples, whatever a batch is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ckptsurgeon.errors import SurgeryError, UsageError, count
from ckptsurgeon.formats.checkpoint import Checkpoint
from ckptsurgeon.formats.fields.values import Setting
from ckptsurgeon.formats.schedules import rampup


def rebatch(
    checkpoint: Checkpoint,
    args: Mapping[str, Any],
    size: int | None,
    ramp: Sequence[int] | None,
    own_config: bool,
) -> tuple[list[Setting], list[str]]:
    """The new size and ramp-up in the saved arguments, and the flags that must say so too;
    `own_config` is whether a config in the run does in their place.

    Raises UsageError for a size that the ranks can't share, SurgeryError for a run whose sizes
    come from another option."""
    if not checkpoint.locate("batch_size") or (
        ramp is not None and not checkpoint.locate("rampup")
    ):
        return [], []
    if args.get("step_batch_size_schedule") or ("step_batch_size_schedule" in args and ramp):
        raise SurgeryError(
            "this trainer takes its batch sizes from --step-batch-size-schedule",
            next="relaunch with --step-batch-size-schedule '0:SIZE SAMPLE:SIZE'",
        )
    before = checkpoint.state()
    after = rampup.resized(before, size, ramp)
    _refuse_uneven(rampup.sizes(after), args)
    settings: list[Setting] = []
    flags: list[str] = []
    if size is not None:
        settings += [Setting("batch_size", p, size) for p in checkpoint.locate("batch_size")]
        flags.append(f"--global-batch-size {size}")
    if ramp is not None:
        new = list(ramp) or None
        settings += [Setting("rampup", p, new) for p in checkpoint.locate("rampup")]
        words = f"--rampup-batch-size {' '.join(map(str, ramp))}"
        flags.append(words if ramp else "no --rampup-batch-size")
    notes = []
    if before.schedule is not None:
        warmup, decay = before.schedule.get("warmup_steps"), before.schedule.get("decay_steps")
        notes.append(
            f"the schedule counts samples, so it stays: warm-up to {warmup}, decay to {decay}; the "
            f"next batch begins at sample {before.promise.consumed_samples}, as before"
        )
    total = args.get("train_iters")
    if isinstance(total, int) and total > before.step and not args.get("train_samples"):
        count, arithmetic = rampup.converted(before, after, total)
        if count != total and not own_config:
            flags.append(f"--train-iters {count}")
            notes.append(arithmetic)
    if not own_config:
        notes.append(f"relaunch with {' '.join(flags)}: the command line decides it")
    return settings, notes


def _refuse_uneven(sizes: Sequence[int], args: Mapping[str, Any]) -> None:
    micro, ranks = args.get("micro_batch_size"), args.get("data_parallel_size")
    if not isinstance(micro, int) or not isinstance(ranks, int):
        return
    unit = micro * ranks
    wrong = next((size for size in sizes if unit and size % unit), None)
    if wrong is not None:
        raise UsageError(
            f"a batch of {count(wrong, 'sample')} is not a multiple of micro_batch_size {micro} x "
            f"{ranks} data-parallel ranks = {unit}",
            next=f"batch_size={max(unit, round(wrong / unit) * unit)}",
        )
