"""A Megatron-style GPT: pre-LN, tied or untied head; in the shape of GPT-3, BLOOM or Llama."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .attention import attend
from .config import Config
from .grid import ALONE, Grid
from .kernels import bias_dropout_add_layer_norm, bias_gelu, linear, linear_cross_entropy
from .positions import alibi_bias, alibi_slopes, document_bias, document_positions, rotate
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
        hidden, ffn, bias = config.hidden_size, config.ffn_size, config.add_bias_linear
        self.grid = grid
        self.checkpoint_activations = config.checkpoint_activations
        self.attention, self.relu = config.attention, config.activation_fn == "relu"
        self.swiglu = config.swiglu
        self.hidden_dropout = config.hidden_dropout
        self.attention_dropout = config.attention_dropout
        self.width = hidden // config.num_attention_heads
        self.heads = config.num_attention_heads // grid.tensor_size  # this rank's
        self.groups = config.query_groups // grid.tensor_size
        first = grid.tensor_rank * self.heads
        slopes = alibi_slopes(config.num_attention_heads)[first : first + self.heads]
        self.slopes = tuple(slopes) if config.position_embedding_type == "alibi" else None
        rotates = config.position_embedding_type == "rope"
        self.rotary_base = config.rotary_base if rotates else None
        self.input_layernorm = normalization(config)
        mixed = hidden + 2 * config.query_groups * self.width
        self.query_key_value = ColumnParallelLinear(hidden, mixed, grid, bias)
        self.dense = RowParallelLinear(hidden, hidden, grid, bias)
        self.post_attention_layernorm = normalization(config)
        self.dense_h_to_4h = ColumnParallelLinear(hidden, ffn * (1 + self.swiglu), grid, bias)
        self.dense_4h_to_h = RowParallelLinear(ffn, hidden, grid, bias)
        # Shleifer et al. 2021 (NormFormer): a norm behind the attention, a factor for each of its
        # heads, and a norm behind the activation.
        self.normformer = config.normformer
        if self.normformer:
            self.attention_layernorm = normalization(config)
            self.ffn_layernorm = normalization(config, ffn)
            self.head_scale = nn.Parameter(torch.ones(self.heads))
        self.fused = bias and config.normalization == "LayerNorm" and not self.normformer
        # Layers that write to the residual stream start smaller, so that its variance does not
        # grow with depth.
        depth = math.sqrt(2.0 * config.num_layers)
        with own_seed(config, 2 + number):
            for layer, std in (
                (self.query_key_value, config.init_std_of(hidden)),
                (self.dense, config.init_std_of(hidden) / depth),
                (self.dense_h_to_4h, config.init_std_of(hidden)),
                (self.dense_4h_to_h, config.init_std_of(ffn) / depth),
            ):
                init_normal_(layer.weight, std, grid)

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """`bias` is added to the scores: that of documents."""
        if self.checkpoint_activations and self.training:
            return torch.as_tensor(checkpoint(self._layer, x, bias, use_reentrant=False))
        return self._layer(x, bias)

    def _layer(self, x: Tensor, bias: Tensor | None) -> Tensor:
        context = self._attend(self.input_layernorm(x), bias)
        norm = self.post_attention_layernorm
        if self.fused:
            normed, x = bias_dropout_add_layer_norm(
                self.dense.product(context), self.dense.bias, x,
                norm.weight, norm.bias, norm.eps, self.hidden_dropout if self.training else 0.0,
            )  # fmt: skip
        else:
            attended = self.dense(context)
            if self.normformer:
                attended = self.attention_layernorm(attended)
            x = x + self._drop(attended)
            normed = norm(x)
        hidden = self._activate(self.dense_h_to_4h.product(normed), self.dense_h_to_4h.bias)
        if self.normformer:
            hidden = self.ffn_layernorm(hidden)
        return x + self._drop(self.dense_4h_to_h(hidden))

    def _attend(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Each group of heads has its queries, one key and one value behind one another in the
        matrix, as in Megatron, so that tensor ranks cut between groups."""
        batch, length, _ = x.shape
        queries = self.heads // self.groups
        mixed = self.query_key_value(x).view(batch, length, self.groups, (queries + 2) * self.width)
        query, key, value = mixed.split([queries * self.width, self.width, self.width], dim=-1)
        query = query.reshape(batch, length, self.heads, self.width).transpose(1, 2)
        key, value = key.transpose(1, 2), value.transpose(1, 2)
        if self.rotary_base is not None:
            query, key = rotate(query, self.rotary_base), rotate(key, self.rotary_base)
        if self.slopes is not None:
            alibi = alibi_bias(self.slopes, length, (query.dtype, str(query.device)))
            bias = alibi if bias is None else alibi + bias
        dropout = self.attention_dropout if self.training else 0.0
        with own_random_numbers(self.grid, dropout > 0):  # for other heads
            context = attend(query, key, value, self.attention, dropout, bias)
        context = context.transpose(1, 2)
        if self.normformer:
            context = context * self.head_scale[:, None]
        return context.reshape(batch, length, self.heads * self.width)

    def _activate(self, x: Tensor, bias: Tensor | None) -> Tensor:
        if self.swiglu:
            # Rows 2i and 2i + 1 are gate and up of unit i: tensor ranks cut between units.
            x = x if bias is None else x + bias
            gate, up = x.view(*x.shape[:-1], -1, 2).unbind(-1)
            return torch.as_tensor(F.silu(gate) * up)
        if self.relu:
            return F.relu(x if bias is None else x + bias)
        return F.gelu(x, approximate="tanh") if bias is None else bias_gelu(x, bias)

    def _drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.hidden_dropout, self.training)


