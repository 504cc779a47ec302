"""Intent becomes changes: one file per section of a recipe, and the table that lists them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import field
from importlib import import_module
from typing import TYPE_CHECKING

from ckptsurgeon.plans.frozen import frozen

if TYPE_CHECKING:
    from ckptsurgeon.operations.section import Recipe, Section


@frozen
class Operation:
    """One file: the module, the names of its Section classes, and its commands with the line that
    `--help` shows of each.

    The module is imported when it is needed. Its COMMANDS says which function a command is: one
    that returns the Recipe that was typed. Sections that are `in_each_recipe` have their defaults
    in a recipe that leaves them out."""

    module: str
    sections: tuple[str, ...]
    commands: dict[str, str] = field(default_factory=dict)
    in_each_recipe: bool = False

    def kinds(self) -> list[type[Section]]:
        """The sections of a recipe that it takes."""
        module = import_module(self.module)
        return [getattr(module, name) for name in self.sections]

    def command(self, name: str) -> Callable[..., Recipe]:
        """The function of one of its commands."""
        function: Callable[..., Recipe] = import_module(self.module).COMMANDS[name]
        return function


HERE = __name__
OPERATIONS = (
    Operation(f"{HERE}.rollback", ("Rollback", "Repair"), {
        "rollback": "Go back to a saved step.",
        "repair-latest": "Make `latest` name a checkpoint that loads.",
    }),
    Operation(f"{HERE}.set_commands", ("Hyperparameters",), {
        "set-lr": "Change the learning-rate schedule.",
        "set": "Change hyperparameters in every place that keeps them.",
    }, in_each_recipe=True),
    Operation(f"{HERE}.cooldown", ("Cooldown",), {
        "cooldown": "Let the learning rate decay from this step on."
    }),
    Operation(f"{HERE}.rewarm_schedule", ("RewarmSchedule",)),
    Operation(f"{HERE}.group_settings", ("GroupSettings",)),
    Operation(f"{HERE}.reset", ("Reset",), {
        "reset": "Reset the Adam moments or the loss scale."
    }, in_each_recipe=True),
    Operation(f"{HERE}.rewarm", ("Rewarm",)),
    Operation(f"{HERE}.skip", ("Skip",), {
        "skip": "Skip the data of some iterations."
    }, in_each_recipe=True),
    Operation(f"{HERE}.swap_optimizer", ("SwapOptimizer",), {
        "swap-optimizer": "Switch the run to another optimizer."
    }),
    Operation(f"{HERE}.average", ("Average",), {
        "average": "Make weights the mean of several steps."
    }),
    Operation(f"{HERE}.graft", ("Graft",), {"graft": "Take the moments of another step."}),
    Operation(f"{HERE}.transplant", ("Transplant",), {
        "transplant": "Fill this run with a step of another one."
    }),
    Operation(f"{HERE}.clip_moments", ("ClipMoments",), {
        "clip-moments": "Lower the largest entries of exp_avg_sq."
    }),
    Operation(f"{HERE}.scale", ("Scale",), {"scale": "Multiply weights by a number."}),
    Operation(f"{HERE}.precision", ("Precision",), {"precision": "Switch to bf16 or fp32."}),
    Operation(f"{HERE}.replicas", ("Replicas",), {
        "sync-replicas": "Average parameters of which every tensor-parallel rank keeps a copy."
    }),
    Operation(f"{HERE}.events", ("TensorBoard",), {
        "truncate-tb-events": "Cut TensorBoard events after an iteration.",
        "rename-tb-events": "Rename TensorBoard tags.",
    }, in_each_recipe=True),
    Operation(f"{HERE}.logs", ("Logs",), {
        "truncate-logs": "Cut every log of the run after a step.",
        "rename-logs": "Rename what is logged, in every log of the run.",
    }, in_each_recipe=True),
    Operation(f"{HERE}.relaunch", ("Relaunch",)),
)  # fmt: skip
"""In this order a plan lists their changes, a title and a recipe their sections, and `--help` their
commands. The order means nothing to the result: each reads the state before the surgery."""


def kinds() -> list[type[Section]]:
    """The sections that a recipe may have."""
    return [kind for operation in OPERATIONS for kind in operation.kinds()]


def stands(kind: type[Section]) -> bool:
    """Whether each recipe has this section, given or with its defaults."""
    return any(op.in_each_recipe and kind.__name__ in op.sections for op in OPERATIONS)


def in_order(recipe: Recipe) -> list[Section]:
    """The sections of `recipe`, with those that stand in every recipe; only their modules are
    imported."""
    given = {kind.__name__ for kind in recipe.given}
    asked = [op for op in OPERATIONS if op.in_each_recipe or given.intersection(op.sections)]
    known = [kind for operation in asked for kind in operation.kinds()]
    unknown = [kind.__name__ for kind in recipe.given if kind not in known]
    if unknown:
        raise LookupError(f"no operation is listed for {', '.join(unknown)}")
    return [recipe[kind] for kind in known if kind in recipe.given or stands(kind)]
