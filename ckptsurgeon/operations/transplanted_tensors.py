"""The tensors of a transplant: each element of a step from the same element of another one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from math import prod

from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.files.dtypes import ITEM_BYTES
from ckptsurgeon.formats import Box, Checkpoint, Part
from ckptsurgeon.formats.fields.values import NUMBER
from ckptsurgeon.formats.tensors.geometry import Band, Unknown, gathered
from ckptsurgeon.hints import command
from ckptsurgeon.operations.computed_changes import (
    change,
    refuse_other_states,
    refuse_second_copies,
)
from ckptsurgeon.plans.edits import Change, Computed, relative
from ckptsurgeon.plans.sources import Columns, Source, Woven
from ckptsurgeon.run.run import Run
from ckptsurgeon.transaction.arithmetic import ITEM

Kinds = dict[str, list[Part]]
"""The parts of one parameter by what they are, of all its cuts."""
SHOWN = 3


class Tensors:
    """What becomes of the tensors of `checkpoint`, filled from those of `donor`; `alike` is whether
    both are of one format. Raises SurgeryError where it is not known whose elements are, and for a
    parameter whose moments would come without its weights."""

    def __init__(self, run: Run, checkpoint: Checkpoint, donor: Checkpoint, alike: bool) -> None:
        self._run, self._donor = run, donor
        self._alike = alike
        for each in (checkpoint, donor):
            refuse_other_states(each, next="transplant between optimizers of the same states")
        self._own, self._theirs = _by_name(checkpoint.parts()), _by_name(donor.parts())
        refuse_second_copies(run, checkpoint, [p for k in self._own.values() for p in _all(k)])
        for each, found in ((checkpoint, self._own), (donor, self._theirs)):
            _refuse_numbered(each, found)
        self.fresh = [name for name in self._own if name not in self._theirs]
        """What stays as the new trainer made it."""
        self.left = [name for name in self._theirs if name not in self._own]
        """What the new run has no place for."""
        if len(self.fresh) == len(self._own):
            raise SurgeryError(
                f"no parameter of {checkpoint.path.name} is in {donor.path.name} by its name: "
                f"{next(iter(self._own), 'none')} here, {next(iter(self._theirs), 'none')} there",
                next="transplant between runs of one model, by the same names",
            )

    @property
    def differing(self) -> bool:
        """Whether a parameter of either is not in the other."""
        return bool(self.fresh or self.left)

    def sentences(self) -> list[str]:
        """What is not filled, and what is not taken."""
        out = []
        if self.fresh:
            out.append(
                f"not in the source, and left as the new trainer made it: {_few(self.fresh)}"
            )
        if self.left:
            out.append(f"not in this run, and left behind: {_few(self.left)}")
        return out

    def changes(self) -> list[Change]:
        """One for each stretch of a tensor that is filled."""
        out = []
        for name, kinds in self._own.items():
            for own, theirs in self._pairs(name, kinds) if name in self._theirs else ():
                for part in _all(own):
                    out.append(self._filled(part, theirs))
        return joined(out)

    def _pairs(self, name: str, kinds: Kinds) -> list[tuple[Kinds, Kinds]]:
        """The parts here and in the source that have a box each: of the whole parameter; where it
        is not said which block of that a rank has, rank by rank, if both cut it alike."""
        own, theirs = boxed(kinds), boxed(self._theirs[name])
        if own and theirs:
            return [(own, theirs)]
        mine, others = by_cut(kinds), by_cut(self._theirs[name])
        sizes = [{cut: totals(parts) for cut, parts in each.items()} for each in (mine, others)]
        if self._alike and sizes[0] == sizes[1]:
            return [(boxed(mine[cut]) or {}, boxed(others[cut]) or {}) for cut in mine]
        place = next(_all(kinds)).place
        raise SurgeryError(
            f"{name} in {place.file.name}: which block of it each rank has is not known here",
            next="transplant between runs that cut their parameters alike",
        )

    def _filled(self, part: Part, theirs: Kinds) -> Change:
        name = part.parameter
        kind = _origin(part, theirs)
        if not kind:
            raise SurgeryError(
                f"{name} has {part.kind} in {part.place.file.name}, and the source has none of it",
                next="transplant from a step that was saved with its optimizer",
            )
        for each in theirs[kind]:
            if each.place.value.dtype not in ITEM:
                raise SurgeryError(
                    f"{name}: the {kind} of the source are {each.place.value.dtype}, which can't "
                    "be computed with",
                    next="transplant from an optimizer that keeps floats",
                )
        try:
            terms = [self._term(band) for band in gathered(part, theirs[kind])]
        except Unknown as why:
            raise SurgeryError(
                f"{name} {why}: its {part.kind} in {part.place.file.name} can't be filled",
                next=command("show", why="what each of the two runs has"),
            ) from None
        sources = tuple(source for term in terms for source in term)
        return change(self._run, part, "copy", (sources,), (), LABEL)

    def _term(self, band: Band) -> list[Source | Woven]:
        """The bytes of one band, in files."""
        columns, dtypes = [], [each.place.value.dtype for each in band.columns]
        for each in band.columns:
            item = ITEM_BYTES[each.place.value.dtype]
            last = each.start + (band.rows - 1) * each.stride + each.width
            file, start, _ = self._donor.span(each.place, each.start, last)
            name = relative(file, self._run.root)
            columns.append(Columns(name, start, each.width * item, each.stride * item))
        if band.rows > 1 and (len(columns) > 1 or columns[0].width < columns[0].stride):
            if len(set(dtypes)) > 1:
                raise Unknown(f"has pieces of the types {' and '.join(sorted(set(dtypes)))}")
            end = band.rows * sum(each.width for each in columns)
            return [Woven(tuple(columns), 0, end, dtypes[0])]
        return [
            Source(each.file, each.start, each.start + band.rows * each.width, kind)
            for each, kind in zip(columns, dtypes, strict=True)
        ]


LABEL = "as in the source"


def _by_name(parts: Iterable[Part]) -> dict[str, Kinds]:
    out: dict[str, Kinds] = {}
    for part in parts:
        if part.end > part.start:
            out.setdefault(part.parameter, {}).setdefault(part.kind, []).append(part)
    return out


def _all(kinds: Kinds) -> Iterator[Part]:
    for parts in kinds.values():
        yield from parts


def _refuse_numbered(checkpoint: Checkpoint, found: Mapping[str, Kinds]) -> None:
    """Raise SurgeryError for moments whose parameters have no names: numbers run over the groups of
    one optimizer, and in another one they are those of others."""
    numbered = [name for name in found if name.startswith(NUMBER)]
    if numbered:
        raise SurgeryError(
            f"{checkpoint.path.name} numbers the states of its optimizer, and does not say which "
            f"parameter {numbered[0].removeprefix(NUMBER)} is",
            next="transplant between runs that name their parameters: ZeRO 1 to 3, FSDP, "
            "torch.distributed.checkpoint",
        )
    alone = [name for name, kinds in found.items() if not kinds.keys() & {"weights", "master"}]
    if alone:
        raise SurgeryError(
            f"{checkpoint.path.name} has moments of {alone[0]} and no weights of it that can be "
            "edited",
            next=command("show", why="what the step keeps, and where"),
        )


def _origin(part: Part, theirs: Kinds) -> str:
    """Which kind of the source it comes from; "" where that has none."""
    kind, saved = part.kind, theirs.get("weights", ())
    if kind not in ("weights", "master"):
        return kind if kind in theirs else ""
    if kind == "weights" and any(p.place.value.dtype == part.place.value.dtype for p in saved):
        return "weights"
    return "master" if "master" in theirs else "weights" if saved else ""


# --- which block of a parameter each part is of --------------------------------------------------


def boxed(kinds: Kinds) -> Kinds | None:
    """The parts of a parameter, each with its box. Where a format does not say it, there must be
    one cut, which is all of the parameter; None where there are more."""
    if all(part.box for part in _all(kinds)):
        return kinds
    if len(by_cut(kinds)) > 1:
        return None
    sizes = [part.place.value.size for part in _all(kinds) if _is_whole(part)]
    out: Kinds = {}
    for kind, total in totals(kinds).items():
        size = next((size for size in sizes if prod(size) == total), (total,))
        out[kind] = [part._replace(box=part.box or Box.all(size)) for part in kinds[kind]]
    return out


def by_cut(kinds: Kinds) -> dict[str, Kinds]:
    """Each cut of a parameter as if it were one."""
    out: dict[str, Kinds] = {}
    for part in _all(kinds):
        out.setdefault(part.cut, {}).setdefault(part.kind, []).append(part._replace(box=None))
    return out


def totals(kinds: Kinds) -> dict[str, int]:
    """How many elements a parameter of one cut has of each kind."""
    return {k: max(p.first + p.end - p.start for p in parts) for k, parts in kinds.items()}


def _is_whole(part: Part) -> bool:
    return part.first == 0 and part.end - part.start == part.place.value.numel


def joined(changes: Iterable[Change]) -> list[Change]:
    """Stretches that lie side by side in one tensor as one change, sources that lie side by side as
    one."""
    tensors: dict[tuple[object, ...], list[Change]] = {}
    for each in changes:
        tensors.setdefault((each.file, each.path), []).append(each)
    out: list[Change] = []
    for found in tensors.values():
        found.sort(key=lambda each: each.elements or (0, 0))
        rows = [[found[0]]]
        for before, each in pairwise(found):
            if before.elements and each.elements and before.elements[1] == each.elements[0]:
                rows[-1].append(each)
            else:
                rows.append([each])
        out += map(_one, rows)
    return out


def _one(row: Sequence[Change]) -> Change:
    news = [each.new for each in row if isinstance(each.new, Computed)]
    sources: list[Source | Woven] = []
    for source in (source for new in news for source in new.terms[0]):
        last = sources[-1] if sources else None
        if _follows(last, source):
            assert isinstance(last, Source)
            sources[-1] = replace(last, end=source.end)
        else:
            sources.append(source)
    new = replace(news[0], size=sum(new.size for new in news), terms=(tuple(sources),))
    if len(row) == 1:
        return replace(row[0], new=new)
    first, last_row = row[0].elements, row[-1].elements
    assert first is not None and last_row is not None
    kind = row[0].field.partition(" of ")[0]
    field, ends = f"{kind} of {len(row)} parameters", (first[0], last_row[1])
    return replace(row[0], field=field, new=new, elements=ends)


def _follows(last: Source | Woven | None, source: Source | Woven) -> bool:
    return (
        isinstance(last, Source)
        and isinstance(source, Source)
        and (last.file, last.end, last.dtype) == (source.file, source.start, source.dtype)
    )


def _few(names: Sequence[str]) -> str:
    more = f" … ({len(names)})" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
