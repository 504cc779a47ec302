"""The page for GPT-2 of transformers and the bundled trainer: of any sizes each element is where
both have it, moments too, and there and back is the step that was saved."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.numbered_steps import Tensors, filled, same, saved

PAGE = "gpt2-huggingface-bundled"
LAYER = {
    "ln_1": "input_layernorm", "attn.c_attn": "query_key_value", "attn.c_proj": "dense",
    "ln_2": "post_attention_layernorm", "mlp.c_fc": "dense_h_to_4h",
    "mlp.c_proj": "dense_4h_to_h",
}  # fmt: skip


class Sizes(NamedTuple):
    layers: int
    heads: int
    width: int
    inner: int
    tokens: int


def gpt2(sizes: Sizes, seed: int) -> Tensors:
    """The parameters of transformers' model, by name and shape."""
    hidden = sizes.heads * sizes.width
    shapes = {"wte.weight": (sizes.tokens, hidden), "wpe.weight": (5, hidden)}
    outs = {"attn.c_attn": 3 * hidden, "mlp.c_fc": sizes.inner}
    for i in range(sizes.layers):
        for name in LAYER:
            out = outs.get(name, hidden)
            wide = sizes.inner if name == "mlp.c_proj" else hidden
            shapes[f"h.{i}.{name}.weight"] = (out,) if "ln" in name else (wide, out)
            shapes[f"h.{i}.{name}.bias"] = (out,)
    shapes |= {f"ln_f.{kind}": (hidden,) for kind in ("weight", "bias")}
    maker = torch.Generator().manual_seed(seed)
    return {f"transformer.{n}": torch.randn(s, generator=maker) for n, s in shapes.items()}


def bundled(sizes: Sizes, tensors: Tensors) -> Tensors:
    """The same model as the bundled trainer has it."""
    ends = {"wte.weight": "word_embeddings.weight", "wpe.weight": "position_embeddings.weight"}
    out = {}
    for name, tensor in tensors.items():
        parts = name.removeprefix("transformer.").split(".")
        if parts[0] == "h":
            inner = ".".join(parts[2:-1])
            if parts[-1] == "weight" and "ln" not in inner:
                tensor = tensor.t()
            if inner == "attn.c_attn":
                split = tensor.reshape(3, sizes.heads, sizes.width, *tensor.shape[1:])
                tensor = split.transpose(0, 1).reshape(tensor.shape)
            out[f"layers.{parts[1]}.{LAYER[inner]}.{parts[-1]}"] = tensor.contiguous()
        elif parts[0] == "ln_f":
            out[f"final_layernorm.{parts[-1]}"] = tensor
        else:
            out[ends[".".join(parts)]] = tensor
    return out


SIZES = st.builds(
    Sizes, st.integers(1, 2), st.integers(1, 4), st.integers(1, 3), st.integers(1, 9),
    st.integers(1, 7),
)  # fmt: skip


@given(SIZES)
@settings(max_examples=8)
@pytest.mark.long
def test_each_element_is_where_both_models_have_it_and_comes_back(sizes: Sizes) -> None:
    models = [gpt2(sizes, seed) for seed in range(3)]
    wanted = [bundled(sizes, model) for model in models]
    with TemporaryDirectory() as place:
        folder = Path(place)
        others: list[Any] = [[gpt2(sizes, 9 - seed) for seed in range(3)] for _ in range(2)]
        config = {"model_type": "gpt2", "n_head": sizes.heads}
        source = saved(folder / "source", 3, models, config)
        there = saved(folder / "there", 1, [bundled(sizes, m) for m in others[0]], config)
        back = saved(folder / "back", 1, others[1], config)
        assert same(filled(there, source, PAGE), wanted)
        assert same(filled(back, there, PAGE), models)
