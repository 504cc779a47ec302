"""Where each stretch of a transplant is read: which bytes of the source's files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.files.dtypes import ITEM_BYTES
from ckptsurgeon.formats import Checkpoint, Part
from ckptsurgeon.formats.tensors.blocks import Kinds, every
from ckptsurgeon.formats.tensors.geometry import Band, Found, Turned, Unknown
from ckptsurgeon.hints import command
from ckptsurgeon.operations.computed_changes import change, source
from ckptsurgeon.operations.transplanted_codes import FLOATS, Meanings, decoded, pieces
from ckptsurgeon.plans.edits import Change, Computed, relative
from ckptsurgeon.plans.sources import Columns, Decoded, Numbers, Plain, Source, Woven
from ckptsurgeon.run.run import Run
from ckptsurgeon.transaction.arithmetic import ITEM

HELD = frozenset(("weights", "master"))
"""What the model is made of: of either, the other one can be made."""
LABEL = "as in the source"
RUNS = 1 << 16
"""Of codes that are cut otherwise than here: each is an entry of the receipt."""


class Stretches:
    """Of a step of `run`, filled from `donor`; `own` and `theirs` say which tensors of either are
    codes."""

    def __init__(self, run: Run, donor: Checkpoint, own: Meanings, theirs: Meanings) -> None:
        self._run, self._donor = run, donor
        self._own, self._theirs = own, theirs

    def filled(self, own: Kinds, theirs: Kinds, turned: bool = False) -> Iterator[Change]:
        """A change for each part, all of which are of one parameter; `turned` is whether it is
        transposed in the source."""
        origins: dict[str, list[Part]] = {}
        for part in every(own):
            origins.setdefault(read_as(part, theirs), []).append(part)
        for kind, parts in origins.items():
            for each in theirs[kind]:
                coded, dtype = (each.place.file, each.place.path) in self._theirs, _dtype(each)
                if not coded and dtype not in ITEM and {dtype} != {*map(_dtype, parts)}:
                    raise SurgeryError(
                        f"{parts[0].parameter}: the {kind} of the source are "
                        f"{dtype}, which can't be computed with",
                        next="transplant from an optimizer that keeps floats",
                    )
            found = Turned(theirs[kind]) if turned else Found(theirs[kind], parts)
            for part in parts:
                yield self._from(part, found)

    def _from(self, part: Part, found: Found | Turned) -> Change:
        try:
            terms = [self._term(band) for band in found.gathered(part)]
        except Unknown as why:
            raise SurgeryError(
                f"{part.parameter} {why}: its {part.kind} in {part.place.file.name} can't be "
                "filled",
                next=command("show", why="what each of the two runs has"),
            ) from None
        sources = tuple(source for term in terms for source in term)
        coded = (part.place.file, part.place.path) in self._own
        if not coded and _dtype(part) in ITEM:
            return change(self._run, part, "copy", (sources,), (), LABEL)
        dtype = FLOATS if coded else _dtype(part)
        size = (part.end - part.start) * ITEM_BYTES[dtype]
        new = Computed("copy", dtype, size, (sources,), label=LABEL)
        file, field = self._run.relative(part.place.file), f"{part.kind} of {part.parameter}"
        return Change(file, field, "values", new, part.place.path, (part.start, part.end))

    def _term(self, band: Band) -> list[Plain]:
        """The bytes of one band, in files."""
        if any((each.place.file, each.place.path) in self._theirs for each in band.columns):
            return self._decoded(band)
        columns, dtypes = [], [each.place.value.dtype for each in band.columns]
        for each in band.columns:
            item = ITEM_BYTES[each.place.value.dtype]
            last = each.start + (band.rows - 1) * each.stride + each.width
            last += (each.cells - 1) * each.step
            file, start, _ = self._donor.span(each.place, each.start, last)
            name = relative(file, self._run.root)
            rows = start, each.width * item, each.stride * item, each.cells, each.step * item
            columns.append(Columns(name, *rows))
        apart = len(columns) > 1 or columns[0].width < columns[0].stride
        if (band.rows > 1 and apart) or any(each.cells > 1 for each in columns):
            if len(set(dtypes)) > 1:
                raise Unknown(f"has pieces of the types {' and '.join(sorted(set(dtypes)))}")
            end = band.rows * sum(each.row for each in columns)
            return [Woven(tuple(columns), 0, end, dtypes[0])]
        return [
            Source(each.file, each.start, each.start + band.rows * each.width, kind)
            for each, kind in zip(columns, dtypes, strict=True)
        ]

    def _decoded(self, band: Band) -> list[Plain]:
        """The numbers of one band, of which some are kept as codes: each run of them for itself."""
        if band.rows * sum(each.cells for each in band.columns) > RUNS:
            raise Unknown("has codes of 8 bits in the source, and is cut otherwise here")
        found: list[Plain] = []
        for row in range(band.rows):
            for each in band.columns:
                codes = self._theirs.get((each.place.file, each.place.path))
                for start, end in pieces(each, row):
                    if codes is None:
                        found.append(source(self._run, self._donor, each.place, start, end))
                    else:
                        found.append(decoded(self._run, self._donor, codes, start, end))
        return found


def _dtype(part: Part) -> str:
    return str(part.place.value.dtype)


def read_as(part: Part, theirs: Kinds) -> str:
    """Which kind of the source it comes from: a weight of another type is rounded from the
    master."""
    kind, saved = part.kind, theirs.get("weights", ())
    if kind not in HELD:
        return kind
    if kind == "weights" and any(p.place.value.dtype == part.place.value.dtype for p in saved):
        return "weights"
    return "master" if "master" in theirs else "weights"


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
    sources: list[Numbers] = []
    for term in (term for new in news for term in new.terms[0]):
        last = sources[-1] if sources else None
        if last is not None and _follows(last, term):
            sources[-1] = replace(last, end=term.end)
        else:
            sources.append(term)
    new = replace(news[0], size=sum(new.size for new in news), terms=(tuple(sources),))
    if len(row) == 1:
        return replace(row[0], new=new)
    first, last_row = row[0].elements, row[-1].elements
    assert first is not None and last_row is not None
    kind = row[0].field.partition(" of ")[0]
    return replace(row[0], field=kind, new=new, elements=(first[0], last_row[1]))


def _follows(last: Numbers, source: Numbers) -> bool:
    if not isinstance(last, (Source, Decoded)) or last.end != source.start:
        return False
    return replace(last, start=source.start, end=source.end) == source
