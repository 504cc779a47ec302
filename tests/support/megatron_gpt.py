"""A GPT with the names, the order of rows and the nested state dict of Megatron-DeepSpeed without
pipelines, trained by a real DeepSpeed engine on one CPU. Megatron-DeepSpeed itself is on no package
index and wants a GPU: names and nesting are those of its source.

`python -m tests.support.megatron_gpt RUN STOP SEED BATCHES` trains on to step STOP from where the
engine resumes, on the samples in BATCHES, and prints the losses as JSON.
"""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from tests.support.in_process import one_rank
from tests.support.llamas import EPS, RATE

LAYERS, HIDDEN, HEADS, LENGTH, WORDS = 2, 32, 2, 32, 256
"""Those of train/configs/tiny.yaml."""


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query_key_value = nn.Linear(HIDDEN, 3 * HIDDEN)
        self.dense = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Any) -> Any:
        """Of each head its query, key and value lie behind one another."""
        batch, length, _ = x.shape
        mixed = self.query_key_value(x).reshape(batch, length, HEADS, 3, HIDDEN // HEADS)
        query, key, value = (mixed[:, :, :, i].transpose(1, 2) for i in range(3))
        out = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.dense(out.transpose(1, 2).reshape(batch, length, HIDDEN))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense_h_to_4h = nn.Linear(HIDDEN, 4 * HIDDEN)
        self.dense_4h_to_h = nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x: Any) -> Any:
        return self.dense_4h_to_h(functional.gelu(self.dense_h_to_4h(x), approximate="tanh"))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm, self.self_attention = nn.LayerNorm(HIDDEN), Attention()
        self.post_attention_layernorm, self.mlp = nn.LayerNorm(HIDDEN), Mlp()

    def forward(self, x: Any) -> Any:
        x = x + self.self_attention(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class GPT(nn.Module):
    """It returns the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.language_model = inside = nn.Module()
        inside.embedding, inside.encoder = nn.Module(), nn.Module()
        inside.embedding.word_embeddings = nn.Embedding(WORDS, HIDDEN)
        inside.embedding.position_embeddings = nn.Embedding(LENGTH, HIDDEN)
        inside.encoder.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        inside.encoder.final_layernorm = nn.LayerNorm(HIDDEN)
        for parameter in self.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, words: Any, targets: Any) -> Any:
        inside = self.language_model
        words_in = inside.embedding.word_embeddings
        x = words_in(words) + inside.embedding.position_embeddings(torch.arange(words.shape[1]))
        for layer in inside.encoder.layers:
            x = layer(x)
        out = inside.encoder.final_layernorm(x) @ words_in.weight.t()
        return functional.cross_entropy(out.flatten(0, 1), targets.flatten())

    def nested(self, *_: Any, **__: Any) -> dict[str, Any]:
        """As Megatron's `state_dict_for_save_checkpoint` has it, in place of `state_dict`."""
        embedding, encoder = self.language_model.embedding, self.language_model.encoder
        parts = {name: part.state_dict() for name, part in embedding.named_children()}
        return {"language_model": {"embedding": parts, "encoder": encoder.state_dict()}}


def engine(seed: int) -> Any:
    import deepspeed

    torch.manual_seed(seed)
    model = GPT()
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    adam = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
        lr=RATE, betas=(0.9, 0.999), eps=EPS,
    )  # fmt: skip
    config = {
        "train_micro_batch_size_per_gpu": 8, "steps_per_print": 10**9,
        "zero_optimization": {"stage": 1, "reduce_bucket_size": 1_000_000},
        "zero_allow_untested_optimizer": True,
    }  # fmt: skip
    made, *_ = deepspeed.initialize(model=model, optimizer=adam, config=config)
    return made


def load(src: Any, dst: Any) -> None:
    """What Megatron's own `load_state_dict` does with the nested one."""
    flat = {}
    for inner, tensors in (*src["language_model"]["embedding"].items(), ("", None)):
        flat |= {f"language_model.embedding.{inner}.{k}": v for k, v in (tensors or {}).items()}
    encoder = src["language_model"]["encoder"]
    dst.load_state_dict(flat | {f"language_model.encoder.{k}": v for k, v in encoder.items()})


def main(root: Path, stop: int, seed: int, batches: Path) -> dict[int, float]:
    """Each step from the one that is loaded on, and its loss."""
    held = torch.load(batches)
    made, seen = engine(seed), {}
    if (root / "latest").exists():
        assert made.load_checkpoint(str(root), custom_load_fn=load)[0] is not None
    for step in range(made.global_steps + 1, stop + 1):
        rows = slice((step - 1) * held["batch"], step * held["batch"])
        loss = made(held["inputs"][rows].long(), held["targets"][rows].long())
        made.backward(loss)
        made.step()
        seen[step] = float(loss.detach())
    made.module.state_dict = made.module.nested
    args = Namespace(consumed_train_samples=stop * held["batch"], seed=1234)
    state = {"iteration": stop, "args": args, "checkpoint_version": 3.0}
    made.save_checkpoint(str(root), client_state=state)
    return seen


if __name__ == "__main__":
    root, stop, seed, batches = sys.argv[1:]
    with one_rank():
        found = main(Path(root), int(stop), int(seed), Path(batches))
    print(json.dumps(found))
