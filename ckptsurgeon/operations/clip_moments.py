"""The largest entries of exp_avg_sq come down: what people try before a full reset of the moments.

After a spike a few entries are so large that their weights stand still for 3 / (1 - beta2) steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, ClassVar

from ckptsurgeon.errors import SurgeryError, UsageError
from ckptsurgeon.formats import Checkpoint, Part
from ckptsurgeon.formats.tensors.stretches import by_parameter
from ckptsurgeon.hints import command
from ckptsurgeon.operations.computed_changes import (
    change,
    matching,
    refuse_numberless,
    refuse_other_states,
    source,
    with_copies,
)
from ckptsurgeon.operations.key import Key
from ckptsurgeon.operations.limits import Limits
from ckptsurgeon.operations.reset import Reset
from ckptsurgeon.operations.section import Changes, Recipe, Section
from ckptsurgeon.plans.edits import Change
from ckptsurgeon.plans.frozen import held
from ckptsurgeon.plans.sources import Source
from ckptsurgeon.run.run import Run
from ckptsurgeon.transaction.arithmetic import ITEM, floats

SLICE = 1 << 20
"""Elements that are looked at together."""


@held
class ClipMoments(Section):
    """Entries of a parameter's exp_avg_sq above a limit become it. Where one does, exp_avg is
    multiplied by the root of the share that is left, so the next update stays what it was."""

    key: ClassVar[str] = "clip_moments"
    computes: ClassVar[bool] = True

    above: Annotated[
        float | None,
        Key(
            "entries of exp_avg_sq above so many times the median of a parameter's entries other "
            "than 0 become that, and exp_avg shrinks with them, so that the next update stays what "
            "it was",
            "--above F",
            "Times the median of a parameter's entries.",
            limits=Limits(least=1),
        ),
    ] = None
    percentile: Annotated[
        float | None,
        Key(
            "the limit is this percentile of them instead",
            "--percentile P",
            limits=Limits(least=50, below=100),
        ),
    ] = None
    params: Annotated[
        str, Key("only parameters whose names match", "--params REGEX", pattern=True)
    ] = ""

    def check(self, recipe: Recipe) -> None:
        if (self.above is None) == (self.percentile is None):
            raise UsageError(
                "`clip_moments` takes either `above` or `percentile`",
                next=command("clip-moments", "--above", "100", why="in a recipe above: 100"),
            )
        if "moments" in recipe[Reset].reset:
            raise UsageError(
                "both `clip_moments` and `reset` decide the moments", next="drop one of them"
            )

    def title(self, run: Run, step: int) -> list[str]:
        if self.above is not None:
            limit = f"{self.above:g} × the median"
        else:
            limit = f"percentile {self.percentile:g}"
        return [f"clip exp_avg_sq at {limit}{f' ({self.params})' if self.params else ''}"]

    def changes(self, run: Run, recipe: Recipe, checkpoint: Checkpoint) -> Changes:
        refuse_numberless(checkpoint, "clipped", command("reset", "moments"))
        known = by_parameter(checkpoint.parts())
        having = {name: kinds for name, kinds in known.items() if "exp_avg_sq" in kinds}
        if not having:
            raise SurgeryError(f"{checkpoint.path.name} holds no exp_avg_sq", next=command("show"))
        refuse_other_states(checkpoint, command("reset", "moments"), ("momentum_buffer",))
        chosen: dict[str, list[dict[str, list[Part]]]] = {}
        for parameter in matching(having, self.params, "clip_moments.params"):
            chosen.setdefault(parameter[0], []).append(having[parameter])
        changes: list[Change] = []
        for cuts in chosen.values():  # what ranks hold of one parameter has one limit
            parts = [part for kinds in cuts for part in kinds["exp_avg_sq"]]
            entries = _Entries(run, [_source(run, checkpoint, part) for part in parts])
            limit = self._limit(entries)
            for kinds in cuts:
                changes += _clipped(run, checkpoint, kinds, entries, limit)
        return with_copies(run, checkpoint, changes), []

    def _limit(self, entries: _Entries) -> float:
        if self.above is not None:
            return _single(self.above * entries.at(0.5))
        return entries.at((self.percentile or 100.0) / 100)


def _single(value: float) -> float:
    """The float32 that a number is compared as."""
    import numpy

    return float(numpy.float32(value))


def _source(run: Run, checkpoint: Checkpoint, part: Part) -> Source:
    if part.place.value.dtype not in ITEM:
        raise SurgeryError(
            f"{part.parameter}: its exp_avg_sq is {part.place.value.dtype}, and only plain floats "
            "can be clipped",
            next=command("reset", "moments"),
        )
    return source(run, checkpoint, part.place, part.start, part.end)


def _clipped(
    run: Run,
    checkpoint: Checkpoint,
    kinds: dict[str, list[Part]],
    entries: _Entries,
    limit: float,
) -> Iterator[Change]:
    """Of the stretches that have an entry above the limit, both moments."""
    means = {part.first: part for part in kinds.get("exp_avg", ())}
    for part in kinds["exp_avg_sq"]:
        squares = _source(run, checkpoint, part)
        if not limit or entries.largest[squares] <= limit:
            continue
        yield change(run, part, "ceiling", ((squares,),), (limit,), "clipped")
        mean = means.get(part.first)
        if mean is None or mean.end - mean.start != part.end - part.start:
            raise SurgeryError(
                f"{part.parameter}: its exp_avg does not lie beside its exp_avg_sq",
                next=command("reset", "moments"),
            )
        terms = ((_source(run, checkpoint, mean),), (squares,))
        yield change(run, mean, "shrink", terms, (limit,), "with exp_avg_sq")


class _Entries:
    """The numbers of several sources, none below 0: their largest, and those at a share of all that
    are above 0. Read slice by slice, and counted by their bits, which are in their order."""

    def __init__(self, run: Run, sources: Sequence[Source]) -> None:
        import numpy

        self.run, self.sources = run, sources
        self.largest: dict[Source, float] = {}
        self.counts = numpy.zeros(1 << 16, dtype="i8")
        for each in sources:
            top = 0.0
            for values in self._slices(each):
                if values.size and not values.min() >= 0:
                    raise SurgeryError(
                        f"{each.file}: exp_avg_sq has entries that are NaN or below 0",
                        next=command("verify", "--level", "4"),
                    )
                top = max(top, float(values.max(initial=0.0)))
                high = values[values > 0].view("u4") >> 16
                self.counts += numpy.bincount(high, minlength=1 << 16)
            self.largest[each] = top

    def at(self, share: float) -> float:
        """The entry that `share` of those above 0 are not above; 0 if all are 0. Of two in the
        middle the lower one, as in torch.median."""
        import numpy

        total = int(self.counts.sum())
        if not total:
            return 0.0
        rank = max(0, math.ceil(share * total) - 1)
        before = self.counts.cumsum()
        high = int(numpy.searchsorted(before, rank, side="right"))
        rank -= int(before[high - 1]) if high else 0
        counts = numpy.zeros(1 << 16, dtype="i8")
        for each in self.sources:
            for values in self._slices(each):
                bits = values.view("u4")
                inside = (bits[bits >> 16 == high] & 0xFFFF).astype("i8")
                counts += numpy.bincount(inside, minlength=1 << 16)
        low = int(numpy.searchsorted(counts.cumsum(), rank, side="right"))
        return float(numpy.array([high << 16 | low], dtype="u4").view("f4")[0])

    def _slices(self, each: Source) -> Iterator[Any]:
        item = ITEM[each.dtype]
        with (self.run.root / each.file).open("rb") as file:
            file.seek(each.start)
            left = each.end - each.start
            while left:
                data = file.read(min(left, SLICE * item))
                if not data:
                    raise SurgeryError(
                        f"{each.file} shrank while it was being read",
                        next="stop what writes to the run, and try again",
                    )
                left -= len(data)
                yield floats(data, each.dtype).astype("f4")


# --- commands ------------------------------------------------------------------------------------


def clip_moments(section: ClipMoments) -> Recipe:
    """Lower the largest entries of exp_avg_sq.

    What is above the limit becomes it: F times the median of the entries other than 0, or a
    percentile of them. exp_avg shrinks with them, so the next update stays what it was; later
    ones are no longer held down. Weights and steps stay.

    Examples:
    ckptsurgeon clip-moments --above 100
    ckptsurgeon clip-moments --percentile 99.9 --params word_embeddings --dry-run
    """
    return Recipe(section)


COMMANDS = {"clip-moments": clip_moments}
