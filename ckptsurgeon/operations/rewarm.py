"""A window after a reset in which the moments fill while the weights stay, or the rate ramps up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, ClassVar

import typer

from ckptsurgeon.errors import SurgeryError, UsageError, count
from ckptsurgeon.formats import Checkpoint, State
from ckptsurgeon.formats.schedules.rampup import batch_size
from ckptsurgeon.formats.schedules.rewarm import HOLD
from ckptsurgeon.operations.hyperparameters import Hyperparameters
from ckptsurgeon.operations.key import Key
from ckptsurgeon.operations.limits import Limits
from ckptsurgeon.operations.section import Changes, Recipe, Section
from ckptsurgeon.operations.skip import Skip
from ckptsurgeon.plans.edits import Change
from ckptsurgeon.plans.frozen import held
from ckptsurgeon.run.run import Run


@held
class Rewarm(Section):
    """For `iterations` trained iterations the moments fill while the weights stay (`hold`), or the
    rate rises from 0 to its schedule (`ramp`). 0 iterations close a window that is open.

    Only the bundled trainer keeps a window. For another one the error says by which launches
    the same is done, where it can be."""

    key: ClassVar[str] = "rewarm"

    iterations: Annotated[
        int,
        Key(
            "how many trained iterations re-warm after the surgery; 0 ends a window that "
            "is still open",
            limits=Limits(least=0, most=1_000_000_000),
        ),
    ]
    kind: Annotated[
        str,
        Key(
            "`hold` (default): the moments fill at lr 0, weights stay; `ramp`: the rate "
            "rises from 0 to its schedule",
            one_of=("hold", "ramp"),
        ),
    ] = "hold"

    def title(self, run: Run, step: int) -> list[str]:
        if not self.iterations:
            return ["close the rewarm window"]
        return [f"rewarm {self.iterations} ({self.kind})"]

    def changes(self, run: Run, recipe: Recipe, checkpoint: Checkpoint) -> Changes:
        """The window opens at the position of the schedule, the one that the recipe sets if it sets
        one, and ends after `iterations` trained ones; skipped and overflowed ones do not count."""
        places = checkpoint.locate("rewarm")
        state = checkpoint.state()
        state.needed("scheduler", "batch_size", "rampup", "consumed_samples", "skip")
        if not places or state.schedule is None or state.batch_size is None:
            raise _kept_nowhere(run, checkpoint.path.name, state, self)
        settings, skips = recipe[Hyperparameters], recipe[Skip]
        start = int(state.schedule["num_steps"]) if settings.position is None else settings.position
        begin = settings.beginning(state)
        first = skips.consumed_after(run, settings, checkpoint)
        passed = skips.ranges_after(state.promise.skip or ())
        end = start + samples_of(self.iterations, begin, first, passed)
        new = [self.kind, start, end] if self.iterations else []
        changes = [
            Change(run.relative(place.file), "rewarm", place.value, new, place.path)
            for place in places
            if list(place.value) != new
        ]
        return [*changes], _warnings(recipe, checkpoint, self)


def samples_of(iterations: int, state: State, sample: int, skip: Sequence[tuple[int, int]]) -> int:
    """The samples that `iterations` trained iterations after the step of `state` take, the first
    one from `sample` on. Skipped ones move the batch-size ramp-up, and are not counted."""
    full, step, trained = state.batch_size or 0, state.step, 0
    last = state.sizes[-1][0] if state.sizes else 0
    while iterations and (0 < (size := batch_size(state, sample)) < full or sample < last):
        step += 1
        sample += size
        if not any(first <= step <= last for first, last in skip):
            trained += size
            iterations -= 1
    return trained + iterations * full


def _warnings(recipe: Recipe, checkpoint: Checkpoint, section: Rewarm) -> list[str]:
    betas = checkpoint.state().promise.betas
    if not section.iterations or betas is None or section.kind != HOLD:
        return []
    new_beta2 = recipe[Hyperparameters].beta2
    beta2 = betas[1] if new_beta2 is None else new_beta2
    filled = 1.0 - beta2**section.iterations
    if filled >= 0.9:
        return []
    return [
        f"{count(section.iterations, 'held iteration fills', 'held iterations fill')} "
        f"{filled:.0%} of exp_avg_sq at beta2 {beta2:g}; "
        f"{5 / (1 - beta2):.0f} fill 99% (5 / (1 - beta2))"
    ]


def _kept_nowhere(run: Run, name: str, state: State, section: Rewarm) -> SurgeryError:
    until = f"CONSUMED_SAMPLES + {section.iterations} × GLOBAL_BATCH_SIZE"
    consumed = state.promise.consumed_samples
    if consumed is not None and state.batch_size is not None:
        until = str(consumed + samples_of(section.iterations, state, consumed, ()))
    return SurgeryError(
        f"{name} keeps no re-warm window: only the bundled trainer does",
        next=run.format.advise_rewarm(state, section.kind, until, section.iterations),
    )


# --- options of commands -------------------------------------------------------------------------

Hold = Annotated[
    int | None,
    typer.Option(
        "--rewarm",
        metavar="K",
        help="For the first K iterations, update the moments but leave the weights alone.",
    ),
]
Ramp = Annotated[
    int | None,
    typer.Option("--rewarm-ramp", metavar="K", help="Raise the rate from 0 over K iterations."),
]


def window(hold: int | None, ramp: int | None) -> list[Section]:
    """What --rewarm or --rewarm-ramp stands for."""
    if hold is not None and ramp is not None:
        raise UsageError("--rewarm and --rewarm-ramp exclude each other", next="give one of them")
    for option, iterations in (("--rewarm", hold), ("--rewarm-ramp", ramp)):
        if iterations is not None and iterations < 1:
            raise UsageError(
                f"{option} is {iterations}; it must be at least 1",
                next="leave it out; a window that is open is closed by a recipe with "
                "`rewarm: {iterations: 0}`",
            )
    if ramp is not None:
        return [Rewarm(ramp, "ramp")]
    return [] if hold is None else [Rewarm(hold)]
