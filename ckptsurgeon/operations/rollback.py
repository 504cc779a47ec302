"""Back to a saved step: newer checkpoints go to the attic, every pointer names the step."""

from __future__ import annotations

from pathlib import Path

from ckptsurgeon.edits import AnyChange, Aside, Change, Content, Rewrite, Span
from ckptsurgeon.formats import Checkpoint
from ckptsurgeon.recipe.recipe import Recipe
from ckptsurgeon.run.run import Run


def rollback(run: Run, recipe: Recipe, checkpoint: Checkpoint) -> tuple[list[AnyChange], list[str]]:
    """Changes for `rollback.to` or `repair_latest`, whose step `checkpoint` is.

    Newer steps must leave, and not only lose the pointer: trainers that pick the highest step
    would go back to the abandoned branch, and retention would delete the new one first."""
    changes: list[AnyChange] = []
    if recipe.rollback is not None:
        changes += [
            Aside(run.relative(path), "checkpoint")
            for step in run.steps()
            if step > checkpoint.step
            for path in run.entries(step)
        ]
    elif recipe.repair_latest is None:
        return [], []
    pointers = run.format.pointers(run.root, checkpoint.step)
    for path, text in pointers.items():
        if isinstance(text, Path):
            if run.format.pointed(path) != checkpoint.step:
                changes.append(_copy(run, path, text))
            continue
        old = path.read_text("utf-8", "replace") if path.exists() else None
        changes.append(Change(run.relative(path), "latest", old, text))
    return changes, run.format.stale_pointers(run.root, checkpoint.step)


def _copy(run: Run, path: Path, shard: Path) -> Rewrite:
    content = Content((Span(run.relative(shard), 0, shard.stat().st_size),))
    new = not path.exists()
    return Rewrite(run.relative(path), "latest", content, f"a copy of {shard.name}", new)
