"""Moments of another step, under weights that stay: Adam's state from before it went wrong.

Source: Marin, docs/reports/marin-32b-retro.md, where optimizer state was rebuilt offline.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, ClassVar

import typer

from ckptsurgeon.errors import SurgeryError, UsageError, count
from ckptsurgeon.files.dtypes import ITEM_BYTES
from ckptsurgeon.files.expressions import matching
from ckptsurgeon.files.pickles.tree import Tensor
from ckptsurgeon.formats import Checkpoint, Part, Place
from ckptsurgeon.formats.capabilities import NamesMoments, alike, copies
from ckptsurgeon.formats.optimizers.table import STEPS, changing, recognise
from ckptsurgeon.formats.places.moments import ALL, NUMBERED
from ckptsurgeon.formats.tensors.stretches import pieces
from ckptsurgeon.hints import command
from ckptsurgeon.operations.computed_changes import source, sources_of, with_copies
from ckptsurgeon.operations.key import Key, unknown_value
from ckptsurgeon.operations.known_optimizer import knowing
from ckptsurgeon.operations.limits import COUNT
from ckptsurgeon.operations.other_step import refuse_incomplete, refuse_unsound
from ckptsurgeon.operations.section import Changes, Recipe, Section
from ckptsurgeon.plans.edits import Change, Computed
from ckptsurgeon.plans.frozen import held
from ckptsurgeon.run.other import open_other
from ckptsurgeon.run.run import Run


@held
class Graft(Section):
    """exp_avg, exp_avg_sq and Adam's step become those of another step; masters and weights stay.
    With `only` or `params` the step, which others share, stays as well."""

    key: ClassVar[str] = "graft"
    computes: ClassVar[bool] = True

    step: Annotated[
        int,
        Key(
            "exp_avg, exp_avg_sq and Adam's step become those of it; weights and masters stay",
            "--from STEP",
            "Source step.",
            value="step",
            limits=COUNT,
        ),
    ]
    run: Annotated[str, Key("another run of the same layout", "--of DIR", value="folder")] = ""
    only: Annotated[
        str, Key("only this moment; Adam's step stays", "--only exp_avg", one_of=("exp_avg",))
    ] = ""
    params: Annotated[
        str,
        Key("only parameters whose names match; Adam's step stays", "--params REGEX", pattern=True),
    ] = ""

    def check(self, recipe: Recipe) -> None:
        if self.only == "exp_avg_sq":
            raise UsageError(
                "exp_avg_sq can't be grafted alone: the exp_avg that stays may be many times its "
                "root, and so would the next updates be",
                next="graft moments, or graft moments --only exp_avg",
            )

    def reads(self, run: Run, step: int) -> list[Path]:
        return sources_of(self._donor(run), [self.step])

    def _donor(self, run: Run) -> Run:
        """The run that the moments come from. Raises UsageError where its step is not complete."""
        donor = open_other(run, self.run) if self.run else run
        refuse_incomplete(donor, self.step, self.run)
        return donor

    def title(self, run: Run, step: int) -> list[str]:
        part = " ".join(item for item in (self.only, self.params) if item)
        where = f" of {self.run}" if self.run else ""
        return [f"graft the moments of step {self.step}{where}{f' ({part})' if part else ''}"]

    def changes(self, run: Run, recipe: Recipe, checkpoint: Checkpoint) -> Changes:
        checkpoint = knowing(run, checkpoint)
        donor_run = self._donor(run)
        if donor_run.root == run.root and self.step == checkpoint.step:
            raise UsageError(
                f"step {self.step} is the step that is edited",
                next=command("status", why="list the other steps"),
            )
        donor = alike(donor_run.checkpoint(self.step), checkpoint)
        refuse_unsound(donor, self.run)
        _refuse_more(checkpoint)
        names = (self.only,) if self.only else ALL
        changes: list[Change] = []
        if self.params:
            changes += self._of_parameters(run, checkpoint, donor, names)
        else:
            for name in names:
                own, theirs = _tensors(checkpoint, name), _tensors(donor, name)
                pairs = _pairs(name, own, theirs)
                changes += (self._copied(run, name, donor, *pair, None) for pair in pairs)
        if not changes:
            raise SurgeryError(f"{checkpoint.path.name} holds no moments", next=command("show"))
        if self.only or self.params:
            shared = "Adam's step is shared and stays, so the bias correction is its own"
            return with_copies(run, checkpoint, changes), [shared]
        changes += _steps(run, checkpoint, donor)
        return with_copies(run, checkpoint, changes), []

    def _of_parameters(
        self, run: Run, checkpoint: Checkpoint, donor: Checkpoint, names: tuple[str, ...]
    ) -> Iterator[Change]:
        of_name = {
            name: [
                sorted(self._named(each, name), key=lambda part: (_order(part.place), part.start))
                for each in (checkpoint, donor)
            ]
            for name in names
            if checkpoint.locate(name)
        }
        known = (part.parameter for own, _ in of_name.values() for part in own)
        chosen = matching(self.params, known, "graft.params")
        for name, (own, theirs) in of_name.items():
            pairs = _pairs(name, [f.place for f in own], [f.place for f in theirs])
            for mine, other, pair in zip(own, theirs, pairs, strict=True):
                if (mine.parameter, mine.start, mine.end) != (
                    other.parameter, other.start, other.end,
                ):  # fmt: skip
                    raise _other_layout(name)
                if mine.parameter in chosen and mine.start < mine.end:
                    field = f"{name} of {mine.parameter}"
                    yield self._copied(run, field, donor, *pair, (mine.start, mine.end))

    def _named(self, checkpoint: Checkpoint, name: str) -> list[Part]:
        """The tensors of the moment `name` with their parameters. Raises SurgeryError where it is
        not said whose they are, with the graft of all."""
        try:
            return _fragments(checkpoint, name)
        except SurgeryError as error:
            if error.hints == (NamesMoments.instead,):
                options = (("--of", self.run), ("--only", self.only))
                more = [word for option in options if option[1] for word in option]
                whole = ("graft", "moments", "--from", self.step, *more)
                error.hints = (command(*whole, why="of all parameters"),)
            raise

    def _copied(
        self,
        run: Run,
        field: str,
        donor: Checkpoint,
        place: Place,
        other: Place,
        elements: tuple[int, int] | None,
    ) -> Change:
        tensor = place.value
        start, end = elements or (0, tensor.numel)
        term = (source(run, donor, other, start, end),)
        size = (end - start) * ITEM_BYTES[tensor.dtype]
        new = Computed("copy", tensor.dtype, size, (term,), label=f"as at step {self.step}")
        file = run.relative(place.file)
        return Change(file, field, "values", new, place.path, elements)


def _places(checkpoint: Checkpoint, field: str) -> list[Place]:
    """In the shards of the step, but not in copies of them."""
    repeated = copies(checkpoint)
    return [place for place in checkpoint.locate(field) if place.file not in repeated]


def _tensors(checkpoint: Checkpoint, name: str) -> list[Place]:
    """Those of the moment `name` as they are saved, in chunks."""
    return [piece for place in _places(checkpoint, name) for piece in pieces(place)]


def _fragments(checkpoint: Checkpoint, name: str) -> list[Part]:
    """The same, with the parameter of each."""
    repeated = copies(checkpoint)
    return [
        part if piece is part.place else Part.whole(part.parameter, part.cut, name, piece)
        for part in NamesMoments.of(checkpoint).fragments(name)
        if part.place.file not in repeated
        for piece in pieces(part.place)
    ]


def _pairs(name: str, own: list[Place], theirs: list[Place]) -> list[tuple[Place, Place]]:
    """The tensors of both steps that are at the same place. Raises SurgeryError for others."""
    own, theirs = (
        sorted((p for p in places if isinstance(p.value, Tensor)), key=_order)
        for places in (own, theirs)
    )
    mine, others = ([_shape(place) for place in places] for places in (own, theirs))
    if mine != others:
        raise _other_layout(name, _difference(mine, others))
    return list(zip(own, theirs, strict=True))


def _order(place: Place) -> list[str]:
    """By the path: `.metadata` lists values in another order in each step. The files of ranks keep
    theirs."""
    return [str(key) for key in place.path]


def _shape(place: Place) -> tuple[Any, ...]:
    return place.path, place.value.dtype, place.value.size


def _difference(own: list[tuple[Any, ...]], theirs: list[tuple[Any, ...]]) -> str:
    """The first tensor that is another in the other step, or only in one of the two."""
    for mine, other in zip(own, theirs, strict=False):
        if mine != other:
            path, label = ".".join(map(str, mine[0])), f"{mine[1]} {list(mine[2])}"
            there = f"{other[1]} {list(other[2])}" if mine[0] == other[0] else "absent"
            return f"{path} is {label} here and {there} there"
    return f"{count(len(own), 'tensor')} here and {len(theirs)} there"


def _other_layout(name: str, difference: str = "") -> SurgeryError:
    more = f": {difference}" if difference else ""
    return SurgeryError(
        f"{name} is split or stored differently in the two steps{more}",
        next="graft from a step that the same model saved at the same parallel sizes",
    )


def _steps(run: Run, checkpoint: Checkpoint, donor: Checkpoint) -> Iterator[Change]:
    own, theirs = (sorted(_places(each, "adam_step"), key=_order) for each in (checkpoint, donor))
    if [place.path for place in own] != [place.path for place in theirs]:
        raise _other_layout("Adam's step")
    for place, other in zip(own, theirs, strict=True):
        value = type(place.value)(other.value)
        yield Change(run.relative(place.file), "adam step", place.value, value, place.path)


def _refuse_more(checkpoint: Checkpoint) -> None:
    """Refuse an optimizer that keeps more than moments and a step: that would be of two steps."""
    for each in checkpoint.state_dicts():
        known = recognise(each, checkpoint.known)
        more = changing(each, known, {*ALL, *NUMBERED, *STEPS})
        if more := [*more, *each.beside]:
            raise SurgeryError(
                f"{each.file.name}: {known.name} keeps {', '.join(more)} beside the moments, and "
                "they would stay those of another step",
                next="roll back to the step whose optimizer state is wanted",
            )


# --- commands ------------------------------------------------------------------------------------


def graft(
    what: Annotated[str, typer.Argument(metavar="moments", help="What to graft.")],
    section: Graft,
) -> Recipe:
    """Take the moments of another step.

    exp_avg, exp_avg_sq and Adam's step; weights and fp32 masters stay.

    Examples:
    ckptsurgeon graft moments --from 6
    ckptsurgeon graft moments --from 6 --params word_embeddings --dry-run
    """
    if what != "moments":
        raise unknown_value(what, ("moments",), "graft")
    return Recipe(section)


COMMANDS = {"graft": graft}
