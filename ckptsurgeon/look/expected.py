"""What a trainer should say once it goes on from a checkpoint: the promise, and later rates."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.formats import Checkpoint, Place, State
from ckptsurgeon.formats.capabilities import ComputesRates
from ckptsurgeon.formats.fields.understood import understood
from ckptsurgeon.formats.huggingface import later_rates
from ckptsurgeon.formats.layout import CountsSaves, Format, Paged
from ckptsurgeon.formats.schedules import deepspeed, rampup, torch_classes
from ckptsurgeon.formats.schedules.saved import SCALED
from ckptsurgeon.hints import Hint, command
from ckptsurgeon.logs.printed.comparison import Expected
from ckptsurgeon.logs.printed.families import FAMILIES
from ckptsurgeon.operations.place_changes import of_settings
from ckptsurgeon.plans.plan import Receipt
from ckptsurgeon.plans.promise import Promise
from ckptsurgeon.run.log_numbers import said_after
from ckptsurgeon.run.run import Run
from ckptsurgeon.transaction import receipts

OF_THE_SCHEDULE = ("lr", "min_lr", "warmup", "decay", "decay_style")


def expected(run: Run, step: int) -> Expected:
    """What the trainer of `run` should say of its first updates after `step`. Reads only."""
    checkpoint = run.checkpoint(step)
    with understood(checkpoint.path):
        return _expected(run, step, checkpoint)


def _expected(run: Run, step: int, checkpoint: Checkpoint) -> Expected:
    state = checkpoint.state()
    surgeries = _surgeries(run, state.promise)
    places = checkpoint.locate("lr")
    known = state.promise.lr is not None  # without a place it is the config that says it
    decides = state.schedule is not None or any(p.wins for p in places) or not (places or known)
    given = _schedule(surgeries) if _in_config(checkpoint) else {}
    samples = state.promise.consumed_samples
    size = state.batch_size
    varies = state.rampup is not None or bool(state.sizes)
    if size is not None and varies:
        size = None if samples is None else rampup.batch_size(state, samples)
    return Expected(
        promise=state.promise,
        rate=_rates(run, step, checkpoint, state, given),
        decides_lr=decides,
        by_config=_by_config(checkpoint) is not None,
        before=next((r.before.lr for r in surgeries if r.before and _went(r)), None),
        batch_size=size,
        steady=not varies or size == state.batch_size,
        epoch_steps=later_rates.epoch_steps(run.directory(step)) or _updates_of_an_epoch(run, step),
        skipped=next((p.value for p in _places(checkpoint, "skipped_steps")), None),
        steady_betas="betas" not in state.promise.one_step,
        late=run.format.asks_late and _in_config(checkpoint),
        remedy=tuple(_remedy(run, checkpoint, state, surgeries)),
        numbered=partial(said_after, run, step) if _named(run.format, state, step) else None,
    )


def _named(format: Format, state: State, step: int) -> bool:
    """Whether the name alone numbers the step: the counter of a page is the trainer's own."""
    own = isinstance(format, Paged) and state.step != step
    return isinstance(format, CountsSaves) and not own


def _surgeries(run: Run, promise: Promise) -> list[Receipt]:
    """The standing surgeries on this very state, oldest first."""
    return [
        receipt
        for receipt in receipts.standing(run.receipts())
        if receipt.promise is not None
        and receipt.promise.step == promise.step
        and receipt.before is not None
        and receipt.before.step == promise.step
    ]


def _schedule(surgeries: list[Receipt]) -> dict[str, Any]:
    """What they set of the schedule, which a checkpoint that saves no schedule does not keep."""
    out: dict[str, Any] = {}
    for receipt in surgeries:
        values = receipt.recipe.get("set")
        if isinstance(values, Mapping):
            out |= {key: values[key] for key in OF_THE_SCHEDULE if key in values}
    return out


