"""Another optimizer for a run that goes on: Adam's state becomes SGD's, or the other way round.

OPT-175B did it at restart 12.41, after faking it for six restarts with values that never ran.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

from ckptsurgeon.errors import SurgeryError, UsageError
from ckptsurgeon.formats import Checkpoint, Place
from ckptsurgeon.formats.fields.understood import is_number
from ckptsurgeon.operations.key import Key
from ckptsurgeon.operations.limits import SHARE
from ckptsurgeon.operations.own_config import config_changes, configured
from ckptsurgeon.operations.reset import Reset
from ckptsurgeon.operations.rewarm import Rewarm
from ckptsurgeon.operations.section import Changes, Recipe, Section
from ckptsurgeon.plans.edits import ABSENT, AnyChange, Change, Renamed
from ckptsurgeon.plans.frozen import held
from ckptsurgeon.run.run import Run

OPTIMIZERS = ("adamw", "sgdw")


@held
class SwapOptimizer(Section):
    """Go on with the optimizer `to`, adamw or sgdw; SGDW has a `momentum`, and its buffer begins as
    Adam's exp_avg (`keep`) or empty.

    To SGDW: exp_avg_sq goes, and exp_avg becomes the momentum or goes too. To AdamW: the momentum
    goes and Adam starts at step 0. The groups keep Adam's betas and eps, which a swap back needs.
    Refused for a trainer whose checkpoints do not name their optimizer: its loader would take one's
    state for the other's, or assert the class."""

    key: ClassVar[str] = "swap_optimizer"

    to: Annotated[
        str,
        Key(
            "go on with another optimizer: groups, state and the run's train.yaml are rewritten",
            "adamw|sgdw",
            "The optimizer to switch to.",
            one_of=OPTIMIZERS,
        ),
    ]
    momentum: Annotated[
        float, Key("momentum of SGDW [0.9]; 0 keeps no buffer", "--momentum M", limits=SHARE)
    ] = 0.9
    keep: Annotated[bool, Key("start SGDW's buffer from Adam's exp_avg, not empty", "--keep")] = (
        False
    )

    def check(self, recipe: Recipe) -> None:
        both = ["reset"] if recipe[Reset].reset else []
        both += ["rewarm"] if recipe.get(Rewarm) is not None else []
        if both:
            named = " and ".join(f"`{key}`" for key in both)
            raise UsageError(
                f"`swap_optimizer` starts with new state; it can't be combined with {named}",
                next=f"drop {named}",
            )

    def title(self, run: Run, step: int) -> list[str]:
        return [f"swap the optimizer for {self.to}"]

    def changes(self, run: Run, recipe: Recipe, checkpoint: Checkpoint) -> Changes:
        """The trainer's arguments and config, the param groups, and every parameter's state."""
        named = checkpoint.locate("optimizer")
        if not named:
            raise SurgeryError(
                f"{checkpoint.path.name} does not say which optimizer its state belongs to, so "
                "its trainer would load one's state into the other",
                next=run.format.advise("optimizer", self.to),
            )
        if all(place.value == self.to for place in named):
            return saved_config(run, checkpoint), []
        if any(place.value not in OPTIMIZERS for place in named):
            raise SurgeryError(
                f"the run's optimizer is {named[0].value}, and only adamw and sgdw can be swapped",
                next="swap_optimizer is for adamw and sgdw",
            )
        changes = [_set(run, "optimizer", place, self.to) for place in named]
        if self.to == "sgdw":
            changes += _to_sgdw(run, checkpoint, self)
            source = "exp_avg, which is (1 - β1) times SGD's sum" if self.keep else "nothing"
            warnings = [f"the momentum starts from {source}; set the lr for SGD with it"]
        else:
            changes += _to_adamw(run, checkpoint)
            warnings = ["Adam starts at step 0: the first update is 1.0 × lr in every weight"]
        momentum = self.momentum if self.to == "sgdw" else None
        return [*changes, *_config(run, self.to, momentum)], warnings


def saved_config(run: Run, checkpoint: Checkpoint) -> list[AnyChange]:
    """The trainer's config names the optimizer that `checkpoint` holds: a rollback to before a swap
    brings it back."""
    named = checkpoint.locate("optimizer")
    if not named:
        return []
    momentum = [place.value for place in checkpoint.locate("sgd_momentum")]
    return _config(run, named[0].value, momentum[0] if momentum else None)


def _set(run: Run, field: str, place: Place, value: object) -> AnyChange:
    return Change(run.relative(place.file), field, place.value, value, place.path)  # type: ignore[arg-type]


def _to_sgdw(run: Run, checkpoint: Checkpoint, section: SwapOptimizer) -> list[AnyChange]:
    changes: list[AnyChange] = [
        _set(run, "momentum", place, section.momentum)
        for place in checkpoint.locate("sgd_momentum")
    ]
    for group in checkpoint.locate("weight_decay"):
        path = (*group.path[:-1], "momentum")
        old = checkpoint.value(group.file, path)
        file = run.relative(group.file)
        if old is None:
            changes.append(Change(file, "momentum", ABSENT, section.momentum, path))
        else:
            changes.append(Change(file, "momentum", old, section.momentum, path))
    for place in checkpoint.locate("exp_avg"):
        new = Renamed("momentum_buffer") if section.keep else ABSENT
        changes.append(Change(run.relative(place.file), "exp_avg", "values", new, place.path))
    for place in checkpoint.locate("exp_avg_sq"):
        changes.append(Change(run.relative(place.file), "exp_avg_sq", "values", ABSENT, place.path))
    return changes


def _to_adamw(run: Run, checkpoint: Checkpoint) -> list[AnyChange]:
    if not checkpoint.locate("betas") or not checkpoint.locate("eps"):
        raise UsageError(
            "the param groups keep no betas and eps: this run never used Adam",
            next="start the trainer with optimizer=adamw and new state",
        )
    changes: list[AnyChange] = [
        _set(run, "momentum", place, None) for place in checkpoint.locate("sgd_momentum")
    ]
    for name in ("momentum_buffer", "adam_step", "momentum"):
        for place in checkpoint.locate(name):
            old = "values" if name == "momentum_buffer" else place.value
            field = name.replace("_", " ")
            changes.append(Change(run.relative(place.file), field, old, ABSENT, place.path))
    return changes


def _config(run: Run, optimizer: str, momentum: float | None) -> list[AnyChange]:
    """The bundled trainer's config in the run, so that a relaunch builds this optimizer."""
    if optimizer not in OPTIMIZERS or optimizer == configured(run, "optimizer"):
        return []
    values = {"optimizer": optimizer}
    if is_number(momentum):
        values["sgd_momentum"] = repr(momentum)
    return config_changes(run, values, f"optimizer {optimizer}")


# --- commands ------------------------------------------------------------------------------------


def swap(section: SwapOptimizer) -> Recipe:
    """Switch the run to another optimizer.

    Groups, state, and the run's train.yaml are rewritten. Switching to SGDW drops the moments (with
    --keep, exp_avg becomes the momentum). Switching to AdamW drops the momentum, and Adam starts at
    step 0.

    Examples:
    ckptsurgeon swap-optimizer sgdw --momentum 0.9 --keep
    """
    return Recipe(section)


COMMANDS = {"swap-optimizer": swap}
