"""What a checkpoint says of how many attention heads its model has, or why that is not known."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.formats.fields.understood import mapping
from ckptsurgeon.hints import command

PLAIN = frozenset(
    ("llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "phi", "phi3", "stablelm", "starcoder2",
     "smollm3", "gpt_neox", "bloom", "falcon")
)  # fmt: skip
"""Types of transformers' models whose logits are q·k / √width: a test asks its modules."""
WITH_QK_NORM = frozenset(
    ("qwen3", "qwen3_moe", "olmo2", "olmo3", "olmoe", "gemma3_text", "llama4_text")
)
"""Those that normalize queries and keys."""
OLD_ORDER = "its fused rows are in the order of checkpoint_version 0 or 1"
"""Why the rows of Megatron's first checkpoints are not known."""
CONFIG = "put the config.json that transformers saved of the model into the step, and repeat"
"""What helps where a step keeps no config of its own."""


class Model(NamedTuple):
    """What a checkpoint says of its attention: `width` is that of a head, `groups` is how many keys
    there are, `plus_one` whether the gain of a norm is 1 more than what is kept."""

    hidden: int
    heads: int
    groups: int
    width: int
    plus_one: bool = False


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
    own = command("scale", "REGEX", "--by", "F", why="whole parameters, by a factor of your own")
    return SurgeryError(
        f"it is not known which rows of {what} are the queries and keys of a head: {why}",
        next=(*helps, own),
    )


def _normed(what: str) -> SurgeryError:
    return SurgeryError(
        f"the queries and keys of {what} are normalized, so their weights do not decide how large "
        "the logits are",
        next=command("scale", "q_norm", "--by", "F", why="the gains of the norm decide it"),
    )