def _went(surgery: Receipt) -> bool:
    """Whether the rate from before it is one that a trainer may go back to: a cooldown begins with
    that rate."""
    return not surgery.recipe.get("cooldown")


# --- the rates of the updates --------------------------------------------------------------------


def _rates(
    run: Run, step: int, checkpoint: Checkpoint, state: State, given: Mapping[str, Any]
) -> Callable[[int, int | None], float | None]:
    scheduler = next(iter(_schedulers(checkpoint)), None)
    later = later_rates.of(run.directory(step), scheduler, state.promise.lr)
    computes = _by_config(checkpoint)

    def at(position: int) -> float | None:
        try:
            settings, _ = checkpoint.reschedule({**given, "position": position})
            return checkpoint.after(of_settings(run, settings), run.root).state().promise.lr
        except SurgeryError:
            return None

    def rate(k: int, batch: int | None) -> float | None:
        """The lr of the k-th update from the checkpoint on; None where it does not say."""
        if k == 1:
            return state.promise.lr
        if computes is not None:
            return computes.rate_after_loading(k)
        if later is not None:
            return later(k)
        positions = _places(checkpoint, "position")
        size = 1 if state.schedule is None else batch or state.batch_size
        if not positions or size is None or not _decides(checkpoint):
            return None
        position = positions[0].value
        if not _close(at(position), state.promise.lr):
            return None  # torch's schedulers go on from the saved rate, which is not on their curve
        return at(position + (k - 1) * size)

    return rate


def _close(one: float | None, other: float | None) -> bool:
    return one is not None and other is not None and math.isclose(one, other, rel_tol=1e-6)


def _places(checkpoint: Checkpoint, name: str) -> Sequence[Place]:
    """Those of a field, none where the format does not know it."""
    try:
        return checkpoint.locate(name)
    except SurgeryError:
        return []


def _schedulers(checkpoint: Checkpoint) -> list[Any]:
    return [place.value for place in _places(checkpoint, "scheduler")]


def _in_config(checkpoint: Checkpoint) -> bool:
    """Whether the checkpoint keeps the position of a scheduler of DeepSpeed alone."""
    return any(map(deepspeed.is_deepspeed, _schedulers(checkpoint)))


def _by_config(checkpoint: Checkpoint) -> ComputesRates | None:
    """The checkpoint as one whose config says the rates of a load; None where it does not."""
    computes = ComputesRates.optional(checkpoint)
    return None if computes is None or computes.rate_after_loading(1) is None else computes


def _decides(checkpoint: Checkpoint) -> bool:
    """Whether the saved schedule says the next rates: for some classes code does."""
    kinds = map(torch_classes.kind, _schedulers(checkpoint))
    return not any(kind in torch_classes.BY_CODE for kind in kinds)


# --- beside it -----------------------------------------------------------------------------------


def _updates_of_an_epoch(run: Run, step: int) -> float | None:
    """Where lines name updates by epochs alone, and steps are the epochs that have ended."""
    format, by_epochs = run.format, any(each.numbered for each in FAMILIES.get(run.format.name, ()))
    if not isinstance(format, CountsSaves) or not by_epochs or not step:
        return None
    updates = format.updates(run.root, step)
    return updates / step if updates else None


def _remedy(run: Run, checkpoint: Checkpoint, state: State, surgeries: list[Receipt]) -> list[Hint]:
    """What the plan said that the relaunch needs, once more."""
    hints: list[Hint] = [note for note in state.notes if "relaunch" in note]
    if run.format.makes_schedule and not _decides(checkpoint):
        hints.append(run.format.makes_schedule)
    if changes := _schedule(surgeries):
        with contextlib.suppress(SurgeryError):
            notes = checkpoint.reschedule(changes)[1]
            hints += [note for note in notes if note != SCALED]
    if run.format.launch_flags(run.root, checkpoint):
        hints.append(command("relaunch", "--print-flags", why="what its launcher must say"))
    return hints
