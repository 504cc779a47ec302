"""Weights and their fp32 masters times a number, as QK-clip does to queries and keys.

Source: Kimi K2 2507.20534, QK-Clip: W_q and W_k times the root of threshold / largest logit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import typer

from ckptsurgeon.edits import Change
from ckptsurgeon.errors import SurgeryError, UsageError
from ckptsurgeon.formats import Checkpoint, Part
from ckptsurgeon.operations.computed_changes import (
    by_parameter,
    change,
    matching,
    new_weights,
    refuse_weightless,
    source,
    with_copies,
)
from ckptsurgeon.operations.reset import Moments, Reset
from ckptsurgeon.operations.section import (
    Changes,
    Recipe,
    Section,
    check_pattern,
    given,
    unknown_value,
)
from ckptsurgeon.run.run import Run

MOMENTS = ("keep", "scale", "zero")
POWERS = {"exp_avg": 1, "exp_avg_sq": 2}
"""What becomes of a moment where every gradient is `by` times as large."""


@dataclass(frozen=True)
class Scale(Section):
    """The weights of the parameters whose names match `params` become `by` times what they were,
    computed on the fp32 masters and rounded from them. `moments` are kept, scaled as if every
    gradient had been `by` times as large (exp_avg by it, exp_avg_sq by its square), or zeroed."""

    key: ClassVar[str] = "scale"

    params: str
    by: float
    moments: str = "keep"

    def check(self, recipe: Recipe) -> None:
        check_pattern("scale.params", self.params)
        if not math.isfinite(self.by) or self.by == 0:
            raise UsageError(f"`scale.by` is {self.by}", next="a number other than 0, such as 0.9")
        if self.moments not in MOMENTS:
            raise unknown_value(self.moments, MOMENTS, "scale.moments")

    def title(self, run: Run, step: int) -> list[str]:
        more = "" if self.moments == "keep" else f", {self.moments} moments"
        return [f"scale {self.params} by {self.by:g}{more}"]

    def changes(self, run: Run, recipe: Recipe, checkpoint: Checkpoint) -> Changes:
        known = by_parameter(checkpoint.parts())
        refuse_weightless(checkpoint, known)
        of_weights = ("weights", "master")
        named = {name: kinds for name, kinds in known.items() if kinds.keys() & set(of_weights)}
        chosen = matching(named, self.params, "scale.params")
        nameless = any("exp_avg" in known[name] for name in known.keys() - named.keys())
        having = any("exp_avg" in kinds for kinds in named.values())
        if self.moments == "scale" and (nameless or not having):
            raise SurgeryError(
                "the moments of this checkpoint have no names, so those of some parameters can't "
                "be scaled",
                next="moments: keep",
            )
        changes: list[Change] = []
        for kinds in (named[name] for name in chosen):
            for part in kinds.get("weights", ()):
                masters = kinds.get("master", [part])
                new = new_weights(
                    run, part, [masters], [checkpoint], "scale", (self.by,), f"× {self.by:g}"
                )
                changes.append(new)
            for part in kinds.get("master", ()):
                changes.append(_scaled(run, checkpoint, part, self.by))
            for kind, power in POWERS.items() if self.moments == "scale" else ():
                for part in kinds.get(kind, ()):
                    changes.append(_scaled(run, checkpoint, part, self.by**power))
        every = with_copies(run, checkpoint, changes)
        if self.moments != "zero":
            return every, []
        zeros = Reset(reset=["moments"], moments=Moments(params=self.params))
        reset, warnings = zeros.changes(run, recipe, checkpoint)
        return [*every, *reset], warnings


def _scaled(run: Run, checkpoint: Checkpoint, part: Part, by: float) -> Change:
    term = (source(run, checkpoint, part.place, part.start, part.end),)
    return change(run, part, "scale", (term,), (by,), f"× {by:g}")


# --- commands ------------------------------------------------------------------------------------


def scale(
    params: Annotated[str, typer.Argument(metavar="REGEX", help="Parameters whose names match.")],
    by: Annotated[float, typer.Option("--by", metavar="F", help="What their weights are times.")],
    moments: Annotated[
        str | None,
        typer.Option("--moments", metavar="WHAT", help="keep, scale or zero their moments."),
    ] = None,
) -> dict[str, Any]:
    """Multiply weights by a number.

    Their fp32 masters with them.

    Examples:
    ckptsurgeon scale query_key_value.weight --by 0.9
    ckptsurgeon scale word_embeddings --by 0.5 --moments scale --dry-run
    """
    return {"scale": given(params=params, by=by, moments=moments)}


SECTIONS = (Scale,)
COMMANDS = {"scale": scale}
