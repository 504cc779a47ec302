"""Positions that are no weights: ALiBi's bias, rotations of queries and keys, and documents."""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor


def alibi_slopes(heads: int) -> list[float]:
    """The slope of each head: Press et al. 2022 ("Train Short, Test Long"), and their code for a
    number of heads that is no power of 2."""

    def geometric(count: int) -> list[float]:
        return [2.0 ** (-8.0 * (head + 1) / count) for head in range(count)]

    power = 2 ** math.floor(math.log2(heads))
    return geometric(power) + geometric(2 * power)[0::2][: heads - power]


@lru_cache(maxsize=4)
def alibi_bias(slopes: tuple[float, ...], length: int, like: tuple[torch.dtype, str]) -> Tensor:
    """[heads, length, length]: minus slope x distance below the diagonal, -inf above it."""
    dtype, device = like
    steps = torch.arange(length, device=device)
    distance = (steps[None, :] - steps[:, None]).float()
    bias = torch.tensor(slopes, device=device)[:, None, None] * distance
    return bias.masked_fill(distance > 0, -math.inf).to(dtype)


@lru_cache(maxsize=4)
def rotary_table(length: int, width: int, base: float, device: str) -> tuple[Tensor, Tensor]:
    """Cosine and sine [length, width] of Su et al. 2021 (RoFormer), each angle twice: element i
    turns with i + width / 2, as in GPT-NeoX and Llama."""
    rates = base ** (-torch.arange(0, width, 2, device=device).float() / width)
    angles = torch.arange(length, device=device).float()[:, None] * rates
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, base: float) -> Tensor:
    """x [..., length, width] turned by its positions; the products of two such depend on their
    distance only. Computed in float32."""
    cosine, sine = rotary_table(x.shape[-2], x.shape[-1], base, str(x.device))
    wide = x.float()
    first, second = wide.chunk(2, dim=-1)
    return (wide * cosine + torch.cat((-second, first), dim=-1) * sine).to(x.dtype)


def document_positions(tokens: Tensor, eod: int) -> Tensor:
    """The position of each token [b, s] in its document, which the token `eod` ends; where the
    sample begins in the middle of one, that counts from there. As Megatron's reset_position_ids."""
    places = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    begins = torch.zeros_like(places)
    begins[:, 1:] = torch.where(tokens[:, :-1] == eod, places[:, 1:], 0)
    return places - begins.cummax(dim=1).values


def document_bias(tokens: Tensor, eod: int, dtype: torch.dtype) -> Tensor:
    """[b, 1, s, s]: 0 where a token sees itself and those before it in its document, else -inf. As
    Megatron's reset_attention_mask."""
    ends = (tokens == eod).int()
    number = ends.cumsum(dim=1) - ends
    sees = (number[:, :, None] == number[:, None, :]).tril()
    bias = torch.zeros(sees.shape, dtype=dtype, device=tokens.device)
    return bias.masked_fill(~sees, -math.inf)[:, None]
