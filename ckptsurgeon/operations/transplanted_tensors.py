"""The tensors of a transplant: each element of a step from the same element of another one."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from itertools import pairwise

from ckptsurgeon.errors import SurgeryError, first_few
from ckptsurgeon.files.dtypes import ITEM_BYTES
from ckptsurgeon.formats import Checkpoint, Part
from ckptsurgeon.formats.capabilities import HasHeads, SavesWeightsTwice
from ckptsurgeon.formats.places.json_beside import transformers_config
from ckptsurgeon.formats.tensors.blocks import (
    Kinds,
    boxed,
    by_cut,
    every,
    first_rows,
    shape,
    totals,
    unstacked,
)
from ckptsurgeon.formats.tensors.geometry import Band, Found, Unknown
from ckptsurgeon.formats.tensors.row_order import Order, Section, in_one_order
from ckptsurgeon.hints import command
from ckptsurgeon.operations.computed_changes import (
    change,
    refuse_other_states,
    refuse_second_copies,
)
from ckptsurgeon.operations.numbered_parameters import order_in, with_names
from ckptsurgeon.operations.parameter_names import PAGE, Names, Origin, Size
from ckptsurgeon.plans.edits import Change, Computed, relative
from ckptsurgeon.plans.sources import Columns, Source, Woven
from ckptsurgeon.run.run import Run
from ckptsurgeon.transaction.arithmetic import ITEM

VOCABULARY = re.compile(r"embed|wte|vocab|lm_head|(^|\.)(output|head)\.weight$")
"""The name of a parameter with a row for each token."""


HELD = frozenset(("weights", "master"))
"""What the model is made of: of either, the other one can be made."""


class Tensors:
    """What becomes of the tensors of `checkpoint`, filled from those of `donor`: `alike` is whether
    both are of one format, `names` what a parameter of the source is called here, and `order` the
    names of those that are numbered. Raises SurgeryError where it is not known whose elements are,
    and for a parameter whose moments would come without its weights."""

    def __init__(
        self,
        run: Run,
        checkpoint: Checkpoint,
        donor: Checkpoint,
        alike: bool,
        names: Names,
        order: Sequence[str],
    ) -> None:
        self._run, self._checkpoint, self._donor = run, checkpoint, donor
        self.alike, self._names = alike, names
        for each in (checkpoint, donor):
            refuse_other_states(each, next="transplant between optimizers of the same states")
        own, theirs = _parts(checkpoint), _parts(donor)
        refuse_second_copies(run, checkpoint, own)
        self.order = order or (order_in(donor) if alike else [])
        """The names of the parameters that are numbered here, and in the source."""
        self.their_order = order or (order_in(checkpoint) if alike else [])
        self._own = with_names(checkpoint, own, self.order)
        self._theirs = with_names(donor, theirs, self.their_order)
        self._origins = names.origins(self._theirs, self._own)
        self.fresh = [name for name in self._own if name not in self._origins]
        """What stays as the new trainer made it."""
        ways = [way for ways in self._origins.values() for way in ways]
        used = {source for way in ways for source in way.sources}
        self.left = [name for name in self._theirs if name not in used]
        """What the new run has no place for."""
        self.grown: list[str] = []
        """What has more rows here; the new ones stay."""
        self.cut: list[str] = []
        """What has more rows in the source; those are left behind."""
        if len(self.fresh) == len(self._own):
            raise SurgeryError(
                f"no parameter of {checkpoint.path.name} is in {donor.path.name} by its name: "
                f"{next(iter(self._own), 'none')} here, {next(iter(self._theirs), 'none')} there",
                next=names.another("a page with both names"),
            )
        self._refuse_lone_moments(used)

    @property
    def called(self) -> dict[str, str]:
        """What a parameter here is called in the source; of what is fused, the first."""
        return {name: ways[0].sources[0] for name, ways in self._origins.items()}

    @property
    def differing(self) -> bool:
        """Whether a parameter of either is not in the other, or not all of it."""
        return bool(self.fresh or self.left or self.grown or self.cut)

    def sentences(self) -> list[str]:
        """What is not filled, and what is not taken."""
        said = {
            "not in the source, and left as its trainer made it, but for Adam's step": self.fresh,
            "larger here, and the rows after those of the source are left as its trainer made "
            "them": self.grown,
            "smaller here, and the rows after those are left behind": self.cut,
            "not in this run, and left behind": self.left,
        }
        return [f"{text}: {first_few(names)}" for text, names in said.items() if names]

    def changes(self) -> list[Change]:
        """One for each stretch of a tensor that is filled."""
        out: list[Change] = []
        for name, kinds in self._own.items():
            for way, some in self._ways(name, kinds):
                for own, theirs in self._pairs(name, some, way):
                    out += self._filled(own, theirs)
        return joined(out)

    def _refuse_lone_moments(self, used: Collection[str]) -> None:
        """Raise for moments under a name that no weights have, which might come without these. They
        come with them by a rule, and between runs of one trainer that fills all it has."""
        held = [name for name, kinds in self._own.items() if kinds.keys() & HELD]
        whose = {source for name in held for way in self._origins.get(name, ())
                 for source in way.sources}  # fmt: skip
        lone = {
            name: self._checkpoint
            for name in self._own.keys() - set(held)
            if not any(whose.issuperset(way.sources) for way in self._origins.get(name, ()))
            and (self.fresh or not self.alike)
        }
        for name in self.left:
            if not self._theirs[name].keys() & HELD:
                lone[name] = self._donor
        for name, checkpoint in lone.items():
            raise SurgeryError(
                f"{checkpoint.path.name} has moments of {name} and no weights by that name",
                next=self._names.another("a page that says what it is made of"),
            )

    def _ways(self, name: str, kinds: Kinds) -> list[tuple[Origin, Kinds]]:
        """From where the parts of each kind come. Raises SurgeryError for a kind that the source
        has nowhere, and for one that it has in two places."""
        origins = self._origins.get(name, [])
        out: list[tuple[Origin, Kinds]] = [(way, {}) for way in origins]
        for kind, parts in kinds.items() if origins else ():
            for kinds_of in ({kind}, HELD if kind in HELD else {kind}):
                found = [i for i, way in enumerate(origins) if self._has(way, kinds_of)]
                if found:
                    break
            else:
                raise SurgeryError(
                    f"{name} has {kind} in {parts[0].place.file.name}, and the source has none of "
                    "it",
                    next="transplant from a step that was saved with its optimizer",
                )
            if len(found) > 1:
                both = " and ".join(", ".join(origins[i].sources) for i in found)
                raise SurgeryError(
                    f"both {both} would be {name} here",
                    next=f"name each parameter once under rename, fuse and split: {PAGE}",
                )
            out[found[0]][1][kind] = parts
        return [(way, some) for way, some in out if some]

    def _has(self, way: Origin, kinds: Collection[str]) -> bool:
        """Whether each source has one of the kinds."""
        return all(not self._theirs[each].keys().isdisjoint(kinds) for each in way.sources)

    def _pairs(self, name: str, kinds: Kinds, origin: Origin) -> list[tuple[Kinds, Kinds]]:
        """The parts here and in the source that have a box each: of the whole parameter; where it
        is not said which block of that a rank has, rank by rank, if both cut it alike."""
        own, found = boxed(kinds), [boxed(self._theirs[source]) for source in origin.sources]
        if own and all(found):
            theirs = [each for each in found if each]
            if origin.plain:
                return [self._as_large(name, own, theirs[0])]
            return [self._ordered(name, own, theirs, origin)]
        other = self._theirs[origin.sources[0]]
        mine, others = by_cut(kinds), by_cut(other)
        sizes = [{cut: totals(parts) for cut, parts in each.items()} for each in (mine, others)]
        if self.alike and sizes[0] == sizes[1] and len(origin.sources) == 1:
            return [(boxed(mine[cut]) or {}, boxed(others[cut]) or {}) for cut in mine]
        place = next(every(kinds)).place
        raise SurgeryError(
            f"{name} in {place.file.name}: which block of it each rank has is not known here",
            next="transplant between runs that cut their parameters alike",
        )

    def _as_large(self, name: str, own: Kinds, theirs: Kinds) -> tuple[Kinds, Kinds]:
        """The parts, of a vocabulary what both have: one of the two may have more rows."""
        mine, other = shape(own), shape(theirs)
        if mine[1:] != other[1:] or mine == other or not VOCABULARY.search(name):
            return own, theirs
        if mine > other:
            self.grown.append(f"{name} ({other[0]} of {mine[0]} rows)")
            return first_rows(own, other[0]), theirs
        self.cut.append(f"{name} ({mine[0]} of {other[0]} rows)")
        return own, first_rows(theirs, mine[0])

    def _ordered(
        self, name: str, own: Kinds, theirs: Sequence[Kinds], origin: Origin
    ) -> tuple[Kinds, Kinds]:
        """The parts here and in the source as those of one parameter, whose rows both have in one
        order."""
        singles = [self._sibling(each, name, origin) for each in origin.siblings] or theirs
        groups, sections = self._sections(name, origin, [shape(each)[0] for each in singles])
        index = origin.index if origin.siblings else None
        return in_one_order(own, theirs, Order(groups, sections, origin.to_pairs, index))

    def _sibling(self, sibling: str, name: str, origin: Origin) -> Kinds:
        kinds = boxed(self._own.get(sibling, {})) if sibling in self._own else None
        if not kinds:
            raise SurgeryError(
                f"{origin.sources[0]} is split into {name} and {sibling}, which is not here",
                next=f"mend the rule under split: {PAGE}",
            )
        return kinds

    def _sections(
        self, name: str, origin: Origin, rows: Sequence[int]
    ) -> tuple[int, tuple[Section, ...]]:
        """How many groups, and what each has of the parameters that have so many rows in all."""
        groups = self._number(origin.groups, name)
        heads = [self._number(size, name) for size in origin.heads] or [0] * len(rows)
        fit = all(
            count % groups == 0 and (not number or number % groups == count % (2 * number) == 0)
            for count, number in zip(rows, heads, strict=True)
        )
        if not fit or (any(heads) and any(count // groups % 2 for count in rows)):
            raise SurgeryError(
                f"{name}: {' and '.join(map(str, rows))} rows are not those of {groups} groups and "
                f"{' and '.join(map(str, heads))} heads",
                next=f"mend sizes, or the rule for {name}: {PAGE}",
            )
        return groups, tuple(
            Section(count // groups, count // number // 2 if number else 0)
            for count, number in zip(rows, heads, strict=True)
        )

    def _number(self, size: Size, name: str) -> int:
        """A size that a page says, or one of the model's by its name."""
        if isinstance(size, int):
            return size
        said = self._names.sizes.get(size)
        if said is not None and self._heads.get(size, said) != said:
            raise SurgeryError(
                f"{name}: the page says {said} {size}, and the steps say {self._heads[size]}",
                next=f"leave out sizes where a step says them: {PAGE}",
            )
        if said is not None:
            return said
        if size not in self._heads:
            raise SurgeryError(
                f"{name}: how many {size} there are is said by neither of the two steps",
                next=(
                    self._names.another(f"a page with `sizes: {{{size}: N}}`"),
                    "or put the config.json that transformers saved of the model into the new step",
                ),
            )
        return self._heads[size]

    @cached_property
    def _heads(self) -> dict[str, int]:
        """What either of the steps says of SIZES."""
        for each in (self._donor, self._checkpoint):
            config = transformers_config(each.path) or {}
            heads = config.get("num_attention_heads")
            groups = config.get("num_key_value_heads") or heads
            if isinstance(heads, int) and isinstance(groups, int):
                return {"heads": heads, "kv_heads": groups}
            able = HasHeads.optional(each)
            with suppress(SurgeryError):
                if able is not None and (found := able.attention()[0]):
                    model = found[0].model
                    return {"heads": model.heads, "kv_heads": model.groups}
        return {}

    def _filled(self, own: Kinds, theirs: Kinds) -> Iterator[Change]:
        """A change for each part, all of which are of one parameter."""
        origins: dict[str, list[Part]] = {}
        for part in every(own):
            origins.setdefault(_origin(part, theirs), []).append(part)
        for kind, parts in origins.items():
            for each in theirs[kind]:
                if each.place.value.dtype not in ITEM:
                    raise SurgeryError(
                        f"{parts[0].parameter}: the {kind} of the source are "
                        f"{each.place.value.dtype}, which can't be computed with",
                        next="transplant from an optimizer that keeps floats",
                    )
            found = Found(theirs[kind], parts)
            for part in parts:
                yield self._from(part, found)

    def _from(self, part: Part, found: Found) -> Change:
        try:
            terms = [self._term(band) for band in found.gathered(part)]
        except Unknown as why:
            raise SurgeryError(
                f"{part.parameter} {why}: its {part.kind} in {part.place.file.name} can't be "
                "filled",
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


def _parts(checkpoint: Checkpoint) -> list[Part]:
    able = SavesWeightsTwice.optional(checkpoint)
    return list(unstacked(checkpoint.parts() if able is None else able.all_parts()))


def _origin(part: Part, theirs: Kinds) -> str:
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
    return replace(row[0], field=kind, new=new, elements=(first[0], last_row[1]))


def _follows(last: Source | Woven | None, source: Source | Woven) -> bool:
    return (
        isinstance(last, Source)
        and isinstance(source, Source)
        and (last.file, last.end, last.dtype) == (source.file, source.start, source.dtype)
    )
