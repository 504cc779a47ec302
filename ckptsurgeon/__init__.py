"""Hyperparameter surgery on sharded checkpoints: one transaction, undoable.

from ckptsurgeon import Run, Recipe, plan, apply
run = Run.open(Path("."))
receipt = apply(run, plan(run, Recipe(set=Hyperparameters(lr=3e-5))))
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from ckptsurgeon.edits import Plan, Promise, Receipt
    from ckptsurgeon.recipe import Hyperparameters, Recipe, Rollback
    from ckptsurgeon.run import Run
    from ckptsurgeon.surgery import apply, plan, plan_undo, recover, verify

_HOMES = {
    "Plan": "edits", "Promise": "edits", "Receipt": "edits",
    "Hyperparameters": "recipe", "Recipe": "recipe", "Rollback": "recipe",
    "Run": "run",
    "apply": "surgery", "plan": "surgery", "plan_undo": "surgery", "recover": "surgery",
    "verify": "surgery",
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
