"""Another batch size from the next step on: where the checkpoint keeps it, and what follows it."""

from __future__ import annotations

from collections.abc import Sequence

from ckptsurgeon.errors import SurgeryError, UsageError
from ckptsurgeon.formats import Checkpoint
from ckptsurgeon.formats.capabilities import Rebatches
from ckptsurgeon.formats.schedules import rampup
from ckptsurgeon.operations.own_config import config_changes, configured
from ckptsurgeon.operations.place_changes import of_settings
from ckptsurgeon.operations.section import Changes
from ckptsurgeon.run.run import Run

SIZE, RAMP, TOTAL = "global_batch_size", "rampup_batch_size", "train_iters"
"""Keys of the bundled trainer's config, which decides them."""


def ramp_of(texts: Sequence[str] | None, size: int | None) -> tuple[int, ...] | None:
    """start, increment, samples; () for none. Raises UsageError for what leads to no size."""
    if texts is None:
        return None
    if not texts:
        return ()
    try:
        start, increment, samples = map(int, texts)
    except ValueError:
        raise UsageError(
            f"`set.rampup` is {list(texts)}",
            next="rampup: [16, 16, 1000] is START, INCREMENT, SAMPLES; [] is none",
        ) from None
    span = 0 if size is None else size - start
    if start < 1 or increment < 1 or samples < 0 or span < 0 or span % increment:
        goal = "" if size is None else f" and leads to batch_size {size} in whole steps"
        raise UsageError(
            f"`set.rampup` is {[start, increment, samples]}",
            next=f"it begins at 1 or more, grows by 1 or more{goal}",
        )
    return start, increment, samples


def batch_changes(
    run: Run, checkpoint: Checkpoint, size: int | None, ramp: tuple[int, ...] | None
) -> Changes:
    """Changes that set both, wherever they are kept, in the trainer's own config too.

    Raises SurgeryError, with the flag to use instead, where nothing is kept."""
    own = configured(run, SIZE) is not None
    before = checkpoint.state()
    if ramp and size is None and checkpoint.locate("rampup"):
        ramp_of([str(number) for number in ramp], before.batch_size)
    able = Rebatches.optional(checkpoint)
    settings, warnings = able.rebatch(size, ramp, own) if able else ([], [])
    if not settings:
        key, value = "batch_size", str(size)
        if size is None or (ramp is not None and checkpoint.locate("batch_size")):
            key, value = "rampup", " ".join(map(str, ramp or ())) or "none"
        raise SurgeryError(
            f"this checkpoint does not decide {key}: the trainer's command line or config does",
            next=run.format.advise(key, value),
        )
    changes = of_settings(run, settings)
    if not own:
        return changes, [] if all(p.value == new for _, p, new in settings) else warnings
    values = {} if size is None else {SIZE: str(size)}
    if ramp is not None:
        values[RAMP] = f"[{', '.join(map(str, ramp))}]" if ramp else "null"
    total = configured(run, TOTAL)
    moved = any(place.value != new for _, place, new in settings)
    if moved and total is not None and total.isdigit() and int(total) > before.step:
        after = rampup.resized(before, size, ramp)
        count, arithmetic = rampup.converted(before, after, int(total))
        if count != int(total):
            values[TOTAL] = str(count)
            warnings = [*warnings, f"train_iters {total} → {count}: {arithmetic}"]
    return [*changes, *config_changes(run, values, "batch size")], warnings if moved else []
