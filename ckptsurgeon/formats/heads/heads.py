"""Which rows of which weights make the queries and keys of each attention head.

Fused rows lie in Megatron's order, where a group of heads has its queries, one key and one value
behind one another, or in blocks, where each rank has its queries, its keys, its values. A tensor
rank holds whole heads; a chunk of torch's shards holds any rows.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from math import prod
from typing import NamedTuple

from ckptsurgeon.errors import SurgeryError, count
from ckptsurgeon.formats.fields.values import Part
from ckptsurgeon.formats.heads.head_counts import Model, unknown
from ckptsurgeon.hints import command

GROUPED = re.compile(r"(.+\.)?(?:query_key_value|linear_qkv)\.weight")
BLOCKS = re.compile(r"(.+\.)?qkv_proj\.weight")
"""What fused projections are called whose rows lie by groups, and by blocks (nanotron, Phi-3)."""
PAIRS = (("q_proj", "k_proj"), ("w_q", "w_k"), ("wq", "wk"))
"""What projections of queries and of keys are called: Llama and its like, OLMo-core, torchtitan."""
GAIN = re.compile(
    r"(?:pp_block\.)?(?:input_layernorm|attention_norm|ln_attn)\.weight"
    r"|self_attention\.linear_qkv\.layer_norm_weight"
)
"""The gain of the norm before the attention, in the folder of its layer; Transformer Engine has it
in one module with the projection."""
STACKED = re.compile(r"\blayers\.(?!\d)")
"""Where the names of megatron-core leave out the number of the layer: its tensors then have the
layers as their first axis."""
NORMED = re.compile(r"\b(?:q|k|query|key|qk)_?(?:layer_?)?norm\b")
"""A norm of queries or keys: the size of their weights says nothing of the logits then."""
LAYER = re.compile(r"(.*\b\d+)\.")


class Rows(NamedTuple):
    """Elements [start, end) of one cut of a parameter."""

    parameter: str
    cut: str
    start: int
    end: int


class Head(NamedTuple):
    """Where the rows of a head's query and key are, and their biases if there are any. `number` is
    counted over all ranks; heads of one group have the same key."""

    number: int
    query: tuple[Rows, ...]
    key: tuple[Rows, ...]
    query_bias: tuple[Rows, ...]
    key_bias: tuple[Rows, ...]


class Attention(NamedTuple):
    """The heads of one layer, the name of their queries' weights, and the gain and bias of the norm
    before them. `also` are the same heads in files that repeat the weights."""

    layer: str
    queries: str
    model: Model
    heads: tuple[Head, ...]
    gain: tuple[Rows, ...]
    bias: tuple[Rows, ...]
    also: tuple[Attention, ...] = ()

    @property
    def shared(self) -> bool:
        """Whether several heads have one key."""
        return self.model.groups < self.model.heads


class _Extent(NamedTuple):
    """Elements [first, end) of a tensor of one layer: those of a cut from element `at` on. `first`
    is -1 for a chunk of columns, whose rows do not lie behind one another."""

    parameter: str
    cut: str
    at: int
    first: int
    end: int

    def rows(self, start: int, end: int) -> Rows:
        """Where those elements are, of the whole tensor's, that are here."""
        first = max(start, self.first) - self.first
        stop = min(end, self.end) - self.first
        return Rows(self.parameter, self.cut, self.at + first, self.at + stop)


