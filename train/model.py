"""A Megatron-style GPT: pre-LN, learned positions, biases, tied or untied head."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .attention import attend
from .config import Config
from .grid import ALONE, Grid
from .kernels import bias_dropout_add_layer_norm, bias_gelu, linear, linear_cross_entropy
from .tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    copy_to_group,
    init_normal_,
    mark_split,
    own_random_numbers,
    vocab_parallel_cross_entropy,
)


class Block(nn.Module):
    """One transformer layer: causal self-attention and an MLP, each behind its LayerNorm."""

    def __init__(self, config: Config, grid: Grid, number: int) -> None:
        super().__init__()
        hidden, ffn = config.hidden_size, config.ffn_size
        self.grid = grid
        self.checkpoint_activations = config.checkpoint_activations
        self.attention, self.relu = config.attention, config.activation_fn == "relu"
        self.hidden_dropout = config.hidden_dropout
        self.attention_dropout = config.attention_dropout
        self.heads = config.num_attention_heads // grid.tensor_size  # this rank's
        self.input_layernorm = nn.LayerNorm(hidden, eps=config.layernorm_epsilon)
        self.query_key_value = ColumnParallelLinear(hidden, 3 * hidden, grid)
        self.dense = RowParallelLinear(hidden, hidden, grid)
        self.post_attention_layernorm = nn.LayerNorm(hidden, eps=config.layernorm_epsilon)
        self.dense_h_to_4h = ColumnParallelLinear(hidden, ffn, grid)
        self.dense_4h_to_h = RowParallelLinear(ffn, hidden, grid)
        # Layers that write to the residual stream start smaller, so that its variance does not
        # grow with depth.
        scaled = config.init_std / math.sqrt(2.0 * config.num_layers)
        with own_seed(config, 2 + number):
            for layer, std in (
                (self.query_key_value, config.init_std),
                (self.dense, scaled),
                (self.dense_h_to_4h, config.init_std),
                (self.dense_4h_to_h, scaled),
            ):
                init_normal_(layer.weight, std, grid)

    def forward(self, x: Tensor) -> Tensor:
        if self.checkpoint_activations and self.training:
            return torch.as_tensor(checkpoint(self._layer, x, use_reentrant=False))
        return self._layer(x)

    def _layer(self, x: Tensor) -> Tensor:
        context = self._attend(self.input_layernorm(x))
        norm = self.post_attention_layernorm
        normed, x = bias_dropout_add_layer_norm(
            self.dense.product(context), self.dense.bias, x,
            norm.weight, norm.bias, norm.eps, self.hidden_dropout if self.training else 0.0,
        )  # fmt: skip
        hidden = self._activate(self.dense_h_to_4h.product(normed), self.dense_h_to_4h.bias)
        return x + self._drop(self.dense_4h_to_h(hidden))

    def _attend(self, x: Tensor) -> Tensor:
        mixed = self.query_key_value(x)
        batch, length, width = mixed.shape
        mixed = mixed.view(batch, length, self.heads, width // self.heads)
        query, key, value = mixed.transpose(1, 2).chunk(3, dim=-1)
        dropout = self.attention_dropout if self.training else 0.0
        with own_random_numbers(self.grid, dropout > 0):  # for other heads
            context = attend(query, key, value, self.attention, dropout)
        return context.transpose(1, 2).reshape(batch, length, width // 3)

    def _activate(self, x: Tensor, bias: Tensor) -> Tensor:
        return F.relu(x + bias) if self.relu else bias_gelu(x, bias)

    def _drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.hidden_dropout, self.training)


class WordEmbedding(VocabParallelEmbedding):
    """Token ids [b, s] in, vectors [b, s, h] out."""

    def __init__(self, config: Config, grid: Grid) -> None:
        super().__init__(config.padded_vocab_size, config.hidden_size, grid)
        with own_seed(config, 0):
            init_normal_(self.weight, config.init_std, grid)


class PositionEmbedding(nn.Embedding):
    """Adds the vector of each position to the word vectors [b, s, h], which pass a LayerNorm
    first with `embed_layernorm`, and drops some."""

    def __init__(self, config: Config, grid: Grid) -> None:
        super().__init__(config.seq_length, config.hidden_size)
        if config.position_init == "sinusoidal":
            sinusoids_(self.weight)
        else:
            with own_seed(config, 1):
                init_normal_(self.weight, config.init_std, grid)
        self.layernorm = (
            nn.LayerNorm(config.hidden_size, eps=config.layernorm_epsilon)
            if config.embed_layernorm
            else None
        )
        self.hidden_dropout = config.hidden_dropout

    def forward(self, x: Tensor) -> Tensor:
        if self.layernorm is not None:
            x = self.layernorm(x)
        return F.dropout(x + self.weight[: x.shape[1]], self.hidden_dropout, self.training)


class Head(nn.Module):
    """The output matrix of a model that does not use its word embeddings twice."""

    def __init__(self, config: Config, grid: Grid) -> None:
        super().__init__()
        self.weight = nn.Parameter(
            torch.empty(config.padded_vocab_size // grid.tensor_size, config.hidden_size)
        )
        mark_split(self.weight, 0, grid)
        with own_seed(config, 2 + config.num_layers):
            init_normal_(self.weight, config.init_std, grid)


def language_model_loss(x: Tensor, matrix: Tensor, targets: Tensor, grid: Grid) -> Tensor:
    """Mean cross-entropy (a scalar, fp32) of x [b, s, h] times the rank's rows of the output
    matrix, against targets [b, s]."""
    if grid.tensor_size == 1:
        return linear_cross_entropy(x, matrix, targets)
    logits = linear(copy_to_group(x, grid), matrix).flatten(0, 1)
    return vocab_parallel_cross_entropy(logits, targets.flatten(), grid).mean()


class GPT(nn.Module):
    """Tokens [b, s] and targets [b, s] in, mean cross-entropy (a scalar, fp32) out."""

    def __init__(self, config: Config, grid: Grid = ALONE) -> None:
        super().__init__()
        self.grid = grid
        self.word_embeddings = WordEmbedding(config, grid)
        self.position_embeddings = PositionEmbedding(config, grid)
        self.layers = nn.ModuleList(Block(config, grid, n) for n in range(config.num_layers))
        self.final_layernorm = nn.LayerNorm(config.hidden_size, eps=config.layernorm_epsilon)
        self.head = Head(config, grid) if config.untie_embeddings else None

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.position_embeddings(self.word_embeddings(tokens))
        for layer in self.layers:
            x = layer(x)
        head = self.word_embeddings if self.head is None else self.head
        return language_model_loss(self.final_layernorm(x), head.weight, targets, self.grid)


@contextmanager
def own_seed(config: Config, layer: int) -> Iterator[None]:
    """Draw the weights of one layer from its own seed: they are the same whichever rank builds
    it, and whatever else that rank builds."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed + 100_003 * layer)
        yield


@torch.no_grad()
def sinusoids_(weight: Tensor) -> None:
    """Fill [positions, h] as Vaswani et al. (2017): sines in even columns, cosines in odd ones."""
    positions, hidden = weight.shape
    rates = torch.exp(torch.arange(0, hidden, 2) * (-math.log(10000.0) / hidden))
    angles = torch.arange(positions)[:, None] * rates
    weight[:, 0::2] = angles.sin()
    weight[:, 1::2] = angles.cos()[:, : hidden // 2]
