"""A step that is saved more than once, in folders: what is done to one is done to each."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.formats import capabilities as can
from ckptsurgeon.formats.checkpoint import Checkpoint
from ckptsurgeon.formats.fields.values import Blob, Conversion, Part, Place, Setting, Strip
from ckptsurgeon.formats.step_folders import files_below
from ckptsurgeon.plans.edits import AnyChange, Append, Change, Content

Arguments = ParamSpec("Arguments")
Answer = TypeVar("Answer")
Method = Callable[Concatenate[Any, Arguments], Answer]


def each(method: Method[Arguments, Answer]) -> Method[Arguments, Answer]:
    """Asked of every one: lists and mappings are joined, and what to warn of is said once."""
    return _asked(method, lambda self, *given: self.each, _joined)


def first(method: Method[Arguments, Answer]) -> Method[Arguments, Answer]:
    """Asked of the first one, which speaks for the step."""
    return _asked(method, lambda self, *given: self.each[:1], lambda answers: answers[0])


def owner(method: Method[Arguments, Answer]) -> Method[Arguments, Answer]:
    """Asked of that one which has the file of the first argument."""
    return _asked(method, lambda self, *given: [self.having(given[0])], lambda answers: answers[0])


def _asked(
    method: Callable[..., Any],
    whom: Callable[..., Sequence[Checkpoint]],
    join: Callable[[list[Any]], Any],
) -> Callable[..., Any]:
    name = method.__name__

    def ask(self: Copied, *given: Any) -> Any:
        return join([getattr(one, name)(*given) for one in whom(self, *given)])

    return ask


def _joined(answers: list[Any]) -> Any:
    if isinstance(answers[0], Mapping):
        return {key: value for answer in answers for key, value in answer.items()}
    if isinstance(answers[0], tuple):  # settings, and what to warn of
        settings = [setting for answer, _ in answers for setting in answer]
        return settings, list(dict.fromkeys(note for _, notes in answers for note in notes))
    return [item for answer in answers for item in answer]


class Copied(
    Checkpoint,
    can.AdjustsGroups,
    can.BoundToRanks,
    can.Converts,
    can.Cools,
    can.CountsMore,
    can.HasArchives,
    can.HasDigests,
    can.HasPadding,
    can.HasReplicas,
    can.HasWeights,
    can.NamesGroups,
    can.NamesMoments,
    can.Ranks,
    can.Rebatches,
    can.Repeats,
):
    """`each` is a whole checkpoint in a folder of its own: a restart may load any of them. It can
    do what each of them can."""

    def __init__(self, each: tuple[Checkpoint, ...]) -> None:
        trees = {file: tree for one in each for file, tree in one.trees.items()}
        archives = {file: archive for one in each for file, archive in one.archives.items()}
        super().__init__(each[0].path, each[0].step, trees, archives)
        self.each = each

    @property
    def unable(self) -> Collection[type]:
        """What one of them lacks; the files that are copies, this knows itself."""
        passed = [kind for kind in Copied.__bases__ if issubclass(kind, can.Capability)]
        lacking = [k for k in passed if any(k.optional(one) is None for one in self.each)]
        return {*lacking} - {can.Repeats}

    def having(self, item: Path | Place | Strip) -> Checkpoint:
        """The one that has the file, or the place, or what is in the strip."""
        if isinstance(item, Strip):
            tensors = [place for place, _ in item.tensors.values()]
            item = (tensors or [codes.place for codes in item.codes.values()])[0]
        file = item.file if isinstance(item, Place) else item
        return next(one for one in self.each if one.path in file.parents)

    @property
    def numbered(self) -> bool:
        """As the first one."""
        return self.each[0].numbered

    # --- of every one ----------------------------------------------------------------------------

    find = each(Checkpoint.find)
    locate = each(Checkpoint.locate)
    settings = each(Checkpoint.settings)
    state_dicts = each(Checkpoint.state_dicts)
    scaler_start = each(Checkpoint.scaler_start)
    rescale = each(Checkpoint.rescale)
    reschedule = each(Checkpoint.reschedule)
    recount = each(Checkpoint.recount)
    globals = each(Checkpoint.globals)
    cooldown = each(can.Cools.cooldown)
    rebatch = each(can.Rebatches.rebatch)
    forget = each(can.Ranks.forget)
    further_counters = each(can.CountsMore.further_counters)
    of_parameters = each(can.NamesGroups.of_parameters)
    fragments = each(can.NamesMoments.fragments)
    digests = each(can.HasDigests.digests)

    # --- of the first one: the others repeat it --------------------------------------------------

    read_state = first(Checkpoint.read_state)
    state = first(Checkpoint.state)
    parts = first(Checkpoint.parts)
    loads_on = first(can.BoundToRanks.loads_on)
    replicas = first(can.HasReplicas.replicas)
    weights = first(can.HasWeights.weights)

    # --- of the one whose place or file it is ----------------------------------------------------

    group_of = owner(Checkpoint.group_of)
    beside = owner(Checkpoint.beside)
    value = owner(Checkpoint.value)
    is_zero = owner(Checkpoint.is_zero)
    span = owner(Checkpoint.span)
    holder = owner(Checkpoint.holder)
    unpadded = owner(can.HasPadding.unpadded)

    # --- more than that --------------------------------------------------------------------------

    def in_group(self, key: str, place: Place, value: Any) -> Any:
        """By the one that has the place."""
        return can.AdjustsGroups.of(self.having(place)).in_group(key, place, value)

    def multiplied(self) -> bool:
        """All alike."""
        return can.AdjustsGroups.of(self.each[0]).multiplied()

    def of_group(self, key: str, place: Place, value: Any) -> list[Setting]:
        """By the one that has the place."""
        return can.NamesGroups.of(self.having(place)).of_group(key, place, value)

    def contradictions(self) -> list[str]:
        """Those of each, and a promise that differs."""
        out = [sentence for one in self.each for sentence in one.contradictions()]
        for one in self.each[1:]:
            try:
                alike = one.state().promise == self.state().promise
            except SurgeryError as error:
                out.append(error.what)
                continue
            if not alike:
                out.append(f"{one.path.name} and {self.path.name} lead to different next steps")
        return out

    def known_parts(self) -> list[Part]:
        """Those of every one: each has cuts of its own."""
        return [
            part._replace(cut=f"{part.cut} of {one.path.name}")
            for one in self.each
            for part in one.known_parts()
        ]

    def blobs(self) -> Iterator[Blob]:
        """Of every one, one after the other: there may be millions."""
        return (blob for one in self.each for blob in can.blobs(one))

    def copies(self) -> Mapping[Path, Path]:
        """Each file of the others that is in the first one too."""
        return {
            file: self.path / file.relative_to(one.path)
            for one in self.each[1:]
            for file in files_below(one.path)
        }

    def conversion(self, to: str) -> Conversion:
        """Of every one; config and launch are those of the first."""
        made = [can.Converts.of(one).conversion(to) for one in self.each]
        settings = tuple(setting for item in made for setting in item.settings)
        names = {file: name for item in made for file, name in item.names.items()}
        return made[0]._replace(settings=settings, names=names)

    def render(
        self, changes: Mapping[str, Sequence[Change]], root: Path
    ) -> dict[str, Append | Content]:
        """Each one its own."""
        out: dict[str, Append | Content] = {}
        for one in self.each:
            mine = {file: own for file, own in changes.items() if self.having(root / file) is one}
            out |= one.render(mine, root)
        return out

    def after(self, changes: Sequence[AnyChange], root: Path) -> Copied:
        """Every one with its own."""
        return Copied(tuple(one.after(changes, root) for one in self.each))
