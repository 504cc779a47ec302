"""A Megatron-style GPT: pre-LN, learned positions, biases, tied or untied head."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .attention import attend
from .config import Config


class Block(nn.Module):
    """One transformer layer: causal self-attention and an MLP, each behind its LayerNorm."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        hidden, ffn = config.hidden_size, config.ffn_size
        self.attention, self.relu = config.attention, config.activation_fn == "relu"
        self.hidden_dropout = config.hidden_dropout
        self.attention_dropout = config.attention_dropout
        self.heads = config.num_attention_heads
        self.input_layernorm = nn.LayerNorm(hidden, eps=config.layernorm_epsilon)
        self.query_key_value = nn.Linear(hidden, 3 * hidden)
        self.dense = nn.Linear(hidden, hidden)
        self.post_attention_layernorm = nn.LayerNorm(hidden, eps=config.layernorm_epsilon)
        self.dense_h_to_4h = nn.Linear(hidden, ffn)
        self.dense_4h_to_h = nn.Linear(ffn, hidden)
        # Layers that write to the residual stream start smaller, so that its variance does not
        # grow with depth.
        scaled = config.init_std / math.sqrt(2.0 * config.num_layers)
        for layer, std in (
            (self.query_key_value, config.init_std),
            (self.dense, scaled),
            (self.dense_h_to_4h, config.init_std),
            (self.dense_4h_to_h, scaled),
        ):
            nn.init.normal_(layer.weight, 0.0, std)
            nn.init.zeros_(layer.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self._drop(self.dense(self._attend(self.input_layernorm(x))))
        hidden = self._activate(self.dense_h_to_4h(self.post_attention_layernorm(x)))
        return x + self._drop(self.dense_4h_to_h(hidden))

    def _attend(self, x: Tensor) -> Tensor:
        batch, length, hidden = x.shape
        mixed = self.query_key_value(x).view(batch, length, self.heads, 3 * hidden // self.heads)
        query, key, value = mixed.transpose(1, 2).chunk(3, dim=-1)
        dropout = self.attention_dropout if self.training else 0.0
        context = attend(query, key, value, self.attention, dropout)
        return context.transpose(1, 2).reshape(batch, length, hidden)

    def _activate(self, x: Tensor) -> Tensor:
        return F.relu(x) if self.relu else F.gelu(x, approximate="tanh")

    def _drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.hidden_dropout, self.training)


class GPT(nn.Module):
    """Tokens [b, s] and targets [b, s] in, mean cross-entropy (a scalar, fp32) out."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        hidden, vocab = config.hidden_size, config.padded_vocab_size
        self.word_embeddings = nn.Embedding(vocab, hidden)
        self.position_embeddings = nn.Embedding(config.seq_length, hidden)
        nn.init.normal_(self.word_embeddings.weight, 0.0, config.init_std)
        if config.position_init == "sinusoidal":
            sinusoids_(self.position_embeddings.weight)
        else:
            nn.init.normal_(self.position_embeddings.weight, 0.0, config.init_std)
        self.word_embeddings_layernorm = (
            nn.LayerNorm(hidden, eps=config.layernorm_epsilon) if config.embed_layernorm else None
        )
        self.hidden_dropout = config.hidden_dropout
        self.layers = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.final_layernorm = nn.LayerNorm(hidden, eps=config.layernorm_epsilon)
        self.head = nn.Linear(hidden, vocab, bias=False) if config.untie_embeddings else None
        if self.head is not None:
            nn.init.normal_(self.head.weight, 0.0, config.init_std)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.word_embeddings(tokens)
        if self.word_embeddings_layernorm is not None:
            x = self.word_embeddings_layernorm(x)
        x = x + self.position_embeddings.weight[: tokens.shape[1]]
        x = F.dropout(x, self.hidden_dropout, self.training)
        for layer in self.layers:
            x = layer(x)
        head = self.word_embeddings if self.head is None else self.head
        logits = F.linear(self.final_layernorm(x), head.weight)
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())

    def parameters_without_embeddings(self) -> int:
        """What Megatron's `gigaflos without embeddings` counts."""
        embeddings = [self.word_embeddings, self.position_embeddings]
        if self.head is not None:
            embeddings.append(self.head)  # type: ignore[arg-type]
        total = sum(p.numel() for p in self.parameters())
        return total - sum(p.numel() for m in embeddings for p in m.parameters())


@torch.no_grad()
def sinusoids_(weight: Tensor) -> None:
    """Fill [positions, h] as Vaswani et al. (2017): sines in even columns, cosines in odd ones."""
    positions, hidden = weight.shape
    rates = torch.exp(torch.arange(0, hidden, 2) * (-math.log(10000.0) / hidden))
    angles = torch.arange(positions)[:, None] * rates
    weight[:, 0::2] = angles.sin()
    weight[:, 1::2] = angles.cos()[:, : hidden // 2]
