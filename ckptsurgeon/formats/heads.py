"""Which rows of which weights make the queries and keys of each attention head.

The order of fused rows is Megatron's: a group of heads has its queries, one key and one value
behind one another. A tensor rank holds whole groups; a chunk of torch's shards holds any rows.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.formats.sane import mapping
from ckptsurgeon.formats.values import Part

FUSED = re.compile(r"(.+\.)?(?:query_key_value|linear_qkv)\.weight")
PAIRS = (("q_proj", "k_proj"), ("w_q", "w_k"), ("wq", "wk"))
"""What projections of queries and of keys are called: Llama and its like, OLMo-core, torchtitan."""
NORMS = ("input_layernorm", "attention_norm")
"""The norm before the attention, in the folder of its layer."""
NORMED = re.compile(r"\b(?:q|k|query|key|qk)_?(?:layer_?)?norm\b")
"""A norm of queries or keys: the size of their weights says nothing of the logits then."""
LAYER = re.compile(r"(.*\b\d+)\.")


class Model(NamedTuple):
    """What a checkpoint says of its attention: `width` is that of a head, `groups` is how many keys
    there are, `plus_one` whether the gain of a norm is 1 more than what is kept."""

    hidden: int
    heads: int
    groups: int
    width: int
    plus_one: bool = False


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
    """The heads of one layer, and the gain and bias of the norm before them."""

    layer: str
    model: Model
    heads: tuple[Head, ...]
    gain: tuple[Rows, ...]
    bias: tuple[Rows, ...]

    @property
    def shared(self) -> bool:
        """Whether several heads have one key."""
        return self.model.groups < self.model.heads


def of_megatron(args: Mapping[str, Any], what: str) -> Model:
    """By the command line that a checkpoint keeps. Raises SurgeryError where it does not say."""
    heads, hidden = args.get("num_attention_heads"), args.get("hidden_size")
    groups = args.get("num_query_groups") if args.get("group_query_attention", True) else None
    if args.get("qk_layernorm"):
        raise _normed(what)
    if args.get("multi_latent_attention"):
        raise _unknown(what, "its attention is latent (MLA), whose queries and keys lie otherwise")
    groups = args.get("num_key_value_heads") if groups is None else groups
    plus_one = bool(args.get("apply_layernorm_1p"))
    return _model(what, hidden, heads, groups, args.get("kv_channels"), plus_one)


def of_hugging_face(config: Mapping[str, Any], what: str) -> Model:
    """By `config.json` of transformers. Raises SurgeryError where it does not say."""
    kind = str(config.get("model_type"))
    if kind.startswith("gemma"):
        raise _unknown(what, f"{kind} scales its queries by a number of its own")
    names = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    hidden, heads, groups, width = (config.get(name) for name in names)
    return _model(what, hidden, heads, groups, width)


def of_olmo_core(config: Mapping[str, Any], what: str) -> Model:
    """By the model of OLMo-core's config. Raises SurgeryError where it does not say, and for a
    block without a plain norm before its attention."""
    model = mapping(config.get("model"))
    block = mapping(model.get("block"))
    mixer = mapping(block.get("sequence_mixer") or block.get("attention"))
    if model.get("block_overrides") or block.get("name") not in (None, "default", "peri_norm"):
        raise _unknown(what, "the blocks of its model have no plain norm before the attention")
    if mixer.get("name") not in (None, "default") or mixer.get("clip_qkv") is not None:
        raise _unknown(what, "its attention is not OLMo-core's default one")
    if mixer.get("qk_norm") is not None:
        raise _normed(what)
    heads, groups, width = (mixer.get(name) for name in ("n_heads", "n_kv_heads", "head_dim"))
    return _model(what, model.get("d_model"), heads, groups, width)


def _model(
    what: str, hidden: Any, heads: Any, groups: Any, width: Any, plus_one: bool = False
) -> Model:
    groups = heads if groups is None else groups
    if width is None and isinstance(heads, int) and isinstance(hidden, int) and heads > 0:
        width = hidden // heads if hidden % heads == 0 else None
    numbers = [n for n in (hidden, heads, groups, width) if isinstance(n, int) and n > 0]
    if len(numbers) < 4 or heads % groups:
        raise unsaid(what)
    return Model(hidden, heads, groups, width, plus_one)


def unsaid(what: str) -> SurgeryError:
    """The error for a checkpoint without a number of heads."""
    return _unknown(what, "it does not say how many attention heads its model has")


def _unknown(what: str, why: str) -> SurgeryError:
    return SurgeryError(
        f"which rows of {what} are the queries and keys of a head is not known: {why}",
        next="ckptsurgeon scale REGEX --by F    whole parameters, by a factor of your own",
    )


def _normed(what: str) -> SurgeryError:
    return SurgeryError(
        f"the queries and keys of {what} are normalized, so their weights do not decide how large "
        "the logits are",
        next="ckptsurgeon scale q_norm --by F    the gains of the norm decide it",
    )


# --- where the rows are --------------------------------------------------------------------------


class _Extent(NamedTuple):
    """The elements of a whole tensor that one cut holds, from the `first` on."""

    cut: str
    first: int
    end: int


class _Tensors:
    """The extents of each parameter's weights; of ranks they follow one another, and `offset` tells
    where a chunk of torch's shards begins (row, column, …)."""

    def __init__(self, parts: Iterable[Part], chunked: bool) -> None:
        sizes: dict[tuple[str, str], dict[str, int]] = {}
        shapes: dict[tuple[str, str], tuple[int, ...]] = {}
        for part in parts:
            if part.kind in ("weights", "master"):
                mine = sizes.setdefault((part.parameter, part.cut), {})
                mine[part.kind] = mine.get(part.kind, 0) + part.end - part.start
                shapes[part.parameter, part.cut] = tuple(part.place.value.size)
        self.chunked = chunked
        self.extents: dict[str, list[_Extent]] = {}
        for (name, cut), kinds in sorted(sizes.items(), key=lambda item: _order(item[0][1])):
            mine_so_far = self.extents.setdefault(name, [])
            size = kinds.get("master", kinds.get("weights", 0))
            first = mine_so_far[-1].end if mine_so_far else 0
            if chunked:
                first = _first(cut, shapes[name, cut])
            mine_so_far.append(_Extent(cut, first, first + size))

    def numel(self, name: str) -> int:
        """Of all its cuts; 0 for a parameter that is not there."""
        return sum(extent.end - extent.first for extent in self.extents.get(name, ()))

    def rows(self, name: str, start: int, end: int) -> tuple[Rows, ...]:
        """Where the elements [start, end) of the whole tensor are."""
        return tuple(
            Rows(name, e.cut, max(start, e.first) - e.first, min(end, e.end) - e.first)
            for e in self.extents.get(name, ())
            if max(start, e.first) < min(end, e.end)
        )

    def whole(self, name: str, size: int) -> tuple[Rows, ...]:
        """All of a parameter that every rank has whole, from the first rank; nothing where it has
        another size."""
        extents = self.extents.get(name, [])
        held = extents if self.chunked else extents[:1]
        if sum(e.end - e.first for e in held) != size:
            return ()
        return tuple(Rows(name, e.cut, 0, e.end - e.first) for e in held)

    def refuse_split(self, name: str, unit: int) -> None:
        """Raise unless each rank holds whole units of so many elements: heads, or groups."""
        if not self.chunked and any(e.first % unit or e.end % unit for e in self.extents[name]):
            raise SurgeryError(
                f"{name} is cut inside a head: {len(self.extents[name])} ranks hold it, which is "
                "no layout known here",
                next="ckptsurgeon scale REGEX --by F    whole parameters",
            )


