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
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from tests.support.in_process import one_rank
from tests.support.llamas import EPS, RATE


class Sizes(NamedTuple):
    """Those of train/configs/tiny.yaml, by the names of its keys; `words` is the vocabulary."""

    num_layers: int = 2
    hidden_size: int = 32
    num_attention_heads: int = 2
    ffn_hidden_size: int = 128
    seq_length: int = 32
    words: int = 256
    untie_embeddings: bool = False


TINY = Sizes()


class Attention(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.heads = sizes.num_attention_heads
        self.query_key_value = nn.Linear(sizes.hidden_size, 3 * sizes.hidden_size)
        self.dense = nn.Linear(sizes.hidden_size, sizes.hidden_size)

    def forward(self, x: Any) -> Any:
        """Of each head its query, key and value lie behind one another."""
        batch, length, hidden = x.shape
        mixed = self.query_key_value(x).reshape(batch, length, self.heads, 3, -1)
        query, key, value = (mixed[:, :, :, i].transpose(1, 2) for i in range(3))
        out = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.dense(out.transpose(1, 2).reshape(batch, length, hidden))


class Mlp(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.dense_h_to_4h = nn.Linear(sizes.hidden_size, sizes.ffn_hidden_size)
        self.dense_4h_to_h = nn.Linear(sizes.ffn_hidden_size, sizes.hidden_size)

    def forward(self, x: Any) -> Any:
        return self.dense_4h_to_h(functional.gelu(self.dense_h_to_4h(x), approximate="tanh"))


class Layer(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.input_layernorm = nn.LayerNorm(sizes.hidden_size)
        self.self_attention = Attention(sizes)
        self.post_attention_layernorm = nn.LayerNorm(sizes.hidden_size)
        self.mlp = Mlp(sizes)

    def forward(self, x: Any) -> Any:
        x = x + self.self_attention(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class GPT(nn.Module):
    """It returns the loss."""

    def __init__(self, sizes: Sizes = TINY) -> None:
        super().__init__()
        hidden = sizes.hidden_size
        self.language_model = inside = nn.Module()
        inside.embedding, inside.encoder = nn.Module(), nn.Module()
        inside.embedding.word_embeddings = nn.Embedding(sizes.words, hidden)
        inside.embedding.position_embeddings = nn.Embedding(sizes.seq_length, hidden)
        inside.encoder.layers = nn.ModuleList(Layer(sizes) for _ in range(sizes.num_layers))
        inside.encoder.final_layernorm = nn.LayerNorm(hidden)
        if sizes.untie_embeddings:
            inside.output_layer = nn.Linear(hidden, sizes.words, bias=False)
        for parameter in self.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, words: Any, targets: Any) -> Any:
        inside = self.language_model
        words_in = inside.embedding.word_embeddings
        x = words_in(words) + inside.embedding.position_embeddings(torch.arange(words.shape[1]))
        for layer in inside.encoder.layers:
            x = layer(x)
        head = getattr(inside, "output_layer", words_in)
        out = inside.encoder.final_layernorm(x) @ head.weight.t()
        return functional.cross_entropy(out.flatten(0, 1), targets.flatten())

    def nested(self, *_: Any, **__: Any) -> dict[str, Any]:
        """As Megatron's `state_dict_for_save_checkpoint` has it, in place of `state_dict`."""
        embedding, encoder = self.language_model.embedding, self.language_model.encoder
        parts = {name: part.state_dict() for name, part in embedding.named_children()}
        out = {"embedding": parts, "encoder": encoder.state_dict()}
        if hasattr(self.language_model, "output_layer"):
            out["output_layer"] = self.language_model.output_layer.state_dict()
        return {"language_model": out}


def engine(seed: int, sizes: Sizes = TINY) -> Any:
    import deepspeed

    torch.manual_seed(seed)
    model = GPT(sizes)
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
        seen[step] = update(made, held["inputs"][rows], held["targets"][rows])
    save(made, root, stop * held["batch"])
    return seen


def update(made: Any, inputs: Any, targets: Any) -> float:
    """The loss before it."""
    loss = made(inputs.long(), targets.long())
    made.backward(loss)
    made.step()
    return float(loss.detach())


def save(made: Any, root: Path, samples: int) -> None:
    made.module.state_dict = made.module.nested
    args = Namespace(consumed_train_samples=samples, seed=1234)
    state = {"iteration": made.global_steps, "args": args, "checkpoint_version": 3.0}
    made.save_checkpoint(str(root), client_state=state)


if __name__ == "__main__":
    root, stop, seed, batches = sys.argv[1:]
    with one_rank():
        found = main(Path(root), int(stop), int(seed), Path(batches))
    print(json.dumps(found))
