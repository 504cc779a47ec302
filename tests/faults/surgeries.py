"""A surgery, its undo, and compact after it, each as a scenario on copies of a run."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from ckptsurgeon import Run, plan, surgery
from ckptsurgeon.recipe.file import from_data
from tests.faults.world import Scenario


def scenarios(
    original: Path, recipe: dict[str, Any], read: Callable[[Path], str | None]
) -> tuple[Scenario, Scenario, Scenario]:
    """Apply `recipe` to a copy of `original`, undo that, and compact what it has grown. The copy
    lies in the world's folder `run`."""
    build, apply, recover = partial(_build, original), partial(_apply, recipe), surgery.recover
    operated = partial(_operated, original, recipe)
    return (
        Scenario("apply", build, partial(_in_run, apply), partial(_in_run, recover), read),
        Scenario("undo", operated, partial(_in_run, _undo), partial(_in_run, recover), read),
        Scenario("compact", operated, partial(_in_run, _compact), partial(_in_run, recover), read),
    )


def _build(original: Path, world: Path) -> None:
    shutil.copytree(original, world / "run", symlinks=True)


def _operated(original: Path, recipe: dict[str, Any], world: Path) -> None:
    _build(original, world)
    _in_run(partial(_apply, recipe), world)


def _in_run(act: Callable[[Run], object], world: Path) -> None:
    act(Run.open(world / "run"))


def _apply(recipe: dict[str, Any], run: Run) -> None:
    surgery.apply(run, plan(run, from_data(recipe)), jobs=1)


def _undo(run: Run) -> None:
    surgery.apply(run, surgery.plan_undo(run), jobs=1)


def _compact(run: Run) -> None:
    surgery.apply(run, surgery.plan_compact(run), jobs=1)