def _order(cut: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", cut))


def _first(cut: str, shape: Sequence[int]) -> int:
    """The first element of a chunk at an offset; -1 for one of columns, whose rows do not lie
    behind one another."""
    offset = _order(cut)
    if any(offset[1:]):
        return -1
    return offset[0] * prod(shape[1:]) if offset else 0


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
        gain = next(
            (r for n in NORMS if (r := tensors.whole(f"{layer}{n}.weight", model.hidden))), ()
        )
        if not gain:
            apart.append(f"no norm before {query} is known by its name")
            continue
        bias_name = gain[0].parameter.removesuffix("weight") + "bias"
        heads = tuple(_heads(tensors, query, key, model))
        bias = tensors.whole(bias_name, model.hidden)
        out.append(Attention(layer.rstrip("."), model, heads, gain, bias))
    if not out and not apart:
        apart.append("no query_key_value, linear_qkv, q_proj, w_q or wq is among the weights")
    return out, list(dict.fromkeys(apart))


def _projections(names: Iterable[str]) -> Iterator[tuple[str, str, str]]:
    """Layer, and the names of its queries' and keys' weights; one name of fused ones twice."""
    known = dict.fromkeys(names)
    for name in known:
        layer = LAYER.match(name)
        if layer is None:
            continue
        if FUSED.fullmatch(name):
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
    for name, count in rows.items():
        held = tensors.numel(name)
        if any(e.first < 0 for e in tensors.extents[name]):
            raise SurgeryError(
                f"{name} is cut into columns, and a head's rows are in several pieces then",
                next="ckptsurgeon scale REGEX --by F    whole parameters",
            )
        if held != count * hidden:
            raise SurgeryError(
                f"{name} has {held} elements here, and {heads} heads of {width} with {groups} keys "
                f"make {count} rows of {hidden}",
                next="ckptsurgeon scale REGEX --by F    whole parameters",
            )
        tensors.refuse_split(name, (each + 2 if fused else 1) * width * hidden)
    for head in range(heads):
        group = head // each
        if fused:
            first = group * (each + 2) * width
            starts = first + head % each * width, first + each * width
        else:
            starts = head * width, group * width
        places = []
        for size, suffix in ((hidden, "weight"), (1, "bias")):
            for name, start in zip((query, key), starts, strict=True):
                other = name.removesuffix("weight") + suffix
                places.append(tensors.rows(other, start * size, (start + width) * size))
        yield Head(head, *places)
