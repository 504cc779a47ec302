"""The state becomes the mean of several steps: pre-trained model averaging.

Source: Li et al. 2505.12082 (PMA): a run that does not come back from a spike resumes from the
average of the checkpoints before it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import Annotated, Any, ClassVar

from ckptsurgeon.errors import SurgeryError, UsageError, count, share
from ckptsurgeon.formats import MOMENTS, Checkpoint, Part
from ckptsurgeon.formats.capabilities import alike
from ckptsurgeon.formats.tensors.stretches import Kinds, Parameter, by_parameter
from ckptsurgeon.hints import Hint, command
from ckptsurgeon.operations.computed_changes import (
    change,
    new_weights,
    refuse_numberless,
    refuse_other_states,
    refuse_second_copies,
    refuse_weightless,
    source,
    sources_of,
    with_copies,
)
from ckptsurgeon.operations.key import Key
from ckptsurgeon.operations.limits import Limits
from ckptsurgeon.operations.other_step import refuse_incomplete, refuse_unsound
from ckptsurgeon.operations.reset import Reset
from ckptsurgeon.operations.section import Changes, Recipe, Section
from ckptsurgeon.plans.edits import Change
from ckptsurgeon.plans.frozen import held
from ckptsurgeon.run.run import Run

Parameters = Mapping[Parameter, Kinds]


@held
class Average(Section):
    """Masters and weights of the step that is edited become the mean of several: that of the fp32
    masters, and the weights are rounded from it. Counters and schedule stay."""

    key: ClassVar[str] = "average"
    computes: ClassVar[bool] = True

    steps: Annotated[
        list[str],
        Key(
            "weights and fp32 masters of the edited step become their mean; all of one layout",
            "[STEP]...",
            "The steps of the mean.",
            value="list of steps",
        ),
    ] = field(default_factory=list)
    last: Annotated[
        int | None,
        Key(
            "the newest N saved steps up to the edited one instead",
            "--last N",
            limits=Limits(least=2),
        ),
    ] = None
    weights: Annotated[
        list[str],
        Key("how much each of `steps` counts; equal if not given", value="list of numbers"),
    ] = field(default_factory=list)
    moments: Annotated[
        str,
        Key(
            "those of the edited step (default), their mean, or a reset",
            "--moments WHAT",
            "last, average or zero; last if not given.",
            one_of=("last", "average", "zero"),
        ),
    ] = "last"

    def check(self, recipe: Recipe) -> None:
        if bool(self.steps) == (self.last is not None):
            raise UsageError(
                "`average` takes either `steps` or `last`",
                next=command("average", "--last", "3", why="in a recipe last: 3"),
            )
        numbers = self._numbers("steps", self.steps, int)
        if self.steps and len(set(numbers)) < 2:
            raise UsageError(
                "`average.steps` needs two different steps",
                next=command("average", "--last", "2", why="in a recipe last: 2"),
            )
        shares = self._numbers("weights", self.weights, float)
        if shares and (len(shares) != len(self.steps) or sum(shares) <= 0 or min(shares) < 0):
            raise UsageError(
                f"`average.weights` is {self.weights}",
                next="one for each of `steps`, none below 0, and not all 0",
            )
        if "moments" in recipe[Reset].reset:
            raise UsageError("both `average` and `reset` decide the moments", next="moments: zero")

    def _numbers(self, key: str, texts: Sequence[str], kind: type) -> list[float]:
        numbers = []
        for text in texts:
            try:
                number = kind(text)
                finite = math.isfinite(number)
            except (ValueError, OverflowError):
                finite = False
            if not finite:
                hint: Hint = command("average", "--last", "2", why="in a recipe last: 2")
                if key == "weights":
                    hint = "weights: a number for each of `steps`"
                raise UsageError(f"`average.{key}` is {text!r}, and no number", next=hint)
            numbers.append(number)
        return numbers

    def reads(self, run: Run, step: int) -> list[Path]:
        return sources_of(run, self.steps_at(run, step))

    def steps_at(self, run: Run, step: int) -> list[int]:
        """The steps of the mean. Raises UsageError for one that is not saved, or not complete."""
        if self.last is None:
            steps = [int(text) for text in self.steps]
        else:
            steps = [other for other in run.steps() if other <= step][-self.last :]
            if len(steps) < self.last:
                raise UsageError(
                    f"the average is of {count(self.last, 'step')}, and of those up to {step} are "
                    f"saved: {len(steps)}",
                    next=command("status", why="list the saved steps"),
                )
        for other in steps:
            refuse_incomplete(run, other)
        return steps

    def title(self, run: Run, step: int) -> list[str]:
        steps = ", ".join(map(str, self.steps_at(run, step)))
        return [f"average steps {steps} ({self.moments} moments)"]

    def changes(self, run: Run, recipe: Recipe, checkpoint: Checkpoint) -> Changes:
        steps = self.steps_at(run, checkpoint.step)
        opened = [
            checkpoint if s == checkpoint.step else alike(run.checkpoint(s), checkpoint)
            for s in steps
        ]
        for other in opened:
            refuse_unsound(other)
        mine = checkpoint.parts()
        own = by_parameter(mine)
        refuse_weightless(checkpoint, own)
        refuse_second_copies(run, checkpoint, mine)
        if self.moments == "average":
            refuse_numberless(checkpoint, "averaged", "moments: last, or zero")
            refuse_other_states(checkpoint, "moments: last, or zero")
        all_parts = [own if o is checkpoint else by_parameter(o.parts()) for o in opened]
        for other, theirs in zip(opened, all_parts, strict=True):
            _refuse_other_layout(checkpoint.step, own, other.step, theirs)
        shares = tuple(float(text) for text in self.weights) or (1.0,) * len(steps)
        label = f"mean of steps {', '.join(map(str, steps))}"
        changes: list[Change] = []
        for parameter, kinds in own.items():
            for i, part in enumerate(kinds.get("weights", ())):
                masters = [
                    each["master"] if "master" in kinds else [each["weights"][i]]
                    for each in (parts[parameter] for parts in all_parts)
                ]
                changes.append(new_weights(run, part, masters, opened, "mean", shares, label))
            averaged = ("master", *(MOMENTS if self.moments == "average" else ()))
            for kind in averaged:
                for i, part in enumerate(kinds.get(kind, ())):
                    terms = tuple(
                        (source(run, of, p.place, p.start, p.end),)
                        for of, p in zip(
                            opened, (parts[parameter][kind][i] for parts in all_parts), strict=True
                        )
                    )
                    changes.append(change(run, part, "mean", terms, shares, label))
        every = with_copies(run, checkpoint, changes)
        if self.moments != "zero":
            return every, []
        reset, warnings = Reset(reset=["moments"]).changes(run, recipe, checkpoint)
        return [*every, *reset], warnings


def _refuse_other_layout(step: int, own: Parameters, other_step: int, other: Parameters) -> None:
    """Raise SurgeryError unless both steps keep the same parameters, cut in the same way. The dtype
    of weights that have masters is each step's own: nothing is computed of them."""
    mine, theirs = _layout(own), _layout(other)
    if mine == theirs:
        return
    differing = [key for key in {**mine, **theirs} if mine.get(key) != theirs.get(key)]
    name, _ = differing[0]
    here, there = mine.get(differing[0], []), theirs.get(differing[0], [])
    raise SurgeryError(
        f"steps {step} and {other_step} are kept differently: "
        f"{share(len(differing), len(mine), 'parameter')}, the first {name}: "
        f"{_told(here, there)} in {step}, {_told(there, here)} in {other_step}",
        next="average steps that the same model saved at the same sizes and precision",
    )


