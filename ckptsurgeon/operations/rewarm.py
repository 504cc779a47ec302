"""A window after a reset in which the moments fill while the weights stay, or the rate ramps up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ckptsurgeon.edits import AnyChange, Change
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.formats import Checkpoint, State
from ckptsurgeon.formats.rampup import batch_size
from ckptsurgeon.formats.schedules.rewarm import HOLD
from ckptsurgeon.operations.counters import consumed, iteration
from ckptsurgeon.operations.skip import merge
from ckptsurgeon.recipe.recipe import Recipe, Rewarm, ranges
from ckptsurgeon.run.run import Run


def rewarm(run: Run, recipe: Recipe, checkpoint: Checkpoint) -> tuple[list[AnyChange], list[str]]:
    """Changes for the recipe's `rewarm`: the window opens at the position of the schedule, the one
    that the recipe sets if it sets one, and ends after `iterations` trained iterations, skipped and
    overflowed ones not counted.

    Only the bundled trainer keeps a window. For another one the error says by which launches
    the same is done, where it can be."""
    wanted = recipe.rewarm
    if wanted is None:
        return [], []
    places = checkpoint.locate("rewarm")
    state = checkpoint.state()
    if not places or state.schedule is None or state.batch_size is None:
        raise _kept_nowhere(run, checkpoint.path.name, state, wanted)
    position = recipe.set.position
    start = int(state.schedule["num_steps"]) if position is None else position
    kept = () if recipe.clear_skip else state.promise.skip or ()
    skip = merge([*kept, *([] if recipe.skip_by_counters else ranges(recipe.skip))])
    begin = replace(state, step=iteration(recipe, state))
    end = start + samples_of(wanted.iterations, begin, consumed(run, recipe, state), skip)
    new = [wanted.kind, start, end] if wanted.iterations else []
    changes: list[AnyChange] = [
        Change(run.relative(place.file), "rewarm", place.value, new, place.path)
        for place in places
        if list(place.value) != new
    ]
    return changes, _warnings(recipe, checkpoint, wanted)


def samples_of(iterations: int, state: State, sample: int, skip: Sequence[tuple[int, int]]) -> int:
    """The samples that `iterations` trained iterations after the step of `state` take, the first
    one from `sample` on. Skipped ones move the batch-size ramp-up, and are not counted."""
    full, step, trained = state.batch_size or 0, state.step, 0
    while iterations and 0 < (size := batch_size(state, sample)) < full:
        step += 1
        sample += size
        if not any(first <= step <= last for first, last in skip):
            trained += size
            iterations -= 1
    return trained + iterations * full


def _warnings(recipe: Recipe, checkpoint: Checkpoint, wanted: Rewarm) -> list[str]:
    betas = checkpoint.state().promise.betas
    if not wanted.iterations or betas is None or wanted.kind != HOLD:
        return []
    beta2 = recipe.set.beta2 if recipe.set.beta2 is not None else betas[1]
    filled = 1.0 - beta2**wanted.iterations
    if filled >= 0.9:
        return []
    return [
        f"{wanted.iterations} held iterations fill {filled:.0%} of exp_avg_sq at beta2 {beta2:g}; "
        f"{5 / (1 - beta2):.0f} fill 99 % (5 / (1 - beta2))"
    ]


def _kept_nowhere(run: Run, name: str, state: State, wanted: Rewarm) -> SurgeryError:
    until = f"CONSUMED_SAMPLES + {wanted.iterations} × GLOBAL_BATCH_SIZE"
    done = state.promise.consumed_samples
    if done is not None and state.batch_size is not None:
        until = str(done + samples_of(wanted.iterations, state, done, ()))
    return SurgeryError(
        f"{name} keeps no re-warm window: only the bundled trainer does",
        next=run.format.advise_rewarm(state, wanted.kind, until),
    )