class _Tensors:
    """The extents of each layer's tensors; of ranks they follow one another, and `offset` tells
    where a chunk of torch's shards begins (row, column, …)."""

    def __init__(self, parts: Iterable[Part], chunked: bool) -> None:
        sizes: dict[tuple[str, str], dict[str, int]] = {}
        shapes: dict[tuple[str, str], tuple[int, ...]] = {}
        for part in parts:
            if part.kind in ("weights", "master"):
                mine = sizes.setdefault((part.parameter, part.cut), {})
                mine[part.kind] = mine.get(part.kind, 0) + part.end - part.start
                if part.kind == "weights" or (part.parameter, part.cut) not in shapes:
                    # A master may be flat beside them, and in pieces.
                    shapes[part.parameter, part.cut] = tuple(part.place.value.size)
        self.chunked = chunked
        self.extents: dict[str, list[_Extent]] = {}
        for (name, cut), kinds in sorted(sizes.items(), key=lambda item: _order(item[0][1])):
            if chunked:
                for layers, extent in _of_chunk(name, cut, shapes[name, cut]):
                    self.extents.setdefault(layers, []).append(extent)
                continue
            mine_so_far = self.extents.setdefault(name, [])
            first = mine_so_far[-1].end if mine_so_far else 0
            end = first + kinds.get("master", kinds.get("weights", 0))
            mine_so_far.append(_Extent(name, cut, 0, first, end))

    def numel(self, name: str) -> int:
        """Of all its cuts; 0 for a parameter that is not there."""
        return sum(extent.end - extent.first for extent in self.extents.get(name, ()))

    def rows(self, name: str, start: int, end: int) -> tuple[Rows, ...]:
        """Where the elements [start, end) of the whole tensor are."""
        held = self.extents.get(name, ())
        return tuple(e.rows(start, end) for e in held if max(start, e.first) < min(end, e.end))

    def whole(self, name: str, size: int) -> tuple[Rows, ...]:
        """All of a parameter that every rank has whole, from the first rank; nothing where it has
        another size."""
        extents = self.extents.get(name, [])
        held = extents if self.chunked else extents[:1]
        if sum(e.end - e.first for e in held) != size:
            return ()
        return tuple(e.rows(e.first, e.end) for e in held)

    def refuse_split(self, name: str, unit: int) -> None:
        """Raise unless each rank holds whole units of so many elements: heads, or groups; of rows
        in blocks, as many as every other rank."""
        extents = self.extents[name]
        split = any(e.first % unit or e.end % unit for e in extents)
        uneven = BLOCKS.fullmatch(name) and len({e.end - e.first for e in extents}) > 1
        if not self.chunked and (split or uneven):
            raise SurgeryError(
                f"{name} is cut inside a head: {count(len(self.extents[name]), 'rank')} hold it, "
                "which is no layout known here",
                next=command("scale", "REGEX", "--by", "F", why="whole parameters"),
            )


