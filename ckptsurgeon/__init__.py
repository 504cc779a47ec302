"""Hyperparameter surgery on sharded checkpoints: one transaction, undoable.

from ckptsurgeon import Hyperparameters, Recipe, Run, apply, plan

run = Run.open(".")
receipt = apply(run, plan(run, Recipe(Hyperparameters(lr=3e-5), why="loss spike")))
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ckptsurgeon.operations import OPERATIONS
from ckptsurgeon.version import VERSION

__version__ = VERSION

if TYPE_CHECKING:
    from ckptsurgeon.look.verify import inspect as inspect
    from ckptsurgeon.look.verify import verify as verify
    from ckptsurgeon.operations.average import Average as Average
    from ckptsurgeon.operations.clip_moments import ClipMoments as ClipMoments
    from ckptsurgeon.operations.cooldown import Cooldown as Cooldown
    from ckptsurgeon.operations.events import TensorBoard as TensorBoard
    from ckptsurgeon.operations.graft import Graft as Graft
    from ckptsurgeon.operations.group_settings import GroupSettings as GroupSettings
    from ckptsurgeon.operations.hyperparameters import Hyperparameters as Hyperparameters
    from ckptsurgeon.operations.logs import Logs as Logs
    from ckptsurgeon.operations.precision import Precision as Precision
    from ckptsurgeon.operations.relaunch import Relaunch as Relaunch
    from ckptsurgeon.operations.replicas import Replicas as Replicas
    from ckptsurgeon.operations.reset import Moments as Moments
    from ckptsurgeon.operations.reset import Reset as Reset
    from ckptsurgeon.operations.rewarm import Rewarm as Rewarm
    from ckptsurgeon.operations.rewarm_schedule import RewarmSchedule as RewarmSchedule
    from ckptsurgeon.operations.rollback import Repair as Repair
    from ckptsurgeon.operations.rollback import Rollback as Rollback
    from ckptsurgeon.operations.scale import Scale as Scale
    from ckptsurgeon.operations.section import Recipe as Recipe
    from ckptsurgeon.operations.skip import Skip as Skip
    from ckptsurgeon.operations.swap_optimizer import SwapOptimizer as SwapOptimizer
    from ckptsurgeon.operations.transplant import Transplant as Transplant
    from ckptsurgeon.plans.edits import Aside as Aside
    from ckptsurgeon.plans.edits import Change as Change
    from ckptsurgeon.plans.edits import Relink as Relink
    from ckptsurgeon.plans.edits import Rewrite as Rewrite
    from ckptsurgeon.plans.plan import Plan as Plan
    from ckptsurgeon.plans.plan import Receipt as Receipt
    from ckptsurgeon.plans.promise import Promise as Promise
    from ckptsurgeon.recipe.file import from_data as from_data
    from ckptsurgeon.recipe.file import load as load
    from ckptsurgeon.run.run import Run as Run
    from ckptsurgeon.surgery.apply import apply as apply
    from ckptsurgeon.surgery.apply import recover as recover
    from ckptsurgeon.surgery.plan import plan as plan
    from ckptsurgeon.surgery.undo import plan_redo as plan_redo
    from ckptsurgeon.surgery.undo import plan_undo as plan_undo

_PLACES = {
    "look.verify": "inspect verify",
    "operations.reset": "Moments",
    "operations.section": "Recipe",
    "plans.edits": "Aside Change Relink Rewrite",
    "plans.plan": "Plan Receipt",
    "plans.promise": "Promise",
    "recipe.file": "from_data load",
    "run.run": "Run",
    "surgery.apply": "apply recover",
    "surgery.plan": "plan",
    "surgery.undo": "plan_redo plan_undo",
}
_HOMES = {
    **{name: f"{__name__}.{place}" for place, names in _PLACES.items() for name in names.split()},
    **{name: each.module for each in OPERATIONS for name in each.sections},
}
"""The module of each public name; a section of a recipe is one by the table of operations."""

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    """Each name loads its module at first use: `ckptsurgeon --help` needs none of them."""
    if name not in _HOMES:
        raise AttributeError(f"module 'ckptsurgeon' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    """The public names too, loaded or not: what an editor completes."""
    return sorted({*globals(), *__all__})
