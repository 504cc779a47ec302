"""A Megatron-style GPT: pre-LN, learned positions, tanh-GELU, biases, tied or untied head."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .config import Config


class Block(nn.Module):
    """One transformer layer: causal self-attention and a 4h MLP, each behind its LayerNorm."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.heads = config.num_attention_heads
        self.input_layernorm = nn.LayerNorm(hidden, eps=config.layernorm_epsilon)
        self.query_key_value = nn.Linear(hidden, 3 * hidden)
        self.dense = nn.Linear(hidden, hidden)
        self.post_attention_layernorm = nn.LayerNorm(hidden, eps=config.layernorm_epsilon)
        self.dense_h_to_4h = nn.Linear(hidden, 4 * hidden)
        self.dense_4h_to_h = nn.Linear(4 * hidden, hidden)
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
        x = x + self.dense(self._attend(self.input_layernorm(x)))
        hidden = F.gelu(self.dense_h_to_4h(self.post_attention_layernorm(x)), approximate="tanh")
        return x + torch.as_tensor(self.dense_4h_to_h(hidden))

    def _attend(self, x: Tensor) -> Tensor:
        batch, length, hidden = x.shape
        mixed = self.query_key_value(x).view(batch, length, self.heads, 3 * hidden // self.heads)
        query, key, value = mixed.transpose(1, 2).chunk(3, dim=-1)
        context = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return context.transpose(1, 2).reshape(batch, length, hidden)


class GPT(nn.Module):
    """Tokens [b, s] and targets [b, s] in, mean cross-entropy (a scalar, fp32) out."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        hidden, vocab = config.hidden_size, config.padded_vocab_size
        self.word_embeddings = nn.Embedding(vocab, hidden)
        self.position_embeddings = nn.Embedding(config.seq_length, hidden)
        nn.init.normal_(self.word_embeddings.weight, 0.0, config.init_std)
        nn.init.normal_(self.position_embeddings.weight, 0.0, config.init_std)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.final_layernorm = nn.LayerNorm(hidden, eps=config.layernorm_epsilon)
        self.head = nn.Linear(hidden, vocab, bias=False) if config.untie_embeddings else None
        if self.head is not None:
            nn.init.normal_(self.head.weight, 0.0, config.init_std)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.word_embeddings(tokens) + self.position_embeddings.weight[: tokens.shape[1]]
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
