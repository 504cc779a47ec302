"""The tensors of a transplant: each element of a step from the same element of another one."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, partial

from ckptsurgeon.errors import SurgeryError, count, first_few
from ckptsurgeon.formats import MOMENTS, Checkpoint, Part, Place
from ckptsurgeon.formats.capabilities import HasHeads, HasMoreWeights
from ckptsurgeon.formats.fields.values import NUMBER
from ckptsurgeon.formats.places.json_beside import transformers_config
from ckptsurgeon.formats.tensors import coded
from ckptsurgeon.formats.tensors.blocks import (
    Kinds,
    boxed,
    by_cut,
    by_name,
    every,
    first_rows,
    refuse_strays,
    shape,
    totals,
    unstacked,
)
from ckptsurgeon.formats.tensors.row_order import (
    HERE,
    THERE,
    Order,
    Section,
    in_one_order,
    turned_in_one_order,
)
from ckptsurgeon.operations.computed_changes import (
    refuse_codes,
    refuse_other_states,
    refuse_second_copies,
)
from ckptsurgeon.operations.numbered_parameters import order_of_each, orders_alike, with_names
from ckptsurgeon.operations.parameter_names import PAGE, Names, Origin, Size
from ckptsurgeon.operations.refusals import Refusals
from ckptsurgeon.operations.transplanted_bytes import HELD, Stretches, joined
from ckptsurgeon.operations.transplanted_codes import encoded
from ckptsurgeon.operations.transplanted_steps import MOMENT, of_each
from ckptsurgeon.plans.edits import Change
from ckptsurgeon.run.run import Run

VOCABULARY = re.compile(r"embed|wte|vocab|lm_head|(^|\.)(output|head)\.weight$")
"""The name of a parameter with a row for each token."""


class Tensors:
    """What becomes of the tensors of `checkpoint`, filled from those of `donor`: `alike` is whether
    both are of one format, `names` what a parameter of the source is called here, and `order` the
    names of those that are numbered. Refused is what it is not known of whose elements are, and a
    parameter whose moments would come without its weights; where refusals are kept, the rest of it
    is as if that were not there."""

    def __init__(
        self,
        run: Run,
        checkpoint: Checkpoint,
        donor: Checkpoint,
        alike: bool,
        names: Names,
        order: Sequence[str],
        refusals: Refusals,
    ) -> None:
        self._run, self._checkpoint, self._donor = run, checkpoint, donor
        self.alike, self._names, self.refusals = alike, names, refusals
        for each in (checkpoint, donor):
            with refusals.of():
                refuse_other_states(each, next="transplant between optimizers of the same states")
                refuse_codes(each, next="transplant between optimizers of 32 bits")
        (own, own_codes), (theirs, their_codes) = self._parts(checkpoint), self._parts(donor)
        with refusals.of():
            refuse_second_copies(run, checkpoint, own)
        self.order: list[str] = []
        """The names of the parameters that are numbered here."""
        self.their_order: list[str] = []
        """And in the source."""
        with refusals.of():
            self.order, self.their_order = order_of_each(order, own, theirs)
        if alike:
            with refusals.of():
                known = self.order, self.their_order
                known = orders_alike(known, checkpoint, own, donor, theirs, names)
                self.order, self.their_order = known
        self.own, self.theirs = self._named(own, theirs)
        """Each parameter here, and each of the source, with its parts."""
        for name, kinds in (*self.own.items(), *self.theirs.items()):
            with refusals.of(name):
                refuse_strays(kinds)
        self.origins = names.origins(self.theirs, self.own, refusals)
        """The ways to each parameter here that is not left as it is."""
        refused = refusals.by_name
        self.fresh = [n for n in self.own if n not in self.origins and n not in refused]
        """What stays as the new trainer made it."""
        ways = [way for ways in self.origins.values() for way in ways]
        used = {source for way in ways for source in way.sources}
        self.left = [name for name in self.theirs if name not in used]
        """What the new run has no place for."""
        self.grown: dict[str, tuple[int, int]] = {}
        """What has more rows here, how many are filled, and of how many; the new ones stay."""
        self.cut: dict[str, tuple[int, int]] = {}
        """What has more rows in the source: how many are taken, and of how many."""
        self._trained = {name for name, kinds in self.theirs.items() if kinds.keys() & {*MOMENTS}}
        """What of the source has moments."""
        self._own_codes = own_codes
        self._stretches = Stretches(run, donor, own_codes, their_codes)
        with refusals.of():
            if not self.origins and not refused.keys() & self.own.keys():
                mine, other = next(iter(self.own), "none"), next(iter(self.theirs), "none")
                raise SurgeryError(
                    f"no parameter of {checkpoint.path.name} is in {donor.path.name} by its name: "
                    f"{mine} here, {other} there",
                    next=names.between(self.theirs, self.own),
                )
        if self.origins:
            self._refuse_lone_moments(used)

    def _parts(self, checkpoint: Checkpoint) -> coded.Moments:
        able = HasMoreWeights.optional(checkpoint)
        parts = list(unstacked(checkpoint.parts() if able is None else able.all_parts()))
        more = coded.Moments([], {})
        with self.refusals.of():
            more = coded.moments(checkpoint, parts)
        return coded.Moments([*parts, *more.parts], more.codes)

    def _named(
        self, own: list[Part], theirs: list[Part]
    ) -> tuple[dict[str, Kinds], dict[str, Kinds]]:
        """The parts of both steps by name. Without the names of what is numbered, weights alone."""
        mine, others = (
            by_name(p for p in parts if p.kind in HELD and not p.parameter.startswith(NUMBER))
            for parts in (own, theirs)
        )
        page = partial(self._names.lacking, others, mine)
        with self.refusals.of():
            named = with_names(self._checkpoint, own, self.order, page)
            mine, others = named, with_names(self._donor, theirs, self.their_order, page)
        return mine, others

    @cached_property
    def steps(self) -> dict[str, Place]:
        """The place of Adam's step of each parameter here that has one for itself."""
        return of_each(self._checkpoint, self.own)

    @property
    def called(self) -> dict[str, str]:
        """What a parameter here is called in the source; of what is fused, the first."""
        return {name: ways[0].sources[0] for name, ways in self.origins.items()}

    @property
    def unfrozen(self) -> list[str]:
        """What is trained here, and was not in the source: its moments stay."""
        return [n for n in self.origins if self._is_trained(n) and not self._was_trained(n)]

    @property
    def frozen(self) -> list[str]:
        """What was trained in the source, and is not here: its moments are left behind."""
        return [n for n in self.origins if not self._is_trained(n) and self._was_trained(n)]

    def _is_trained(self, name: str) -> bool:
        return bool(self.own[name].keys() & {*MOMENTS})

    def _was_trained(self, name: str) -> bool:
        """Whether the source has moments of it; of a step without any it is not known."""
        sources = {each for way in self.origins[name] for each in way.sources}
        return not self._trained or not sources.isdisjoint(self._trained)

    @property
    def differing(self) -> bool:
        """Whether a parameter of either is not in the other, or not all of it."""
        partly = self.grown or self.cut or self.unfrozen or self.frozen
        return bool(self.fresh or self.left or partly)

    def sentences(self) -> list[str]:
        """What is not filled, and what is not taken."""
        lone = [n for n in self.fresh if n in self.steps or MOMENT not in self.own[n]]
        said = {
            "not in the source, and left as its trainer made it": lone,
            "not in the source, and left as its trainer made it, but for Adam's step, which is "
            "one for all": [name for name in self.fresh if name not in lone],
            "larger here, and the rows after those of the source are left as its trainer made "
            "them": _rows(self.grown),
            "smaller here, and the rows after those are left behind": _rows(self.cut),
            "not in this run, and left behind": self.left,
            "not trained in the source: their moments stay as the new trainer made them":
                self.unfrozen,
            "not trained here: their moments are left behind": self.frozen,
        }  # fmt: skip
        return [f"{text}: {first_few(names)}" for text, names in said.items() if names]

    def changes(self) -> list[Change]:
        """One for each stretch of a tensor that is filled."""
        out: list[Change] = []
        for name, kinds in self.own.items():
            with self.refusals.of(name):
                for way, some in self.ways(name, kinds):
                    for own, theirs in self._pairs(name, some, way):
                        out += self._stretches.filled(own, theirs, bool(way.turned))
        return list(encoded(self._run, self._checkpoint, self._own_codes, joined(out)))

    def _refuse_lone_moments(self, used: Collection[str]) -> None:
        """Refuse moments under a name that no weights have, which might come without these. They
        come with them by a rule, and between runs of one trainer that fills all it has."""
        held = [name for name, kinds in self.own.items() if kinds.keys() & HELD]
        whose = {source for name in held for way in self.origins.get(name, ())
                 for source in way.sources}  # fmt: skip
        lone = {
            name: self._checkpoint
            for name in self.own.keys() - set(held)
            if not any(whose.issuperset(way.sources) for way in self.origins.get(name, ()))
            and (self.fresh or not self.alike)
        }
        for name in self.left:
            if not self.theirs[name].keys() & HELD:
                lone[name] = self._donor
        for name, checkpoint in lone.items():
            with self.refusals.of(name):
                raise SurgeryError(
                    f"{checkpoint.path.name} has moments of {name} and no weights by that name",
                    next=self._names.another("a page that says what it is made of"),
                )

    def ways(self, name: str, kinds: Kinds) -> list[tuple[Origin, Kinds]]:
        """From where the parts of each kind come. Raises SurgeryError for a kind that the source
        has nowhere, and for one that it has in two places."""
        origins = self.origins.get(name, [])
        out: list[tuple[Origin, Kinds]] = [(way, {}) for way in origins]
        stay = {*MOMENTS} if origins and not self._was_trained(name) else ()
        for kind, parts in kinds.items() if origins else ():
            if kind in stay:
                continue
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
        return all(not self.theirs[each].keys().isdisjoint(kinds) for each in way.sources)

    def _pairs(self, name: str, kinds: Kinds, origin: Origin) -> list[tuple[Kinds, Kinds]]:
        """The parts here and in the source that have a box each: of the whole parameter; where it
        is not said which block of that a rank has, rank by rank, if both cut it alike."""
        own, found = boxed(kinds), [boxed(self.theirs[source]) for source in origin.sources]
        if own and all(found):
            theirs = [each for each in found if each]
            if origin.plain:
                return [self._as_large(name, own, theirs[0])]
            if origin.in_order:
                return [(own, theirs[0])]
            return [self._ordered(name, own, theirs, origin)]
        other = self.theirs[origin.sources[0]]
        mine, others = by_cut(kinds), by_cut(other)
        sizes = [{cut: totals(parts) for cut, parts in each.items()} for each in (mine, others)]
        if self.alike and sizes[0] == sizes[1] and origin.plain:
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
            self.grown[name] = other[0], mine[0]
            return first_rows(own, other[0]), theirs
        self.cut[name] = mine[0], other[0]
        return own, first_rows(theirs, mine[0])

    def _ordered(
        self, name: str, own: Kinds, theirs: Sequence[Kinds], origin: Origin
    ) -> tuple[Kinds, Kinds]:
        """The parts here and in the source as those of one parameter, whose rows both have in one
        order."""
        apart = [self._sibling(each, name, origin) for each in origin.siblings] or theirs
        fused, index = (theirs[0], origin.index) if origin.siblings else (own, None)
        if origin.turned and any(len(shape(each)) != 2 for each in (own, *theirs, *apart)):
            raise SurgeryError(
                f"{name} has the sizes {list(shape(own))}, and only a matrix is transposed",
                next=f"name matrices alone under transpose: {PAGE}",
            )
        across = origin.turned == (HERE if origin.siblings else THERE)
        rows = [shape(each)[across] for each in apart]
        whole = shape(fused)[bool(origin.turned) and not across]
        if origin.stacks:
            rows = [rows[0] // origin.stacks] * origin.stacks
        if sum(rows) != whole:
            raise SurgeryError(
                f"{name} has {count(whole, 'row')} where it is one, and "
                f"{' and '.join(map(str, rows))} where it is several",
                next=f"mend the rule for {name}: {PAGE}",
            )
        groups, sections = self._sections(name, origin, rows)
        order = Order(groups, sections, origin.to_pairs, index, origin.stacked)
        if origin.turned:
            return turned_in_one_order(own, theirs, order, origin.turned)
        return in_one_order(own, theirs, order)

    def _sibling(self, sibling: str, name: str, origin: Origin) -> Kinds:
        kinds = boxed(self.own.get(sibling, {})) if sibling in self.own else None
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
        heads = [0] * len(rows)
        if any(origin.heads):
            heads = [self._number(size, name) for size in origin.heads]
        fit = all(
            size % groups == 0 and (not number or number % groups == size % (2 * number) == 0)
            for size, number in zip(rows, heads, strict=True)
        )
        if not fit or (any(heads) and any(size // groups % 2 for size in rows)):
            raise SurgeryError(
                f"{name}: {' and '.join(map(str, rows))} rows are not those of "
                f"{count(groups, 'group')} and {' and '.join(map(str, heads))} heads",
                next=f"mend sizes, or the rule for {name}: {PAGE}",
            )
        return groups, tuple(
            Section(size // groups, size // number // 2 if number else 0)
            for size, number in zip(rows, heads, strict=True)
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
            heads = config.get("num_attention_heads", config.get("n_head"))
            groups = config.get("num_key_value_heads") or heads
            if isinstance(heads, int) and isinstance(groups, int):
                return {"heads": heads, "kv_heads": groups}
            able = HasHeads.optional(each)
            with suppress(SurgeryError):
                if able is not None and (found := able.attention()[0]):
                    model = found[0].model
                    return {"heads": model.heads, "kv_heads": model.groups}
        return {}


def _rows(found: Mapping[str, tuple[int, int]]) -> list[str]:
    return [f"{name} ({rows} of {count(whole, 'row')})" for name, (rows, whole) in found.items()]
