"""The shipped pages for Llama: of any sizes each element is where both models have it, moments too,
and there and back is the step that was saved."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptsurgeon import Run, plan
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.recipe.file import from_data
from tests.support.numbered_steps import Tensors, filled, same, saved


class Sizes(NamedTuple):
    """`width` is half of a head's."""

    layers: int
    groups: int
    queries: int
    width: int
    inner: int
    tokens: int

    @property
    def heads(self) -> int:
        return self.groups * self.queries


def llama(sizes: Sizes, seed: int) -> Tensors:
    """The parameters of transformers' model, by name and shape."""
    head = 2 * sizes.width
    hidden, keys = sizes.heads * head, sizes.groups * head
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (sizes.tokens, hidden), "model.norm.weight": (hidden,),
        "lm_head.weight": (sizes.tokens, hidden),
    }  # fmt: skip
    layer: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj": (hidden, hidden), "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden), "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (sizes.inner, hidden), "mlp.up_proj": (sizes.inner, hidden),
        "mlp.down_proj": (hidden, sizes.inner), "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }  # fmt: skip
    for i in range(sizes.layers):
        shapes |= {f"model.layers.{i}.{name}.weight": shape for name, shape in layer.items()}
    maker = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=maker) for name, shape in shapes.items()}


def by_layer(tensors: Tensors) -> tuple[dict[str, Tensors], Tensors]:
    """The parameters of each layer by what they are, and the others."""
    layers: dict[str, Tensors] = {}
    others = {}
    for name, tensor in tensors.items():
        words = name.removesuffix(".weight").split(".", 3)
        if words[1:2] == ["layers"]:
            layers.setdefault(words[2], {})[words[3].rpartition(".")[2]] = tensor
        else:
            others[name] = tensor
    return layers, others


def grouped(sizes: Sizes, *apart: torch.Tensor) -> torch.Tensor:
    """Of each group its queries, its key and its value."""
    rows = [each.reshape(sizes.groups, -1, each.shape[1]) for each in apart]
    return torch.cat(rows, 1).reshape(-1, apart[0].shape[1])


def pairs(rows: torch.Tensor, width: int) -> torch.Tensor:
    """The two halves of each head as pairs of rows."""
    halves = rows.reshape(-1, 2, width, rows.shape[1])
    return halves.transpose(1, 2).reshape(rows.shape).contiguous()


def megatron(sizes: Sizes, tensors: Tensors) -> Tensors:
    layers, others = by_layer(tensors)
    out = {
        "embedding.word_embeddings.weight": others["model.embed_tokens.weight"],
        "decoder.final_layernorm.weight": others["model.norm.weight"],
        "output_layer.weight": others["lm_head.weight"],
    }
    for i, own in layers.items():
        at, mlp = f"decoder.layers.{i}.self_attention.", f"decoder.layers.{i}.mlp."
        mixed = grouped(sizes, own["q_proj"], own["k_proj"], own["v_proj"])
        out[f"{at}linear_qkv.weight"] = mixed
        out[f"{at}linear_proj.weight"] = own["o_proj"]
        out[f"{at}linear_qkv.layer_norm_weight"] = own["input_layernorm"]
        out[f"{mlp}linear_fc1.weight"] = torch.cat([own["gate_proj"], own["up_proj"]])
        out[f"{mlp}linear_fc2.weight"] = own["down_proj"]
        out[f"{mlp}linear_fc1.layer_norm_weight"] = own["post_attention_layernorm"]
    return out


def torchtitan(sizes: Sizes, tensors: Tensors) -> Tensors:
    layers, others = by_layer(tensors)
    out = {
        "tok_embeddings.weight": others["model.embed_tokens.weight"],
        "norm.weight": others["model.norm.weight"], "lm_head.weight": others["lm_head.weight"],
    }  # fmt: skip
    names = {
        "o_proj": "attention.wo", "gate_proj": "feed_forward.w1", "down_proj": "feed_forward.w2",
        "up_proj": "feed_forward.w3", "input_layernorm": "attention_norm",
        "post_attention_layernorm": "ffn_norm",
    }  # fmt: skip
    for i, own in layers.items():
        at = f"layers.{i}.attention.qkv_linear."
        out[f"{at}wq.weight"] = pairs(own["q_proj"], sizes.width)
        out[f"{at}wk.weight"] = pairs(own["k_proj"], sizes.width)
        out[f"{at}wv.weight"] = own["v_proj"]
        out |= {f"layers.{i}.{new}.weight": own[old] for old, new in names.items()}
    return out


