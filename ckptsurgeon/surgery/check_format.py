"""Tries every operation on a copy of one step: does a description lead to what it says?"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ckptsurgeon import disk, surgery
from ckptsurgeon.errors import SurgeryError, UsageError
from ckptsurgeon.files.integrity import sha256
from ckptsurgeon.formats.layout import Paged
from ckptsurgeon.operations.section import Recipe
from ckptsurgeon.plans.edits import Change
from ckptsurgeon.plans.frozen import frozen
from ckptsurgeon.recipe.file import from_data
from ckptsurgeon.run.run import Run
from ckptsurgeon.surgery.fork import fork, remove
from ckptsurgeon.transaction.home import HOME

NOTHING = from_data({})
TRIED: Mapping[str, Mapping[str, Any]] = {
    "set lr=0.5x": {"set": {"lr": "0.5x"}},
    "set beta1, beta2": {"set": {"beta1": 0.8, "beta2": 0.9}},
    "set eps": {"set": {"eps": 1e-6}},
    "set weight_decay": {"set": {"weight_decay": 0.3}},
    "set iteration": {"set": {"iteration": 1}},
    "set consumed_samples": {"set": {"consumed_samples": 1}},
    "set tokens": {"set": {"tokens": 1}},
    "reset moments": {"reset": ["moments"]},
    "reset loss-scale": {"reset": ["loss_scale"]},
}


@frozen
class Trial:
    """One operation on the copy: how many places it changed, or why it was refused. `wrong` says
    what was not as before after the undo; empty if all was."""

    operation: str
    places: int = 0
    refused: str = ""
    wrong: str = ""


@frozen
class Check:
    """What a description makes of a run: its steps, what a restart loads, how often each field is
    there, the key paths that lead nowhere, and the trials."""

    format: str
    steps: tuple[int, ...]
    files: int
    pointers: Mapping[str, int | None]
    fields: Mapping[str, int]
    idle: tuple[str, ...]
    trials: tuple[Trial, ...]

    @property
    def sound(self) -> bool:
        """Whether every trial that was not refused was undone."""
        return not any(trial.wrong for trial in self.trials)


def check_format(run: Run) -> Check:
    """Read the latest step, edit nothing, then carry out and undo each operation, on a copy beside
    the run that is removed in the end. The run itself is only read.

    Raises SurgeryError where the latest step can't be read, UsageError where the copy's name is
    taken."""
    step = run.latest()
    checkpoint = run.checkpoint(step)
    checkpoint.state()
    branch = run.root.with_name(f"{run.root.name}.check-format")
    if disk.exists(branch):
        raise UsageError(f"{branch} is in the way", next="move it, or remove it if a check made it")
    fork(run, step, branch, NOTHING, "copy")
    try:
        copy = Run(branch, run.format, {})
        trials = tuple(_tried(copy, name, from_data(data)) for name, data in TRIED.items())
    finally:
        remove(branch)
    names = ("lr", "betas", "eps", "weight_decay", "adam_step", "exp_avg", "exp_avg_sq",
             "scheduler", "loss_scale", "iteration", "consumed_samples", "tokens")  # fmt: skip
    return Check(
        format=run.format.name,
        steps=tuple(run.steps()),
        files=len(run.format.files(run.root, step)),
        pointers=run.pointers(),
        fields={name: len(checkpoint.locate(name)) for name in names},
        idle=tuple(run.format.idle_paths(run.root, step) if isinstance(run.format, Paged) else ()),
        trials=trials,
    )


def _tried(run: Run, name: str, recipe: Recipe) -> Trial:
    before = _digests(run.root)
    try:
        plan = surgery.plan(run, recipe)
    except SurgeryError as error:
        return Trial(name, refused=error.what)
    if plan.empty:
        return Trial(name, refused="nothing to do")
    surgery.apply(run, plan)
    if _digests(run.root) == before:
        return Trial(name, wrong="the surgery changed no file")
    surgery.apply(run, surgery.plan_undo(run))
    after = _digests(run.root)
    changed = sorted(f for f in before.keys() | after.keys() if before.get(f) != after.get(f))
    wrong = f"{', '.join(changed[:3])} differs after the undo" if changed else ""
    places = sum(item.places if isinstance(item, Change) else 1 for item in plan.changes)
    return Trial(name, places=places, wrong=wrong)


def _digests(root: Path) -> dict[str, str]:
    """sha256 of each file, but for the surgeon's own."""
    return {
        path.relative_to(root).as_posix(): sha256(path)
        for path in sorted(disk.below(root))
        if disk.is_file(path) and HOME not in path.relative_to(root).parts
    }
