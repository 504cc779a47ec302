"""The log part of a surgery: every event folder of the run is cut, or its tags renamed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ckptsurgeon.edits import AnyChange
from ckptsurgeon.errors import UsageError
from ckptsurgeon.formats import Checkpoint
from ckptsurgeon.logs import cut
from ckptsurgeon.logs.marks import Marks
from ckptsurgeon.recipe.recipe import Recipe
from ckptsurgeon.run.run import Run


def events(
    run: Run, recipe: Recipe, checkpoint: Checkpoint | None
) -> tuple[list[AnyChange], list[str]]:
    """Changes for the recipe's `tensorboard`: a cut at the rollback step (or `after`), or a rename.

    The checkpoint's own counters and save time say which branch is meant; without a checkpoint the
    logs alone do."""
    wanted = recipe.tensorboard
    changes: list[AnyChange] = []
    warnings: list[str] = []
    cut_at = wanted.after
    if cut_at is None and checkpoint is not None and recipe.rollback and wanted.truncate:
        cut_at = checkpoint.step
    if cut_at is not None and wanted.rename:
        raise UsageError(
            "a cut and a rename of the same event files in one recipe",
            next="do the rollback first, then ckptsurgeon rename-tb-events",
        )
    if cut_at is not None or wanted.rename:
        warnings += [
            f"{link}/ is a link, so its event files stay as they are; name it in "
            f"ckptsurgeon.yaml if they are this run's: tensorboard: [{link}]"
            for link in run.logs.links()
        ]
    branch = _branch(run, wanted.branch)
    for folder in run.logs.folders():
        if cut_at is not None:
            keep = (wanted.keep_as or f"cut-{len(run.receipts()) + 1:04d}") if wanted.keep else None
            done, said = cut.truncate(
                folder,
                run.root,
                _marks(checkpoint, cut_at, wanted.samples),
                keep_as=keep,
                salvage=wanted.salvage,
                branch=branch,
                order=wanted.order,
                axes=wanted.axes,
            )
        elif wanted.rename:
            done, counts = cut.rename(
                folder, run.root, wanted.rename, regex=wanted.regex, allow_merge=wanted.allow_merge
            )
            said = counts.sentences()
        else:
            break
        changes += done
        warnings += said
    return changes, warnings


def _branch(run: Run, wanted: Sequence[str]) -> list[str]:
    """The names of the event files of the branch that is meant, however they were reached. Raises
    UsageError for one that is not there: it would decide nothing, silently."""
    there = sorted({Path(file).name for file in run.logs.event_files()}) if wanted else []
    names = [Path(file).name for file in wanted]
    for name in names:
        if name not in there:
            told = ", ".join(there[:3]) + (" …" if len(there) > 3 else "")
            raise UsageError(f"branch: no event file is called {name}", next=f"there is: {told}")
    return names


def _marks(checkpoint: Checkpoint | None, step: int, samples: int | None) -> Marks:
    """The counters of `step`: the checkpoint's own, or what the user says of another step."""
    if checkpoint is None or step != checkpoint.state().step:
        return Marks(iteration=step, samples=samples)
    state = checkpoint.state()
    return Marks(
        iteration=state.step,
        samples=state.promise.consumed_samples,
        tokens=state.tokens,
        gigaflos=state.gigaflos,
        saved_at=state.saved_at,
    )


def note(run: Run, recipe: Recipe, step: int, title: str, when: float) -> list[AnyChange]:
    """The surgery as a text in the run's first log folder, unless the recipe says no; not behind a
    cut that it makes, where the same cut would find it."""
    folders, cut_at = run.logs.folders(), recipe.tensorboard.after
    if not recipe.tensorboard.note or not folders:
        return []
    text = f"**{title}**" + (f"\n\n{recipe.why}" if recipe.why else "")
    at = step if cut_at is None else min(step, cut_at)
    return [cut.note(folders[0], run.root, at, text, when)]
