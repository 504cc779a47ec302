"""What a resume must bring back that is no tensor: Adam's count, the samples, the rate."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ckptsurgeon.errors import SurgeryError, count
from ckptsurgeon.formats import Checkpoint
from ckptsurgeon.formats.fields.constants import ODD
from ckptsurgeon.formats.schedules import rampup
from ckptsurgeon.look.expected import expected
from ckptsurgeon.look.resumed.verdict import AGREES, DIFFERS, NOT_COMPARED, Verdict, edited
from ckptsurgeon.plans.plan import Receipt
from ckptsurgeon.run.run import Run

TOUCHED = ("exp_avg", "exp_avg_sq", "adam step", "iteration", "skipped_steps", "step", "state of")
"""How the fields of changes begin after which two steps are not what one training made."""
CLOSE = 1e-6
"""How near two rates are that one schedule gives, as a share."""
ADAM = "Adam's counter"


def updates(now: Checkpoint, before: Checkpoint) -> tuple[float | None, str]:
    """How far Adam's counter moved between the two; None and why where it does not say."""
    try:
        steps = [checkpoint.state().promise.adam_step for checkpoint in (now, before)]
    except SurgeryError as error:
        return None, error.what
    if steps[0] is None or steps[1] is None:
        return None, "it is not kept in both steps"
    if steps == [0, 0]:  # as optimizers leave it that do not count there
        return None, "it is 0 in both steps"
    return steps[0] - steps[1], ""


def counted(now: Checkpoint, before: Checkpoint, receipts: Sequence[Receipt]) -> Verdict:
    """Whether Adam counted as many updates as there are between the two steps. Skip ranges are
    taken off, and overflows where they are counted; where these may have been and are not, only
    a counter that moved further, or back, is a difference."""
    if not (now.numbered and before.numbered):
        return Verdict("", NOT_COMPARED, "the numbers of these steps do not count updates")
    moved, why = updates(now, before)
    if moved is None:
        return Verdict(ADAM, NOT_COMPARED, why)
    if edited(receipts, now, before, TOUCHED):
        return Verdict(ADAM, NOT_COMPARED, f"a surgery between {before.step} and {now.step}")
    steps = now.state().step - before.state().step
    skipped, known = _skipped(now, before)
    skipped += now.state().promise.passed(before.state().step, now.state().step)
    short = not known and now.state().dynamic_loss_scale and 0 <= moved < steps
    less = f", {skipped} of them skipped" if skipped else ""
    if moved == steps - skipped or short:
        return Verdict(ADAM, AGREES, count(moved, "update", spec="g"))
    return Verdict(
        ADAM,
        DIFFERS,
        f"between steps {before.step} and {now.step} Adam's counter moved by {moved:g}: "
        f"{count(steps, 'update')}{less}{'; it began anew' if moved < 0 else ''}",
    )


def _skipped(now: Checkpoint, before: Checkpoint) -> tuple[int, bool]:
    counts = [
        max((int(place.value) for place in checkpoint.locate("skipped_steps")), default=None)
        for checkpoint in (now, before)
    ]
    if counts[0] is None or counts[1] is None:
        return 0, False
    return counts[0] - counts[1], True


def of_the_data(now: Checkpoint, before: Checkpoint, receipts: Sequence[Receipt]) -> Verdict:
    """Whether the data goes on where the earlier step left it: by batches of the size that both
    steps keep, or, where batches are counted in passes, further than it was."""
    if edited(receipts, now, before):
        return Verdict("data", NOT_COMPARED, f"a surgery between {before.step} and {now.step}")
    state, old = now.state(), before.state()
    one, other = state.promise, old.promise
    words = f"between steps {before.step} and {now.step}"
    if one.consumed_samples is not None and other.consumed_samples is not None and not state.data:
        moved, steps = one.consumed_samples - other.consumed_samples, state.step - old.step
        if not (now.numbered and before.numbered):
            return Verdict("data", NOT_COMPARED, "the numbers of these steps do not count updates")
        if state.batch_size is None or old.batch_size is None:
            if moved > 0:
                return Verdict("data", NOT_COMPARED, "the size of a batch is not kept")
            return Verdict("data", DIFFERS, f"consumed_samples moved by {moved:,} {words}")
        sizes = [
            rampup.batch_size(old, other.consumed_samples),
            rampup.batch_size(state, max(one.consumed_samples - 1, 0)),
        ]
        if steps * min(sizes) <= moved <= steps * max(sizes):
            return Verdict("data", AGREES, count(moved, "sample", spec=","))
        size = " to ".join(f"{size:,}" for size in sorted({*sizes}))
        return Verdict(
            "data",
            DIFFERS,
            f"consumed_samples moved by {moved:,} {words}: {count(steps, 'batch', 'batches')} of "
            f"{size}",
        )
    places = [(each.data_epoch, each.data_batches) for each in (other, one)]
    if any(batches is None for _, batches in places):
        return Verdict("data", NOT_COMPARED, state.data or "its position is not kept")
    (pass_old, old_batch), (pass_now, batch) = ((e or 0, b or 0) for e, b in places)
    if (pass_now, batch) > (pass_old, old_batch):
        return Verdict("data", AGREES, f"batch {batch:,}")
    return Verdict(
        "data",
        DIFFERS,
        f"the data did not go on {words}: batch {old_batch:,} of pass {pass_old} before, "
        f"batch {batch:,} of pass {pass_now} now",
    )


def of_the_rate(
    run: Run, now: Checkpoint, before: Checkpoint, receipts: Sequence[Receipt]
) -> Verdict:
    """Whether the next rate is the one that the schedule of the earlier step gives there."""
    if edited(receipts, now, before):
        return Verdict("lr", NOT_COMPARED, f"a surgery between {before.step} and {now.step}")
    steps = now.state().step - before.state().step
    lr = now.state().promise.lr
    moved, _ = updates(now, before)
    given = [rate for k in _counts(steps, moved) for rate in _rate(run, before, k + 1)]
    if lr is None or not given or "lr" in now.state().promise.not_known:
        return Verdict("lr", NOT_COMPARED, f"step {before.step} does not say its rates to come")
    if any(abs(rate - lr) <= CLOSE * max(abs(rate), abs(lr)) for rate in given):
        return Verdict("lr", AGREES, f"{lr:.6g}")
    return Verdict(
        "lr",
        DIFFERS,
        f"the next lr is {lr:.6g}; by the schedule of step {before.step} it is {given[0]:.6g}",
    )


def _counts(steps: int, moved: float | None) -> list[int]:
    """The updates that the scheduler may have counted: some do not count what overflowed."""
    return list(dict.fromkeys([steps, steps if moved is None else int(moved)]))


def _rate(run: Run, before: Checkpoint, k: int) -> Iterator[float]:
    try:
        word = expected(run, before.step)
        rate = word.rate(k, None) if word.steady and word.decides_lr else None
    except (SurgeryError, *ODD):
        return
    if rate is not None:
        yield rate


def highest_rate(run: Run, now: Checkpoint, before: Checkpoint) -> float | None:
    """The highest rate of the updates between the two, if the schedule does not rise above its
    peak; None where nothing says a rate."""
    found = [rate for each in (now, before) for rate in each.rates()]
    for each in (now, before):
        state = each.state()
        found += [rate for rate in (state.promise.lr, state.peak_lr) if rate is not None]
        for field in ("max_lr", "initial_lr"):
            found += [float(value) for value in each.clear(field) if value is not None]
    return max(found, default=None)
