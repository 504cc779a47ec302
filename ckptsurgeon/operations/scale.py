"""Weights and their fp32 masters times a number, as QK-clip does to queries and keys.

Source: Kimi K2 2507.20534, QK-Clip: W_q and W_k times the root of threshold / largest logit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Annotated, ClassVar

import typer

from ckptsurgeon.errors import SurgeryError, UsageError, count
from ckptsurgeon.formats import Checkpoint, Part
from ckptsurgeon.formats.tensors.stretches import Kinds, Parameter, by_parameter, within
from ckptsurgeon.hints import command
from ckptsurgeon.operations import qk_clip
from ckptsurgeon.operations.computed_changes import (
    change,
    matching,
    new_weights,
    refuse_numberless,
    refuse_other_states,
    refuse_second_copies,
    refuse_weightless,
    source,
    with_copies,
)
from ckptsurgeon.operations.key import Key
from ckptsurgeon.operations.qk_clip import QkClip
from ckptsurgeon.operations.reset import Moments, Reset
from ckptsurgeon.operations.section import Changes, Recipe, Section
from ckptsurgeon.plans.edits import Change
from ckptsurgeon.plans.frozen import held
from ckptsurgeon.run.run import Run

POWERS = {"exp_avg": 1, "exp_avg_sq": 2}
"""What becomes of a moment where every gradient is `by` times as large."""


@held
class Scale(Section):
    """The weights of the parameters whose names match `params` become `by` times what they were,
    computed on the fp32 masters and rounded from them; with `qk_clip` the queries and keys of those
    heads whose logits are estimated too large. Moments that are scaled: exp_avg by it, exp_avg_sq
    by its square."""

    key: ClassVar[str] = "scale"
    computes: ClassVar[bool] = True

    params: Annotated[
        str,
        Key(
            "weights and fp32 masters of these parameters times `scale.by`",
            "[REGEX]",
            "Parameters whose names match.",
            pattern=True,
        ),
    ] = ""
    by: Annotated[float | None, Key("multiplier", "--by F", value="number other than 0")] = None
    moments: Annotated[
        str,
        Key(
            "their moments: kept (default), as if every gradient had been `by` times as large, or "
            "zeroed",
            "--moments WHAT",
            "keep, scale or zero their moments.",
            one_of=("keep", "scale", "zero"),
        ),
    ] = "keep"
    qk_clip: QkClip | None = None

    def check(self, recipe: Recipe) -> None:
        if self.qk_clip is not None:
            if self.by is not None:
                raise UsageError(
                    "`scale.by` and `scale.qk_clip` both give the factor", next="drop one of them"
                )
            if self.moments == "zero":
                raise UsageError(
                    "qk_clip scales rows of parameters, and a reset zeroes whole ones",
                    next="moments: keep or scale",
                )
            return
        if self.by is None:
            words = (self.params or "REGEX", "--by", "0.9")
            hint = command("scale", *words, why="in a recipe by: 0.9")
            raise UsageError("`scale.by` is missing", next=hint)
        if not math.isfinite(self.by) or self.by == 0:
            raise UsageError(f"`scale.by` is {self.by}", next="a number other than 0, such as 0.9")
        if not self.params:
            raise UsageError(
                "`scale.params` is missing",
                next=command(
                    "scale", "REGEX", "--by", f"{self.by:g}", why="in a recipe params: REGEX"
                ),
            )

    def title(self, run: Run, step: int) -> list[str]:
        more = "" if self.moments == "keep" else f", {self.moments} moments"
        if self.qk_clip is not None:
            where = f" ({self.params})" if self.params else ""
            return [f"qk-clip at {self.qk_clip.threshold:g}{where}{more}"]
        return [f"scale {self.params} by {self.by:g}{more}"]

    def changes(self, run: Run, recipe: Recipe, checkpoint: Checkpoint) -> Changes:
        parts = checkpoint.parts()
        known = by_parameter(parts)
        refuse_weightless(checkpoint, known)
        refuse_second_copies(run, checkpoint, parts)
        of_weights = ("weights", "master")
        named = {name: kinds for name, kinds in known.items() if kinds.keys() & set(of_weights)}
        nameless = any("exp_avg" in known[name] for name in known.keys() - named.keys())
        having = any("exp_avg" in kinds for kinds in named.values())
        if self.moments == "scale":
            refuse_numberless(checkpoint, "scaled", "moments: keep, or zero")
        if self.moments == "scale" and (nameless or not having):
            raise SurgeryError(
                "the moments of this checkpoint have no names, so those of some parameters can't "
                "be scaled",
                next="moments: keep",
            )
        kept = self.moments != "scale"
        if not kept:
            refuse_other_states(checkpoint, "moments: keep, or zero")
        changes: list[Change] = []
        if self.qk_clip is not None:
            return self._clipped(run, checkpoint, named, self.qk_clip)
        assert self.by is not None
        for kinds in (named[name] for name in matching(named, self.params, "scale.params")):
            changes += _all(run, checkpoint, kinds, self.by, kept)
        every = with_copies(run, checkpoint, changes)
        if self.moments != "zero":
            return every, []
        zeros = Reset(reset=["moments"], moments=Moments(params=self.params))
        reset, warnings = zeros.changes(run, recipe, checkpoint)
        return [*every, *reset], warnings

    def _clipped(
        self, run: Run, checkpoint: Checkpoint, known: Mapping[Parameter, Kinds], clip: QkClip
    ) -> Changes:
        rows, heads = qk_clip.scaled(checkpoint, known, clip, self.params)
        changes: list[Change] = []
        for (name, cut, start, end), by in rows:  # one text for all: a plan shows it once
            part = {k: list(within(s, start, end)) for k, s in known[name, cut].items()}
            changes += _all(run, checkpoint, part, by, self.moments != "scale", "scaled by head")
        if not heads:
            return [], []
        largest = ", ".join(qk_clip.named(heads, clip))
        return with_copies(run, checkpoint, changes), [
            f"{count(len(heads), 'head is', 'heads are')} estimated above {clip.threshold:g}, "
            f"{clip.sigmas:g} times the RMS of their logits for isotropic inputs: {largest}; no "
            "logit was measured"
        ]


def _all(
    run: Run, checkpoint: Checkpoint, kinds: Kinds, by: float, moments_kept: bool, label: str = ""
) -> Iterator[Change]:
    """Weights, masters and, unless they are kept, moments of these stretches; `label` in place of
    the factor."""
    for part in kinds.get("weights", ()):
        masters = kinds.get("master", [part])
        yield new_weights(run, part, [masters], [checkpoint], "scale", (by,), label or f"× {by:g}")
    for part in kinds.get("master", ()):
        yield _scaled(run, checkpoint, part, by, label or f"× {by:g}")
    for kind, power in () if moments_kept else POWERS.items():
        for part in kinds.get(kind, ()):
            yield _scaled(run, checkpoint, part, by**power, label or f"× {by**power:g}")


def _scaled(run: Run, checkpoint: Checkpoint, part: Part, by: float, label: str) -> Change:
    term = (source(run, checkpoint, part.place, part.start, part.end),)
    return change(run, part, "scale", (term,), (by,), label)


# --- commands ------------------------------------------------------------------------------------


def scale(
    section: Scale,
    qk_clip: Annotated[
        float | None,
        typer.Option(
            "--qk-clip",
            metavar="LOGIT",
            help="Instead: queries and keys of heads whose logits are estimated above it.",
        ),
    ] = None,
) -> Recipe:
    """Multiply weights by a number.

    Their fp32 masters with them. --qk-clip finds the heads whose attention logits are too large and
    scales their queries and keys down to the limit. It estimates the logits from the weights alone:
    no data is looked at (docs/recipes.md).

    Examples:
    ckptsurgeon scale query_key_value.weight --by 0.9
    ckptsurgeon scale word_embeddings --by 0.5 --moments scale --dry-run
    ckptsurgeon scale --qk-clip 100 --dry-run
    """
    clip = None if qk_clip is None else QkClip(qk_clip)
    return Recipe(replace(section, qk_clip=clip))


COMMANDS = {"scale": scale}
