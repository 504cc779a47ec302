"""Iteration ranges whose data is passed over without training."""

from __future__ import annotations

from collections.abc import Iterable

from ckptsurgeon.edits import AnyChange, Change
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.formats import Checkpoint
from ckptsurgeon.operations.counters import iteration
from ckptsurgeon.recipe.recipe import Recipe, ranges
from ckptsurgeon.run.run import Run


def skip(run: Run, recipe: Recipe, checkpoint: Checkpoint) -> tuple[list[AnyChange], list[str]]:
    """Changes for the recipe's `skip` and `clear_skip`: the union with the ranges already there.

    1-based, both ends included: the trainer skips where `start <= iteration + 1 <= end`."""
    wanted = [] if recipe.skip_by_counters else ranges(recipe.skip)
    if not wanted and not recipe.clear_skip:
        return [], []
    places = checkpoint.locate("skip")
    if not places:
        raise SurgeryError(
            f"{checkpoint.path.name} keeps no skip ranges: its trainer takes them from a flag",
            next=(
                run.format.advise_skip(wanted),
                "ckptsurgeon skip --by-counters    advance its samples instead",
            ),
        )
    done = iteration(recipe, checkpoint.state())
    warnings = [
        f"skip {first}-{last} ends before step {done + 1}: it has no effect"
        for first, last in merge(wanted)
        if last <= done
    ]
    changes: list[AnyChange] = []
    for place in places:
        old = [(int(first), int(last)) for first, last in place.value]
        new = merge([*([] if recipe.clear_skip else old), *wanted])
        if new != old:
            file = run.relative(place.file)
            changes.append(Change(file, "skip", place.value, [list(r) for r in new], place.path))
    return changes, warnings


def merge(items: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Inclusive ranges in ascending order; those that overlap or touch become one."""
    out: list[tuple[int, int]] = []
    for first, last in sorted(items):
        if out and first <= out[-1][1] + 1:
            out[-1] = (out[-1][0], max(last, out[-1][1]))
        else:
            out.append((first, last))
    return out
