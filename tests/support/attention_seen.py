"""The attention logits that a model of transformers computes: queries and keys as its own modules
hand them to the attention, for inputs that are given in place of the words' vectors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

NAME = "logits_seen"
Seen = list[torch.Tensor]


@contextmanager
def watched(model: Any) -> Iterator[Seen]:
    """What each layer's attention is given while this is open: [heads, queries, keys], scaled, and
    before mask and softmax."""
    seen: Seen = []

    def keep(query: torch.Tensor, key: torch.Tensor, scaling: float) -> None:
        query, key = query[0].double(), key[0].double()
        key = key.repeat_interleave(len(query) // len(key), 0)
        seen.append(query @ key.mT * scaling)

    kind = model.config.model_type
    if kind in ("bloom", "falcon"):  # they compute their attention themselves
        yield from _split(model, keep, seen)
        return
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    def attention(module: Any, query: Any, key: Any, value: Any, mask: Any, **more: Any) -> Any:
        keep(query, key, more.get("scaling") or query.shape[-1] ** -0.5)
        return sdpa_attention_forward(module, query, key, value, mask, **more)

    AttentionInterface.register(NAME, attention)
    model.set_attn_implementation(NAME)
    yield seen


def _split(model: Any, keep: Any, seen: Seen) -> Iterator[Seen]:
    """By what splits the fused rows in these models; their positions are added later, or rotate."""
    hooks = []
    for module in model.modules():
        if hasattr(module, "query_key_value"):
            split = getattr(module, "_reshape", None) or module._split_heads

            def hook(_: Any, __: Any, out: Any, split: Any = split) -> None:
                query, key = (each for each in split(out)[:2])
                if query.shape[1] == out.shape[1]:  # falcon: positions before heads
                    query, key = query.transpose(1, 2), key.transpose(1, 2)
                keep(query, key, query.shape[-1] ** -0.5)

            hooks.append(module.query_key_value.register_forward_hook(hook))
    yield seen
    for each in hooks:
        each.remove()


def logits(model: Any, inputs: torch.Tensor) -> Seen:
    """Of every layer, for inputs [count, hidden] that all stand at position 0: a rotary embedding
    turns none against another."""
    with torch.no_grad(), watched(model) as seen:
        more: dict[str, Any] = {}
        if model.config.model_type != "bloom":
            more["position_ids"] = torch.zeros(1, len(inputs), dtype=torch.long)
        model(inputs_embeds=inputs[None].to(model.dtype), use_cache=False, **more)
    return seen
