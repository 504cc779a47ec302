"""The log part of a surgery: every event folder of the run is cut, or its tags renamed."""

from __future__ import annotations

from dataclasses import replace

from ckptsurgeon.edits import AnyChange
from ckptsurgeon.errors import UsageError
from ckptsurgeon.formats import Checkpoint
from ckptsurgeon.operations import tensorboard
from ckptsurgeon.operations.lineage import Marks
from ckptsurgeon.recipe import Recipe
from ckptsurgeon.run import Run


def events(run: Run, recipe: Recipe, checkpoint: Checkpoint) -> tuple[list[AnyChange], list[str]]:
    """Changes for the recipe's `tensorboard`: a cut at the rollback step (or `after`), or a rename.

    The checkpoint's own counters and save time say which branch is meant."""
    wanted = recipe.tensorboard
    changes: list[AnyChange] = []
    warnings: list[str] = []
    cut_at = wanted.after
    if cut_at is None and recipe.rollback is not None and wanted.truncate:
        cut_at = checkpoint.step
    if cut_at is not None and wanted.rename:
        raise UsageError(
            "a cut and a rename of the same event files in one recipe",
            next="do the rollback first, then ckptsurgeon rename-tb-events",
        )
    for folder in run.logdirs():
        if cut_at is not None:
            marks = _marks(checkpoint, cut_at)
            keep = (wanted.keep_as or f"cut-{len(run.receipts()) + 1:04d}") if wanted.keep else None
            done, said = tensorboard.truncate(folder, run.root, marks, keep_as=keep)
        elif wanted.rename:
            done, counts = tensorboard.rename(
                folder, run.root, wanted.rename, regex=wanted.regex, allow_merge=wanted.allow_merge
            )
            said = counts.sentences()
        else:
            break
        changes += done
        warnings += said
    return changes, warnings


def _marks(checkpoint: Checkpoint, step: int) -> Marks:
    """The counters of `step`: the checkpoint's own, or the iteration alone for another step."""
    state = checkpoint.state()
    marks = Marks(
        iteration=state.step,
        samples=state.promise.consumed_samples,
        tokens=state.tokens,
        gigaflos=state.gigaflos,
        saved_at=state.saved_at,
    )
    if step == state.step:
        return marks
    return replace(marks, iteration=step, samples=None, tokens=None, gigaflos=None, saved_at=None)