def _order(cut: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", cut))


def _of_chunk(name: str, cut: str, shape: Sequence[int]) -> Iterator[tuple[str, _Extent]]:
    """What a chunk at an offset holds of each layer, with the name that the tensor of that layer
    has where layers have numbers."""
    offset = _order(cut)
    if not STACKED.search(name) or len(shape) < 2:
        yield name, _extent(name, cut, 0, offset, shape)
        return
    for i in range(shape[0]):
        numbered = STACKED.sub(rf"\g<0>{offset[0] + i}.", name, count=1)
        yield numbered, _extent(name, cut, i * prod(shape[1:]), offset[1:], shape[1:])


def _extent(name: str, cut: str, at: int, offset: Sequence[int], shape: Sequence[int]) -> _Extent:
    first = offset[0] * prod(shape[1:]) if offset else 0
    first = -1 if any(offset[1:]) else first
    return _Extent(name, cut, at, first, first + prod(shape))


def attentions(
    parts: Iterable[Part], model: Model, *, chunked: bool = False
) -> tuple[list[Attention], list[str]]:
    """The attention of every layer in the order of the names, and why that of others is not known,
    a sentence each. Cuts are ranks in their order, or with `chunked` those of torch's shards.
    Raises SurgeryError for a matrix of another size than the heads make."""
    tensors = _Tensors(parts, chunked)
    out, apart = [], []
    for layer, query, key in _projections(tensors.extents):
        inside = [name for name in tensors.extents if name.startswith(layer)]
        if normed := next((name for name in inside if NORMED.search(name)), None):
            apart.append(f"{normed} normalizes them")
            continue
        norm = next((n for n in inside if GAIN.fullmatch(n, len(layer))), "")
        gain = tensors.whole(norm, model.hidden)
        if not gain:
            apart.append(f"no norm before {query} is known by its name")
            continue
        bias = tensors.whole(norm.removesuffix("weight") + "bias", model.hidden)
        heads = tuple(_heads(tensors, query, key, model))
        out.append(Attention(layer.rstrip("."), query, model, heads, gain, bias))
    if not out and not apart:
        apart.append(
            "no query_key_value, linear_qkv, qkv_proj, q_proj, w_q or wq is among the weights"
        )
    return out, list(dict.fromkeys(apart))


def repeated(parts: Iterable[Part], model: Model, what: str) -> tuple[list[Attention], list[str]]:
    """As `attentions`, where every cut holds the whole model once more. Raises SurgeryError where
    they do not hold the same layers."""
    cuts: dict[str, list[Part]] = {}
    for part in parts:
        if part.kind == "weights":
            cuts.setdefault(part.cut, []).append(part)
    (found, apart), *others = [attentions(mine, model) for mine in cuts.values()] or [([], [])]
    for other, _ in others:
        if [each.layer for each in other] != [each.layer for each in found]:
            raise unknown(what, "its files of weights hold different layers")
        pairs = zip(found, other, strict=True)
        found = [each._replace(also=(*each.also, copy)) for each, copy in pairs]
    return found, apart


def _projections(names: Iterable[str]) -> Iterator[tuple[str, str, str]]:
    """Layer, and the names of its queries' and keys' weights; one name of fused ones twice."""
    known = dict.fromkeys(names)
    for name in known:
        layer = LAYER.match(name)
        if layer is None:
            continue
        if GROUPED.fullmatch(name) or BLOCKS.fullmatch(name):
            yield layer[1] + ".", name, name
        for query, key in PAIRS:
            other = name.removesuffix(f"{query}.weight") + f"{key}.weight"
            if name.endswith(f".{query}.weight") and other in known:
                yield layer[1] + ".", name, other


def _heads(tensors: _Tensors, query: str, key: str, model: Model) -> Iterator[Head]:
    hidden, heads, groups, width, _ = model
    each = heads // groups
    fused = query == key
    rows = {query: groups * (each + 2) * width if fused else heads * width}
    if not fused:
        rows[key] = groups * width
    for name, number in rows.items():
        held = tensors.numel(name)
        if any(e.first < 0 for e in tensors.extents[name]):
            raise SurgeryError(
                f"{name} is cut into columns, so the rows of a head lie in several pieces",
                next=command("scale", "REGEX", "--by", "F", why="whole parameters"),
            )
        if held != number * hidden:
            raise SurgeryError(
                f"{name} has {count(held, 'element')} here, and {count(heads, 'head')} of {width} "
                f"with {count(groups, 'key')} make {count(number, 'row')} of {hidden}",
                next=command("scale", "REGEX", "--by", "F", why="whole parameters"),
            )
        tensors.refuse_split(name, (each + 2 if fused else 1) * width * hidden)
    ranks = 1 if tensors.chunked or not BLOCKS.fullmatch(query) else len(tensors.extents[query])
    for head in range(heads):
        if BLOCKS.fullmatch(query):
            starts = _in_blocks(head, model, ranks)
        elif fused:
            first = head // each * (each + 2)
            starts = first + head % each, first + each
        else:
            starts = head, head // each
        places = []
        for size, suffix in ((hidden, "weight"), (1, "bias")):
            for name, start in zip((query, key), starts, strict=True):
                other = name.removesuffix("weight") + suffix
                end = (start + 1) * width * size
                places.append(tensors.rows(other, start * width * size, end))
        yield Head(head, *places)


def _in_blocks(head: int, model: Model, ranks: int) -> tuple[int, int]:
    """Where query and key of a head begin, counted in heads: each rank has its queries, its keys
    and its values."""
    queries, keys = model.heads // ranks, model.groups // ranks
    rank, place = divmod(head, queries)
    first = rank * (queries + 2 * keys)
    return first + place, first + queries + place // (queries // keys)
