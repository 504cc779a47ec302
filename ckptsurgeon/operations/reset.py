"""Back to zero: Adam's moments with their step, or the dynamic loss scale."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import field
from typing import Annotated, ClassVar

import typer

from ckptsurgeon.errors import SurgeryError, UsageError, count
from ckptsurgeon.files.expressions import matching
from ckptsurgeon.formats import Checkpoint, Place
from ckptsurgeon.formats.capabilities import NamesMoments
from ckptsurgeon.formats.fields.columns import Column, Places
from ckptsurgeon.formats.fields.trees import are_zero
from ckptsurgeon.formats.optimizers.entry import ANEW
from ckptsurgeon.formats.optimizers.table import STEPS, changing, recognise
from ckptsurgeon.formats.places.moments import ALL, ALSO, NUMBERED
from ckptsurgeon.hints import again, command
from ckptsurgeon.operations import completion
from ckptsurgeon.operations.fields import Fields
from ckptsurgeon.operations.fresh_state import renewed
from ckptsurgeon.operations.hyperparameters import Hyperparameters
from ckptsurgeon.operations.key import Key, unknown_value
from ckptsurgeon.operations.known_optimizer import knowing
from ckptsurgeon.operations.place_changes import of_column
from ckptsurgeon.operations.rewarm import Hold, Ramp, Rewarm, window
from ckptsurgeon.operations.section import Changes, Recipe, Section
from ckptsurgeon.plans.edits import ABSENT, ZEROS, AnyChange, Change
from ckptsurgeon.plans.frozen import held
from ckptsurgeon.run.run import Run

MEANT = {
    "adam": "moments", "adamw": "moments", "optimizer": "moments", "optim": "moments",
    "momentum": "moments", "scaler": "loss-scale", "scale": "loss-scale",
    "grad_scaler": "loss-scale",
}  # fmt: skip
"""What other programs call it."""


@held
class Moments(Fields):
    """What narrows a reset of the moments: `only` exp_avg, `params` whose names match."""

    key: ClassVar[str] = "moments"

    only: Annotated[
        str | None,
        Key("only this moment; Adam's step stays", "--only exp_avg", one_of=("exp_avg",)),
    ] = None
    params: Annotated[
        str | None,
        Key("only parameters whose names match; Adam's step stays", "--params REGEX", pattern=True),
    ] = None


@held
class Reset(Section):
    """What is reset; fp32 masters, schedule and counters are not touched.

    Moments means exp_avg, exp_avg_sq and step together, with what AMSGrad and Muon keep, unless
    `moments` narrows it: zeroing only exp_avg_sq makes the first update up to 79,500 times lr and
    is refused, and keeping step makes it (1 - β1)/√(1 - β2) times lr, which the plan says."""

    reset: Annotated[
        list[str],
        Key(
            "`moments` is exp_avg, exp_avg_sq **and** step, together",
            one_of=("moments", "loss_scale"),
        ),
    ] = field(default_factory=list)
    moments: Moments = field(default_factory=Moments)

    def check(self, recipe: Recipe) -> None:
        only, params = self.moments.only, self.moments.params
        if (only or params) and "moments" not in self.reset:
            raise UsageError(
                f"`moments.{'only' if only else 'params'}` narrows a reset of the moments, and "
                "they are not reset",
                next=command("reset", "moments", why="in a recipe reset: [moments]"),
            )
        if only == "exp_avg_sq":
            raise UsageError(
                "exp_avg_sq can't be reset alone: the next update would be up to 79,500 times lr",
                next=(
                    command("reset", "moments"),
                    command(
                        "reset", "moments", "--only", "exp_avg", why="if the optimizer keeps one"
                    ),
                ),
            )

    def title(self, run: Run, step: int) -> list[str]:
        part = " ".join(item for item in (self.moments.only, self.moments.params) if item)
        return [f"reset {state}{f' ({part})' if part else ''}" for state in self.reset]

    def changes(self, run: Run, recipe: Recipe, checkpoint: Checkpoint) -> Changes:
        changes: list[AnyChange] = []
        warnings: list[str] = []
        if "moments" in self.reset:
            checkpoint = knowing(run, checkpoint)
        beta2 = recipe[Hyperparameters].beta2
        if "moments" not in self.reset:
            warnings += _young(checkpoint, beta2) if beta2 is not None else []
        elif self.moments != Moments():
            changes += _part(run, checkpoint, self.moments)
            if changes:
                warnings.append(_first_update(checkpoint, self.moments))
        else:
            fresh = _moments(run, checkpoint)
            changes += fresh
            rewarm = recipe.get(Rewarm)
            warnings += _anew(checkpoint, fresh, rewarm is not None and rewarm.iterations > 0)
        if "loss_scale" in self.reset:
            changes += _loss_scale(run, checkpoint)
        return changes, warnings


def _young(checkpoint: Checkpoint, beta2: float) -> list[str]:
    """A warning when moments that are kept have seen too few steps for another beta2; those that
    have seen none begin with the new one."""
    promise = checkpoint.state().promise
    if promise.betas is None or not promise.adam_step or promise.betas[1] == beta2:
        return []
    horizon = 3 / (1 - max(beta2, promise.betas[1]))
    if promise.adam_step >= horizon:
        return []
    return [
        f"exp_avg_sq has seen only {count(promise.adam_step, 'step')} under beta2 "
        f"{promise.betas[1]:g}; the "
        f"bias correction of the new one is off until about step {horizon:.0f}"
    ]


def _anew(checkpoint: Checkpoint, changes: Sequence[Change], rewarmed: bool) -> list[str]:
    """What to know of a whole reset: what else it takes, and how large the first update is."""
    out = []
    adam = bool(checkpoint.locate("exp_avg_sq"))
    if adam and any(change.field == "momentum_buffer" for change in changes):
        out.append("the momentum of parameters that are not Adam's (Muon) starts from zero too")
    if left := sum(c.places for c in changes if c.new == ABSENT and c.old == "values"):
        out.append(
            f"the state of {count(left, 'parameter')} leaves the checkpoint: only the optimizer "
            "can make a new one, at its next update"
        )
    if adam and not rewarmed and any(change.new == ZEROS for change in changes):
        out.append("the first update after a moment reset has size 1.0 × lr in every weight")
    return out


def _refuse_partial(checkpoint: Checkpoint) -> None:
    """Refuse a reset of some parameters where an optimizer keeps more than the moments of each."""
    for each in checkpoint.state_dicts():
        known = recognise(each, checkpoint.known)
        usual = {*ALL, *NUMBERED, *STEPS}
        others = changing(each, known, usual)
        others += [key for key in each.state if known.state.get(key) == ANEW and key in usual]
        if others or known.counters or known.refused:
            entries = ", ".join(others or known.counters) or known.refused
            raise SurgeryError(
                f"{each.file.name}: {known.name} keeps {entries} beside the moments, and a "
                "reset of some parameters can't reset that",
                next=command("reset", "moments", why="of all parameters"),
            )


def _part(run: Run, checkpoint: Checkpoint, part: Moments) -> list[AnyChange]:
    """Only exp_avg, or the moments of some parameters; the step stays, as others share it."""
    also = [name for name in ALSO if not part.only and checkpoint.locate(name)]
    names = (part.only,) if part.only else ("exp_avg", "exp_avg_sq", *also)
    if part.params is None:
        return [
            change
            for name in names
            for column in Places.of(_tensors(checkpoint, name)).columns
            for change in _zeroed(run, checkpoint, name, column)
        ]
    _refuse_partial(checkpoint)
    moments = NamesMoments.of(checkpoint)
    fragments = [(name, fragment) for name in names for fragment in moments.fragments(name)]
    chosen = matching(part.params, (f.parameter for _, f in fragments), "moments.params")
    return [
        Change(
            run.relative(f.place.file), f"{name} of {f.parameter}", "values", ZEROS,
            f.place.path, (f.start, f.end), f.place.chunks,
        )
        for name, f in fragments
        if f.parameter in chosen
        if f.start < f.end and not checkpoint.is_zero(f.place, (f.start, f.end))
    ]  # fmt: skip


def _first_update(checkpoint: Checkpoint, part: Moments) -> str:
    """How large the first update of a weight is whose moments are 0 under a step that is not.

    Adam divides by bias corrections that are 1 by then, so a constant gradient moves the weight by
    (1 - β1) / √(1 - β2) times lr, and by less than lr if only exp_avg is 0."""
    promise = checkpoint.state().promise
    if part.only or promise.betas is None:
        return "with exp_avg at 0 the first updates are below lr, until it has filled again"
    beta1, beta2 = promise.betas[:2]
    size = (1 - beta1) / math.sqrt(1 - beta2)
    return (
        f"the step is shared and stays, so the first update of these parameters is {size:.3g} × lr "
        f"((1 - β1) / √(1 - β2))"
    )


def _tensors(checkpoint: Checkpoint, name: str) -> Sequence[Place]:
    places = checkpoint.locate(name)
    if places:
        return places
    kept = {key for each in checkpoint.state_dicts() for key in each.state} - STEPS
    if not kept:
        raise SurgeryError(
            f"{checkpoint.path.name} holds no {name}",
            next="reset moments needs a checkpoint with Adam's state (saved without it?)",
        )
    optimizer = checkpoint.state().promise.optimizer or "its optimizer"
    raise SurgeryError(
        f"{checkpoint.path.name}: {optimizer} keeps {', '.join(sorted(kept))}, and no {name}",
        next=command("reset", "moments", why="all that it keeps, with its step"),
    )


def _moments(run: Run, checkpoint: Checkpoint) -> list[Change]:
    """What makes the next update that of a new optimizer; see `formats.renew`."""
    changes: list[Change] = []
    for name, column, new in renewed(checkpoint):
        if new == column.zero:
            changes += _zeroed(run, checkpoint, name, column)
        else:
            changes += of_column(run, name, column, new)
    return changes


def _zeroed(run: Run, checkpoint: Checkpoint, name: str, column: Column) -> Iterator[Change]:
    """Zeros for each place that does not have them yet."""
    if kept := [index for index, done in enumerate(are_zero(checkpoint, column)) if not done]:
        yield from of_column(run, name, column.only(kept), column.zero)


def _loss_scale(run: Run, checkpoint: Checkpoint) -> list[AnyChange]:
    if not checkpoint.state().dynamic_loss_scale:
        raise SurgeryError(
            "the run has no dynamic loss scale (bf16 and fp32 train without one)",
            next=command("show", why="what the checkpoint keeps"),
        )
    changes: list[AnyChange] = []
    for place, start in checkpoint.scaler_start():
        changes.append(
            Change(run.relative(place.file), "loss_scale", place.value, start, place.path)
        )
    return changes


# --- commands ------------------------------------------------------------------------------------


def states_of(names: Sequence[str]) -> list[str]:
    """`loss-scale`, as it is typed, as it stands in a recipe; also two, joined by a comma. Raises
    UsageError for another word."""
    typed = [part.strip() for name in names for part in name.split(",")]
    for state in typed:
        if meant := MEANT.get(state.lower().replace("-", "_")):
            raise UsageError(f"`reset` takes no {state!r}", next=again(swapped=(state, meant)))
        if state.replace("_", "-") not in completion.STATES:
            raise unknown_value(state, completion.STATES, "reset")
    return [state.replace("-", "_") for state in typed]


def reset(
    states: Annotated[
        list[str],
        typer.Argument(
            metavar="moments|loss-scale", help="What to reset.", autocompletion=completion.states
        ),
    ],
    part: Moments,
    hold: Hold = None,
    ramp: Ramp = None,
) -> Recipe:
    """Reset the Adam moments or the loss scale.

    Moments are exp_avg, exp_avg_sq and step together; fp32 masters and the schedule stay. With
    --only or --params Adam's step is kept; the plan says what that costs.

    Examples:
    ckptsurgeon reset moments --rewarm 100
    ckptsurgeon reset moments --params layernorm --dry-run
    """
    return Recipe(Reset(states_of(states), part), *window(hold, ramp))


COMMANDS = {"reset": reset}
