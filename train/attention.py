"""Causal self-attention in three forms: torch's fused one, and two that compute the scores."""

from __future__ import annotations

import math

import torch.nn.functional as F
from torch import Tensor

from .kernels import causal_softmax


def attend(
    query: Tensor, key: Tensor, value: Tensor, form: str, dropout: float, bias: Tensor | None = None
) -> Tensor:
    """softmax(q kᵀ / sqrt(d) + bias) v under the causal mask; all [batch, heads, length, d].

    `form` is `sdpa` (torch's own, which never keeps the scores), `plain` or `stable`
    (`attention_scores`). `dropout` is the share of probabilities dropped, 0 outside training. Keys
    and values may have fewer heads: each serves as many neighbouring heads of the query. `bias` is
    [heads, length, length] or has the batch before it, and is -inf above the diagonal.
    """
    if form == "sdpa" and bias is None:
        grouped = key.shape[1] != query.shape[1]
        return F.scaled_dot_product_attention(
            query, key, value, dropout_p=dropout, is_causal=True, enable_gqa=grouped
        )
    served = query.shape[1] // key.shape[1]
    if served > 1:
        key, value = (part.repeat_interleave(served, dim=1) for part in (key, value))
    if form == "sdpa":
        return F.scaled_dot_product_attention(query, key, value, attn_mask=bias, dropout_p=dropout)
    scores = attention_scores(query, key, stable=form == "stable")
    if bias is not None:
        scores = scores + bias
    return F.dropout(causal_softmax(scores), dropout) @ value


def attention_scores(query: Tensor, key: Tensor, stable: bool) -> Tensor:
    """n (q kᵀ) with n = 1/sqrt(d), in the dtype of the inputs.

    The stable form is (√n q)(√n k)ᵀ: in fp16 the product of the plain one passes 65504 and is
    infinite before n can make it small (bigscience Megatron-DeepSpeed pull request 118).
    """
    norm = 1.0 / math.sqrt(query.shape[-1])
    if stable:
        return (math.sqrt(norm) * query) @ (math.sqrt(norm) * key).transpose(-2, -1)
    return norm * (query @ key.transpose(-2, -1))
