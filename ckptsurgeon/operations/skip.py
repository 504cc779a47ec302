"""Iteration ranges whose data is passed over without training."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ckptsurgeon.edits import AnyChange, Change
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.formats import Checkpoint
from ckptsurgeon.operations.counters import iteration
from ckptsurgeon.recipe.recipe import Recipe, ranges
from ckptsurgeon.run.run import Run


def skip(run: Run, recipe: Recipe, checkpoint: Checkpoint) -> tuple[list[AnyChange], list[str]]:
    """Changes for the recipe's `skip` and `clear_skip`: the union with the ranges already there.

    1-based, both ends included, as Megatron counts (`start <= iteration + 1 <= end`)."""
    wanted = [] if recipe.skip_by_counters else ranges(recipe.skip)
    if not wanted and not recipe.clear_skip:
        return [], []
    places = checkpoint.locate("skip")
    if not places:
        raise SurgeryError(
            f"{checkpoint.path.name} keeps no skip ranges: its trainer takes them from a flag",
            next=(
                _relaunch(run.format.flags, wanted),
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


def _relaunch(flags: Mapping[str, str], wanted: Sequence[tuple[int, int]]) -> str:
    """How the trainer is told: `skip` is a flag that takes ranges, `skip_list` one that takes them
    joined by commas, `skip_each` one that takes every iteration by itself."""
    if "skip" in flags:
        words = [f"{first}-{last}" for first, last in wanted]
        return " ".join(["relaunch the trainer with", flags["skip"], *words])
    if "skip_list" in flags:
        words = [f"{first}-{last}" for first, last in wanted]
        return f"relaunch the trainer with {flags['skip_list']} {','.join(words)}"
    if "skip_each" in flags:
        each = [str(i) for first, last in wanted for i in range(first, last + 1)]
        return " ".join(["relaunch the trainer with", flags["skip_each"], *each])
    return "this trainer can't skip data: go back further, or change the data's order"


def merge(items: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Inclusive ranges in ascending order; those that overlap or touch become one."""
    out: list[tuple[int, int]] = []
    for first, last in sorted(items):
        if out and first <= out[-1][1] + 1:
            out[-1] = (out[-1][0], max(last, out[-1][1]))
        else:
            out.append((first, last))
    return out
