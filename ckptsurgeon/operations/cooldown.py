"""The rate decays from this step on: the branch of a constant or WSD run that is evaluated.

Sources: MiniCPM 2404.06395 §4 (a decay of 10 % of the steps), Hägele et al. 2405.18392 (10 to 20 %,
1-sqrt).
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Annotated, ClassVar

import typer

from ckptsurgeon.errors import UsageError, count
from ckptsurgeon.formats import Checkpoint, Decay, State
from ckptsurgeon.formats.capabilities import Cools
from ckptsurgeon.formats.schedules.check import refuse_computed
from ckptsurgeon.formats.schedules.shapes import SHAPES
from ckptsurgeon.hints import command
from ckptsurgeon.operations.batch import TOTAL
from ckptsurgeon.operations.hyperparameters import Hyperparameters
from ckptsurgeon.operations.key import Key
from ckptsurgeon.operations.limits import Limits
from ckptsurgeon.operations.own_config import configured
from ckptsurgeon.operations.place_changes import PlaceChanges
from ckptsurgeon.operations.rewarm import samples_of
from ckptsurgeon.operations.section import Changes, Recipe, Section
from ckptsurgeon.operations.setter import SCHEDULE
from ckptsurgeon.operations.skip import Skip
from ckptsurgeon.plans.frozen import held
from ckptsurgeon.run.run import Run


@held
class Cooldown(Section):
    """The rate goes down from that of the next step, and then stays there."""

    key: ClassVar[str] = "cooldown"

    steps: Annotated[
        int | None,
        Key(
            "from the rate of the next step to `to` in so many trained iterations; not more than "
            "it has trained so far",
            limits=Limits(least=1),
        ),
    ] = None
    percent: Annotated[
        float | None,
        Key(
            "in place of `steps`: the share of the whole run that the cooldown is; 10 after 900 "
            "steps is 100 more",
            limits=Limits(above=0, below=100),
        ),
    ] = None
    shape: Annotated[
        str,
        Key(
            "`linear` if it is not given",
            "--shape SHAPE",
            "linear, 1-sqrt or cosine.",
            one_of=tuple(SHAPES),
        ),
    ] = "linear"
    to: Annotated[
        float,
        Key(
            "the last rate, where it then stays; 0 if not given", "--to LR", limits=Limits(least=0)
        ),
    ] = 0.0

    def check(self, recipe: Recipe) -> None:
        if (self.steps is None) == (self.percent is None):
            raise UsageError("`cooldown` takes either `steps` or `percent`", next="percent: 10")
        refuse_both(recipe, self.key)

    def settled(self, state: State) -> Cooldown:
        """With `steps` for `percent`, so that a plan keeps what it was made with."""
        if self.percent is None:
            return self
        steps = round(_done(state) * self.percent / (100 - self.percent))
        return replace(self, steps=max(1, steps), percent=None)

    def title(self, run: Run, step: int) -> list[str]:
        return [f"cool down to {self.to:g} in {count(self.steps or 0, 'step')} ({self.shape})"]

    def changes(self, run: Run, recipe: Recipe, checkpoint: Checkpoint) -> Changes:
        refuse_computed(checkpoint)
        state, steps = checkpoint.state(), self.steps or 0
        done = _done(state)
        if steps > done:
            raise UsageError(
                f"a cooldown of {count(steps, 'step')} is longer than the run before it: "
                f"{count(done, 'step')}",
                next=command("cooldown", max(1, done // 10), why="or 10%"),
            )
        lr = state.needed("lr", "rewarm").lr
        if lr == 0:  # of the first param group, which may be a frozen one
            lr = max((float(p.value) for p in checkpoint.locate("lr") if p.value), default=0.0)
        if lr is not None and self.to >= lr and not _open_window(state):
            lower = command("cooldown", steps, "--to", f"{lr / 10:g}")
            again = command(
                "set-lr",
                "3e-4",
                "--restart",
                "--warmup",
                "500",
                "--decay",
                "20000",
                why="a new schedule",
            )
            raise UsageError(
                f"the next step's rate is {lr:g}, so it can't go down to {self.to:g}",
                next=lower if lr > 0 else again,
            )
        samples = samples_to(run, recipe, checkpoint, steps)
        settings, warnings = Cools.of(checkpoint).cooldown(
            Decay(steps, samples, self.shape, self.to)
        )
        places = PlaceChanges(run)
        for name, place, value in settings:
            places.put(name, place, value)
        total, end = configured(run, TOTAL), state.step + steps
        if total is not None and total.isdigit() and int(total) < end:
            warnings = [
                *warnings,
                f"the run ends at {TOTAL} {total}, and the cooldown at {end}: relaunch with "
                f"{TOTAL}={end}",
            ]
        return list(places.changes.values()), warnings


def _done(state: State) -> int:
    """The updates so far: where the number of a step counts saves, as Accelerate's does, Adam has
    more."""
    return max(state.step, state.needed("adam_step").adam_step or 0)


def _open_window(state: State) -> bool:
    """Whether a re-warm window keeps the next rate below its schedule."""
    return bool(state.promise.rewarm)


def refuse_both(recipe: Recipe, key: str) -> None:
    """Raise UsageError where `set` gives the schedule another shape in the same surgery."""
    other = [name for name in recipe[Hyperparameters].given() if name in SCHEDULE]
    if other:
        raise UsageError(
            f"both `{key}` and `set` decide {', '.join(other)}",
            next=f"drop {', '.join(other)} from set",
        )


def samples_to(run: Run, recipe: Recipe, checkpoint: Checkpoint, steps: int) -> int | None:
    """The samples that the next `steps` trained iterations take; None where the checkpoint counts
    no samples. Skipped iterations are not counted."""
    settings, skips, state = recipe[Hyperparameters], recipe[Skip], checkpoint.state()
    state.needed("consumed_samples", "batch_size", "rampup", "skip")
    if state.batch_size is None or state.promise.consumed_samples is None:
        if settings.batch_size is not None:
            raise UsageError(
                "`set.batch_size` renumbers the steps that the cooldown counts",
                next="apply a recipe with `set: {batch_size}` alone, and then the other one",
            )
        return None
    first = skips.consumed_after(run, settings, checkpoint)
    return samples_of(
        steps, settings.beginning(state), first, skips.ranges_after(state.promise.skip or ())
    )


# --- commands ------------------------------------------------------------------------------------


def cooldown(
    length: Annotated[
        str,
        typer.Argument(
            metavar="LENGTH", help="Trained iterations, or a share of the whole run: 400, 10%."
        ),
    ],
    section: Cooldown,
) -> Recipe:
    """Let the learning rate decay from this step on.

    The next step keeps the rate that it would have had. Make a fork first if the run is to
    go on as it was.

    Examples:
    ckptsurgeon cooldown 10%
    ckptsurgeon cooldown 4 --shape 1-sqrt --dry-run
    """
    try:
        if length.endswith("%"):
            made = partial(replace, section, percent=float(length[:-1]))
        else:
            made = partial(replace, section, steps=int(length))
    except ValueError:
        raise UsageError(
            f"LENGTH is {length!r}, not iterations or a percentage",
            next=command("cooldown", "400", why="or 10%"),
        ) from None
    try:
        return Recipe(made())
    except UsageError as error:
        if error.what.startswith(("`cooldown.steps`", "`cooldown.percent`")):
            error.what = f"LENGTH is {length}"
        raise


COMMANDS = {"cooldown": cooldown}
