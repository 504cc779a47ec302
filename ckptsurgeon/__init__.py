"""Hyperparameter surgery on sharded checkpoints: one transaction, undoable.

from ckptsurgeon import Run, Recipe, plan, apply
run = Run.open(Path("."))
receipt = apply(run, plan(run, Recipe(set=Hyperparameters(lr=3e-5))))
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ckptsurgeon.version import VERSION

__version__ = VERSION

if TYPE_CHECKING:
    from ckptsurgeon.edits import Plan, Promise, Receipt
    from ckptsurgeon.look.verify import inspect, verify
    from ckptsurgeon.recipe.recipe import Hyperparameters, Recipe, Rollback
    from ckptsurgeon.run.run import Run
    from ckptsurgeon.surgery.apply import apply, recover
    from ckptsurgeon.surgery.plan import plan
    from ckptsurgeon.surgery.undo import plan_undo

_HOMES = {
    "Plan": "edits", "Promise": "edits", "Receipt": "edits",
    "Hyperparameters": "recipe.recipe", "Recipe": "recipe.recipe", "Rollback": "recipe.recipe",
    "Run": "run.run",
    "plan": "surgery.plan", "apply": "surgery.apply", "recover": "surgery.apply",
    "plan_undo": "surgery.undo",
    "inspect": "look.verify", "verify": "look.verify",
}  # fmt: skip

__all__ = [
    "Hyperparameters",
    "Plan",
    "Promise",
    "Receipt",
    "Recipe",
    "Rollback",
    "Run",
    "apply",
    "inspect",
    "plan",
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
