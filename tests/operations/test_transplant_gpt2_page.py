"""The page for GPT-2 of transformers and the bundled trainer: of any sizes each element is where
both have it, moments too, and there and back is the step that was saved."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from ckptsurgeon import Run, apply, plan
from ckptsurgeon.recipe.file import from_data
from tests.support.tiny_run import GROUP, LAMBDA_LR

PAGE = "gpt2-huggingface-bundled"
LAYER = {
    "ln_1": "input_layernorm", "attn.c_attn": "query_key_value", "attn.c_proj": "dense",
    "ln_2": "post_attention_layernorm", "mlp.c_fc": "dense_h_to_4h",
    "mlp.c_proj": "dense_4h_to_h",
}  # fmt: skip
Tensors = dict[str, torch.Tensor]


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


def saved(root: Path, step: int, models: list[Tensors], heads: int) -> Path:
    """A step of a Trainer: weights and two moments, which are the three models."""
    folder = root / f"checkpoint-{step}"
    folder.mkdir(parents=True)
    weights, first, second = models
    save_file(weights, folder / "model.safetensors")
    states = {
        number: {"step": torch.tensor(float(step)), "exp_avg": first[name],
                 "exp_avg_sq": second[name]}
        for number, name in enumerate(weights)
    }  # fmt: skip
    adam = {"state": states, "param_groups": [{**GROUP, "params": [*range(len(weights))]}]}
    torch.save(adam, folder / "optimizer.pt")
    torch.save({**LAMBDA_LR, "last_epoch": step, "_step_count": step + 1}, folder / "scheduler.pt")
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2", "n_head": heads}))
    (root / "order.txt").write_text("\n".join(weights))
    return root


def filled(run: Path, source: Path) -> list[Tensors]:
    """The run, transplanted into: its weights and moments."""
    names = [(root / "order.txt").read_text().split("\n") for root in (run, source)]
    order = run.parent / "order.txt"
    order.write_text("\n".join(names[0] + names[1]))  # both number theirs
    section = {"source": str(source), "names": PAGE, "order": str(order)}
    opened = Run.open(run)
    made = plan(opened, from_data({"transplant": section}))
    assert not made.warnings
    apply(opened, made)
    (step,) = run.glob("checkpoint-*")
    states = torch.load(step / "optimizer.pt")["state"]
    moments = [
        {name: states[i][kind] for i, name in enumerate(names[0])}
        for kind in ("exp_avg", "exp_avg_sq")
    ]
    return [load_file(step / "model.safetensors"), *moments]


SIZES = st.builds(
    Sizes, st.integers(1, 2), st.integers(1, 4), st.integers(1, 3), st.integers(1, 9),
    st.integers(1, 7),
)  # fmt: skip


@given(SIZES)
@settings(max_examples=8)
def test_each_element_is_where_both_models_have_it_and_comes_back(sizes: Sizes) -> None:
    models = [gpt2(sizes, seed) for seed in range(3)]
    wanted = [bundled(sizes, model) for model in models]
    with TemporaryDirectory() as place:
        folder = Path(place)
        others: list[Any] = [[gpt2(sizes, 9 - seed) for seed in range(3)] for _ in range(2)]
        source = saved(folder / "source", 3, models, sizes.heads)
        there = saved(folder / "there", 1, [bundled(sizes, m) for m in others[0]], sizes.heads)
        back = saved(folder / "back", 1, others[1], sizes.heads)
        assert same(filled(there, source), wanted)
        assert same(filled(back, there), models)


def same(found: list[Tensors], wanted: list[Tensors]) -> bool:
    return all(
        one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)
        for one, two in zip(found, wanted, strict=True)
    )
