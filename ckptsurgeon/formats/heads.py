"""Which rows of which weights make the queries and keys of each attention head.

Fused rows lie in Megatron's order, where a group of heads has its queries, one key and one value
behind one another, or in blocks, where each rank has its queries, its keys, its values. A tensor
rank holds whole heads; a chunk of torch's shards holds any rows.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.formats.sane import mapping
from ckptsurgeon.formats.values import Part

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


PLAIN = frozenset(
    ("llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "phi", "phi3", "stablelm", "starcoder2",
     "smollm3", "gpt_neox", "bloom", "falcon")
)  # fmt: skip
"""Types of transformers' models whose logits are q·k / √width: a test asks its modules."""
WITH_QK_NORM = frozenset(
    ("qwen3", "qwen3_moe", "olmo2", "olmo3", "olmoe", "gemma3_text", "llama4_text")
)
"""Those that normalize queries and keys."""


def of_megatron(args: Mapping[str, Any], what: str) -> Model:
    """By the command line that a checkpoint keeps, or Megatron-core's config. Raises SurgeryError
    where it does not say, and where other numbers decide the logits as well."""
    heads, hidden = args.get("num_attention_heads"), args.get("hidden_size")
    groups = args.get("num_query_groups") if args.get("group_query_attention", True) else None
    if args.get("qk_layernorm") or args.get("qk_l2_norm"):
        raise _normed(what)
    if args.get("multi_latent_attention"):
        raise unknown(what, "its attention is latent (MLA), whose queries and keys lie otherwise")
    if args.get("use_mup") or args.get("softmax_scale") is not None:
        raise unknown(what, "its logits are scaled by a number of its own, not by √width")
    groups = args.get("num_key_value_heads") if groups is None else groups
    plus_one = args.get("apply_layernorm_1p") or args.get("layernorm_zero_centered_gamma")
    return _model(what, hidden, heads, groups, args.get("kv_channels"), bool(plus_one))


def of_hugging_face(config: Mapping[str, Any], what: str) -> Model:
    """By `config.json` of transformers. Raises SurgeryError where it does not say, and for a type
    whose attention is not known here."""
    kind = str(config.get("model_type"))
    if kind in WITH_QK_NORM:
        raise _normed(what)
    if kind not in PLAIN:
        raise unknown(what, f"config.json has the model_type {kind}, which is none known here")
    names = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    hidden, heads, groups, width = (config.get(name) for name in names)
    if kind in ("bloom", "gpt_neox"):
        heads, groups = config.get("n_head", heads), None
    if kind == "falcon":
        groups = 1 if config.get("multi_query") else None
        groups = config.get("num_kv_heads") if config.get("new_decoder_architecture") else groups
    return _model(what, hidden, heads, groups, width)


OLD_ORDER = "its fused rows are in the order of checkpoint_version 0 or 1"
"""Why the rows of Megatron's first checkpoints are not known."""
CONFIG = "put the config.json that transformers saved of the model into the step, and repeat"
"""What helps where a step keeps no config of its own."""


def of_nanotron(config: Mapping[str, Any], what: str) -> Model:
    """By nanotron's `config.yaml`. Raises SurgeryError where it does not say, and for µP, which
    scales logits by 1 / width."""
    model = mapping(config.get("model"))
    if mapping(model.get("init_method")).get("use_mup"):
        raise unknown(what, "its logits are scaled by 1 / width (µP), not by √width")
    names = ("hidden_size", "num_attention_heads", "num_key_value_heads")
    hidden, heads, groups = map(mapping(model.get("model_config")).get, names)
    return _model(what, hidden, heads, groups, None)


def of_olmo_core(config: Mapping[str, Any], what: str) -> Model:
    """By the model of OLMo-core's config. Raises SurgeryError where it does not say, and for a
    block without a plain norm before its attention."""
    model = mapping(config.get("model"))
    block = mapping(model.get("block"))
    mixer = mapping(block.get("sequence_mixer") or block.get("attention"))
    if model.get("block_overrides") or block.get("name") not in (None, "default", "peri_norm"):
        raise unknown(what, "the blocks of its model have no plain norm before the attention")
    if mixer.get("name") not in (None, "default") or mixer.get("clip_qkv") is not None:
        raise unknown(what, "its attention is not OLMo-core's default one")
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


def unsaid(what: str, *helps: str) -> SurgeryError:
    """The error for a checkpoint without a number of heads; `helps` are what to do about it."""
    return unknown(what, "it does not say how many attention heads its model has", *helps)


def unread(what: str) -> SurgeryError:
    """The error for a format of which nothing that would say a number of heads is read."""
    return unknown(what, "nothing that is read of it says how many attention heads its model has")


def unknown(what: str, why: str, *helps: str) -> SurgeryError:
    """The error for a checkpoint whose heads can't be told apart, and why."""
    own = "ckptsurgeon scale REGEX --by F    whole parameters, by a factor of your own"
    return SurgeryError(
        f"which rows of {what} are the queries and keys of a head is not known: {why}",
        next=(*helps, own),
    )


def _normed(what: str) -> SurgeryError:
    return SurgeryError(
        f"the queries and keys of {what} are normalized, so their weights do not decide how large "
        "the logits are",
        next="ckptsurgeon scale q_norm --by F    the gains of the norm decide it",
    )


# --- where the rows are --------------------------------------------------------------------------


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
                f"{name} is cut inside a head: {len(self.extents[name])} ranks hold it, which is "
                "no layout known here",
                next="ckptsurgeon scale REGEX --by F    whole parameters",
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