class WordEmbedding(VocabParallelEmbedding):
    """Token ids [b, s] in, vectors [b, s, h] out."""

    def __init__(self, config: Config, grid: Grid) -> None:
        super().__init__(config.padded_vocab_size, config.hidden_size, grid)
        with own_seed(config, 0):
            init_normal_(self.weight, config.init_std, grid)


class Embedded(nn.Module):
    """What happens to the word vectors [b, s, h] on their way to the layers: scaled with
    `scale_embeddings`, normed with `embed_layernorm`, and some are dropped."""

    def __init__(self, config: Config, grid: Grid) -> None:
        super().__init__()
        self._prepare(config)

    def _prepare(self, config: Config) -> None:
        self.scale = math.sqrt(config.hidden_size) if config.scale_embeddings else None
        self.layernorm = (
            nn.LayerNorm(config.hidden_size, eps=config.layernorm_epsilon)
            if config.embed_layernorm
            else None
        )
        self.dropout = config.dropout_of_embeddings

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """`positions` [b, s] are other ones than those in the sample."""
        if self.scale is not None:
            x = x * self.scale
        if self.layernorm is not None:
            x = self.layernorm(x)
        return F.dropout(self._placed(x, positions), self.dropout, self.training)

    def _placed(self, x: Tensor, positions: Tensor | None) -> Tensor:
        return x


class PositionEmbedding(Embedded, nn.Embedding):
    """Adds the vector of each position as well."""

    def __init__(self, config: Config, grid: Grid) -> None:
        nn.Embedding.__init__(self, config.seq_length, config.hidden_size)
        self._prepare(config)
        if config.position_init == "sinusoidal":
            sinusoids_(self.weight)
        else:
            with own_seed(config, 1):
                init_normal_(self.weight, config.init_std, grid)

    def _placed(self, x: Tensor, positions: Tensor | None) -> Tensor:
        if positions is None:
            return x + self.weight[: x.shape[1]]
        return x + F.embedding(positions, self.weight)


def embedded_class(config: Config) -> type[Embedded]:
    """ALiBi and rotations take the place of learned positions."""
    return PositionEmbedding if config.position_embedding_type == "learned_absolute" else Embedded


def normalization_class(config: Config) -> type[nn.Module]:
    return nn.RMSNorm if config.normalization == "RMSNorm" else nn.LayerNorm


def normalization(config: Config, width: int | None = None) -> Any:
    """A norm over `width` elements, of the hidden size where it is left out."""
    return normalization_class(config)(width or config.hidden_size, eps=config.layernorm_epsilon)


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
        self.position_embeddings = embedded_class(config)(config, grid)
        self.layers = nn.ModuleList(Block(config, grid, n) for n in range(config.num_layers))
        self.final_layernorm = normalization(config)
        self.head = Head(config, grid) if config.untie_embeddings else None
        self.eod = -1 if config.eod_token is None else config.eod_token
        self.reset_position_ids = config.reset_position_ids
        self.reset_attention_mask = config.reset_attention_mask

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        positions = bias = None
        if self.reset_position_ids:
            positions = document_positions(tokens, self.eod)
        x = self.position_embeddings(self.word_embeddings(tokens), positions)
        if self.reset_attention_mask:
            bias = document_bias(tokens, self.eod, x.dtype)
        for layer in self.layers:
            x = layer(x, bias)
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
