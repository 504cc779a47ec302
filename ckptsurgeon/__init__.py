"""Hyperparameter surgery on sharded checkpoints: one transaction, undoable.

from ckptsurgeon import Hyperparameters, Recipe, Run, apply, plan

run = Run.open(".")
receipt = apply(run, plan(run, Recipe(Hyperparameters(lr=3e-5), why="loss spike")))
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ckptsurgeon.version import VERSION

__version__ = VERSION

if TYPE_CHECKING:
    from ckptsurgeon.look.verify import inspect, verify
    from ckptsurgeon.operations.average import Average
    from ckptsurgeon.operations.clip_moments import ClipMoments
    from ckptsurgeon.operations.cooldown import Cooldown
    from ckptsurgeon.operations.events import TensorBoard
    from ckptsurgeon.operations.graft import Graft
    from ckptsurgeon.operations.group_settings import GroupSettings
    from ckptsurgeon.operations.hyperparameters import Hyperparameters
    from ckptsurgeon.operations.precision import Precision
    from ckptsurgeon.operations.relaunch import Relaunch
    from ckptsurgeon.operations.replicas import Replicas
    from ckptsurgeon.operations.reset import Moments, Reset
    from ckptsurgeon.operations.rewarm import Rewarm
    from ckptsurgeon.operations.rewarm_schedule import RewarmSchedule
    from ckptsurgeon.operations.rollback import Repair, Rollback
    from ckptsurgeon.operations.scale import Scale
    from ckptsurgeon.operations.section import Recipe
    from ckptsurgeon.operations.skip import Skip
    from ckptsurgeon.operations.swap_optimizer import SwapOptimizer
    from ckptsurgeon.plans.edits import Aside, Change, Relink, Rewrite
    from ckptsurgeon.plans.plan import Plan, Receipt
    from ckptsurgeon.plans.promise import Promise
    from ckptsurgeon.recipe.file import from_data, load
    from ckptsurgeon.run.run import Run
    from ckptsurgeon.surgery.apply import apply, recover
    from ckptsurgeon.surgery.plan import plan
    from ckptsurgeon.surgery.undo import plan_redo, plan_undo

_HOMES = {
    "Change": "plans.edits", "Aside": "plans.edits", "Rewrite": "plans.edits",
    "Relink": "plans.edits",
    "Plan": "plans.plan", "Promise": "plans.promise", "Receipt": "plans.plan",
    "Recipe": "operations.section", "from_data": "recipe.file", "load": "recipe.file",
    "Average": "operations.average", "ClipMoments": "operations.clip_moments",
    "Cooldown": "operations.cooldown", "Graft": "operations.graft",
    "GroupSettings": "operations.group_settings",
    "Hyperparameters": "operations.hyperparameters", "Relaunch": "operations.relaunch",
    "Precision": "operations.precision",
    "Moments": "operations.reset", "Repair": "operations.rollback",
    "Replicas": "operations.replicas",
    "Reset": "operations.reset", "Rewarm": "operations.rewarm",
    "RewarmSchedule": "operations.rewarm_schedule", "Rollback": "operations.rollback",
    "Scale": "operations.scale", "Skip": "operations.skip",
    "SwapOptimizer": "operations.swap_optimizer",
    "TensorBoard": "operations.events",
    "Run": "run.run",
    "plan": "surgery.plan", "apply": "surgery.apply", "recover": "surgery.apply",
    "plan_undo": "surgery.undo", "plan_redo": "surgery.undo",
    "inspect": "look.verify", "verify": "look.verify",
}  # fmt: skip

__all__ = [
    "Aside",
    "Average",
    "Change",
    "ClipMoments",
    "Cooldown",
    "Graft",
    "GroupSettings",
    "Hyperparameters",
    "Moments",
    "Plan",
    "Precision",
    "Promise",
    "Receipt",
    "Recipe",
    "Relaunch",
    "Relink",
    "Repair",
    "Replicas",
    "Reset",
    "Rewarm",
    "RewarmSchedule",
    "Rewrite",
    "Rollback",
    "Run",
    "Scale",
    "Skip",
    "SwapOptimizer",
    "TensorBoard",
    "apply",
    "from_data",
    "inspect",
    "load",
    "plan",
    "plan_redo",
    "plan_undo",
    "recover",
    "verify",
]


def __getattr__(name: str) -> Any:
    """Each name loads its module at first use: `ckptsurgeon --help` needs none of them."""
    if name not in _HOMES:
        raise AttributeError(f"module 'ckptsurgeon' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"ckptsurgeon.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    """The public names too, loaded or not: what an editor completes."""
    return sorted({*globals(), *__all__})