def _told(layout: list[tuple[Any, ...]], other: list[tuple[Any, ...]]) -> str:
    """What is kept of a parameter in one step and not so in the other."""
    only = [each for each in layout if each not in other]
    words = [f"{kind} {dtype} {list(size)}" for kind, *_, dtype, size in only]
    return ", ".join(words) or ("less" if layout else "absent")


def _layout(parameters: Parameters) -> dict[Parameter, Any]:
    return {
        key: [
            (p.kind, p.start, p.end, p.first, _computed_dtype(p, kinds), p.place.value.size)
            for _, stretches in sorted(kinds.items())  # writers with threads save in any order
            for p in stretches
        ]
        for key, kinds in parameters.items()
    }


def _computed_dtype(part: Part, kinds: Kinds) -> str:
    """What the mean is taken of, or "" for weights that are rounded from masters."""
    rounded = part.kind == "weights" and "master" in kinds
    return "" if rounded else str(part.place.value.dtype)


# --- commands ------------------------------------------------------------------------------------


def average(section: Average) -> Recipe:
    """Make weights the mean of several steps.

    The mean is of the fp32 masters, in whatever dtype the weights of a step are; the weights are
    rounded from it. What is edited is the latest step, or the one that a rollback goes to. Its
    moments, counters and schedule stay unless --moments says otherwise.

    Examples:
    ckptsurgeon average --last 3
    ckptsurgeon average 4 6 8 --moments average --dry-run
    """
    return Recipe(section)


COMMANDS = {"average": average}
