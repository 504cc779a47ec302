"""Where the run stands: consumed samples, tokens, iteration; and data skipped by advancing them."""

from __future__ import annotations

from ckptsurgeon.edits import AnyChange, Change, Receipt
from ckptsurgeon.errors import SurgeryError, UsageError
from ckptsurgeon.formats import Checkpoint, State
from ckptsurgeon.formats.rampup import batch_size
from ckptsurgeon.recipe.recipe import Recipe, ranges
from ckptsurgeon.run.run import Run
from ckptsurgeon.transaction.receipts import standing

COUNTERS = ("consumed_samples", "tokens", "iteration")


def counters(run: Run, recipe: Recipe, checkpoint: Checkpoint) -> tuple[list[AnyChange], list[str]]:
    """Changes for `set.consumed_samples`, `set.tokens`, `set.iteration` and `skip_by_counters`.

    Only the counters: the schedule keeps its own, so the learning rate goes on from where it is."""
    wanted = {key: value for key, value in recipe.set.given().items() if key in COUNTERS}
    warnings: list[str] = []
    if recipe.skip_by_counters:
        if "consumed_samples" in wanted:
            raise UsageError(
                "both skip_by_counters and set.consumed_samples were given",
                next="drop one of them: each says where the data goes on",
            )
        state = checkpoint.state()
        samples = _skipped(run, recipe, state)
        wanted["consumed_samples"] = samples
        warnings.append(
            f"iteration {iteration(recipe, state) + 1} trains on sample {samples}: numbers of "
            "iterations are not skipped, so the next skip counts from there"
        )
    changes: list[AnyChange] = []
    for key, value in wanted.items():
        places = checkpoint.locate(key)
        if not places:
            raise SurgeryError(
                f"{checkpoint.path.name} keeps no {key}: its trainer counts it elsewhere",
                next="ckptsurgeon show    what it keeps",
            )
        changes += [
            Change(run.relative(place.file), key, place.value, value, place.path)
            for place in places
        ]
    schedule = checkpoint.state().schedule or {}
    moved = recipe.set.position is not None
    if "consumed_samples" in wanted and "num_steps" in schedule and not moved:
        warnings.append(f"the schedule stays at sample {schedule['num_steps']}")
    if "iteration" in wanted and wanted["iteration"] != checkpoint.step:
        warnings.append(
            f"the folder keeps its name {checkpoint.path.name}, and the next step is number "
            f"{wanted['iteration'] + 1}"
        )
    return changes, warnings


def iteration(recipe: Recipe, state: State) -> int:
    """The last iteration that counts as done once `recipe` is carried out."""
    return state.step if recipe.set.iteration is None else recipe.set.iteration


def consumed(run: Run, recipe: Recipe, state: State) -> int:
    """The sample at which the data goes on once `recipe` is carried out."""
    if recipe.skip_by_counters:
        return _skipped(run, recipe, state)
    wanted = recipe.set.consumed_samples
    return (state.promise.consumed_samples or 0) if wanted is None else wanted


def _skipped(run: Run, recipe: Recipe, state: State) -> int:
    """The samples consumed once the iterations of `recipe.skip` are passed over.

    They must follow the checkpoint's step without a gap. The same skip, applied before and not
    undone, is done already."""
    at = state.promise.consumed_samples
    if at is None or state.batch_size is None:
        raise SurgeryError(
            "the checkpoint keeps no consumed samples or no batch size to advance them by",
            next="skip A-B    if its trainer takes ranges",
        )
    first, last = state.step + 1, state.step
    for begin, end in sorted(ranges(recipe.skip)):
        if begin > last + 1 or end < first:
            raise UsageError(
                f"skip {begin}-{end} by counters does not begin at the next iteration, {last + 1}",
                next=f"ckptsurgeon rollback --to {begin - 1}    and skip from there",
            )
        last = max(last, end)
    if any(_same_skip(receipt, recipe, at, first) for receipt in standing(run.receipts())):
        return at
    for _ in range(first, last + 1):
        at += batch_size(state, at)
    return at


def _same_skip(receipt: Receipt, recipe: Recipe, at: int, first: int) -> bool:
    asked, promise = receipt.recipe, receipt.promise
    return (
        bool(asked.get("skip_by_counters"))
        and list(asked.get("skip", ())) == recipe.skip
        and promise is not None
        and (promise.consumed_samples, promise.step) == (at, first)
    )