def fused(sizes: Sizes, tensors: Tensors) -> Tensors:
    out = torchtitan(sizes, tensors)
    for i in range(sizes.layers):
        at = f"layers.{i}.attention.qkv_linear."
        apart = [out.pop(f"{at}{name}.weight") for name in ("wq", "wk", "wv")]
        out[f"{at}wqkv.weight"] = grouped(sizes, *apart)
    return out


def olmo_core(sizes: Sizes, tensors: Tensors) -> Tensors:
    layers, others = by_layer(tensors)
    out = {
        "embeddings.weight": others["model.embed_tokens.weight"],
        "lm_head.norm.weight": others["model.norm.weight"],
        "lm_head.w_out.weight": others["lm_head.weight"],
    }
    names = {
        "q_proj": "attention.w_q", "k_proj": "attention.w_k", "v_proj": "attention.w_v",
        "o_proj": "attention.w_out", "gate_proj": "feed_forward.w1", "down_proj": "feed_forward.w2",
        "up_proj": "feed_forward.w3", "input_layernorm": "attention_norm",
        "post_attention_layernorm": "feed_forward_norm",
    }  # fmt: skip
    for i, own in layers.items():
        out |= {f"blocks.{i}.{new}.weight": own[old] for old, new in names.items()}
    return out


def hugging_face(sizes: Sizes, tensors: Tensors) -> Tensors:
    return tensors


Model = Callable[[Sizes, Tensors], Tensors]
PAIRS: dict[str, tuple[str, Model, Model]] = {
    "megatron": ("llama-huggingface-megatron", hugging_face, megatron),
    "torchtitan": ("llama-huggingface-torchtitan", hugging_face, torchtitan),
    "torchtitan fused": ("llama-huggingface-torchtitan", hugging_face, fused),
    "olmo-core": ("llama-huggingface-olmo-core", hugging_face, olmo_core),
    "fused": ("torchtitan-fused", torchtitan, fused),
    "olmo-core torchtitan": ("llama-olmo-core-torchtitan", olmo_core, torchtitan),
    "olmo-core fused": ("llama-olmo-core-torchtitan", olmo_core, fused),
}
SIZES = st.builds(
    Sizes, st.integers(1, 2), st.integers(1, 3), st.integers(1, 3), st.integers(1, 2),
    st.integers(1, 5), st.integers(1, 7),
)  # fmt: skip


@pytest.mark.thinned(4)
@pytest.mark.parametrize("pair", PAIRS)
@given(SIZES)
@settings(max_examples=3, deadline=None)
@pytest.mark.long
def test_each_element_is_where_both_models_have_it_and_comes_back(pair: str, sizes: Sizes) -> None:
    page, one, other = PAIRS[pair]
    models = [llama(sizes, seed) for seed in range(3)]
    fresh = [llama(sizes, 9 - seed) for seed in range(3)]
    config = {
        "model_type": "llama", "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.groups,
    }  # fmt: skip
    known, wanted = ([make(sizes, model) for model in models] for make in (one, other))
    with TemporaryDirectory() as place:
        folder = Path(place)
        source = saved(folder / "source", 3, known, config)
        there = saved(folder / "there", 1, [other(sizes, m) for m in fresh], config)
        back = saved(folder / "back", 1, [one(sizes, m) for m in fresh], config)
        needed = refusal(there, source)
        assert same(filled(there, source, page), wanted)
        assert same(filled(back, there, page), known)
    assert f"--order FILE --names {page} " in needed


def refusal(run: Path, source: Path) -> str:
    """What is to be done where neither an order nor a page is given."""
    with pytest.raises(SurgeryError, match="numbers the states of its optimizer") as error:
        plan(Run.open(run), from_data({"transplant": {"source": str(source)}}))
    return str(error.value.next)
