"""QK-clip in every format that says its heads: bit for bit torch's product, and undone.

The trainers' own files by their descriptions; `test_qk_clip_libraries.py` asks the libraries."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

from ckptsurgeon import Run, surgery
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.recipe.file import from_data
from tests.formats.matrix import make
from tests.support import megatron_legacy
from tests.support.megatron_engine import megatron
from tests.support.megatron_legacy import megatron_enums
from tests.support.nanotron_files import LAYER, master, weight
from tests.support.snapshot import snapshot
from tests.support.surgeries import operate, take_back
from tests.support.tiny_attention import (
    GROUPS,
    HEADS,
    HIDDEN,
    LLAMA,
    MEGATRON,
    WIDTH,
    Layer,
    clip,
    estimates,
    factors,
    of_groups,
    of_pair,
)
from tests.support.torch_files import load_shard

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning:torch.distributed.*"),
]
Tensors = dict[str, torch.Tensor]


def values(folder: Path) -> Tensors:
    """Every tensor of a folder of torch.distributed.checkpoint, by torch's own reader."""
    kept = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    tensors = {
        name: torch.empty(each.size, dtype=each.properties.dtype)
        for name, each in kept.items()
        if hasattr(each, "chunks")
    }
    dcp.load(tensors, checkpoint_id=folder, no_dist=True)
    return tensors


def fused(tensors: Tensors, inside: str, norm: str, groups: int) -> list[Layer]:
    return list(of_groups(tensors, inside, norm, groups))


# --- what each format has: the numbers that the optimizer goes on from ----------------------------


def legacy(root: Path) -> tuple[Tensors, list[Layer]]:
    """Two tensor ranks with a group each, two pipeline stages; the gain is the first rank's."""
    tensors: Tensors = {}
    layers = []
    for stage in (0, 1):
        for rank in (0, 1):
            folder = root / "iter_0000030" / f"mp_rank_{rank:02d}_{stage:03d}"
            (bucket,) = torch.load(folder / "distrib_optim.pt", weights_only=False)[0].values()
            with megatron_enums():
                model = load_shard(folder / "model_optim_rng.pt")["model"]
            inside = "decoder.layers.0.self_attention.linear_qkv"
            mine = {}
            for name in (f"{inside}.weight", f"{inside}.bias", f"{inside}.layer_norm_weight"):
                view = model[name]
                start, size = view.storage_offset(), view.numel()
                mine[name] = bucket["param"][start : start + size].view(view.shape)
                assert torch.equal(mine[name].bfloat16(), view)  # the weights are rounded masters
            tensors |= {f"{stage}.{rank}.{name}": tensor for name, tensor in mine.items()}
            norm = tensors[f"{stage}.0.{inside}.layer_norm_weight"]
            layers += fused({**mine, "gain": norm}, inside, "gain", 1)
    return tensors, layers


def dist(root: Path) -> tuple[Tensors, list[Layer]]:
    """Both layers are one tensor."""
    held = values(root / "iter_0000030")
    inside, state = "decoder.layers.self_attention.linear_qkv", "optimizer.state.param"
    tensors = {
        name: held[f"{state}.{inside}.{name}"] for name in ("weight", "bias", "layer_norm_weight")
    }
    for name, tensor in tensors.items():
        assert torch.equal(tensor.bfloat16(), held[f"{inside}.{name}"])
    layers: list[Layer] = []
    for i in (0, 1):
        mine = {f"qkv.{name}": tensor[i] for name, tensor in tensors.items()}
        layers += fused(mine, "qkv", "qkv.layer_norm_weight", GROUPS)
    return tensors, layers


def torch_dcp(root: Path) -> tuple[Tensors, list[Layer]]:
    """Weights of fp16, and masters by the numbers of group and parameter."""
    held = values(root / "iter_0000030")
    inside = "decoder.layers.0.self_attention.linear_qkv"
    places = {f"{inside}.weight": (0, 1), f"{inside}.layer_norm_weight": (1, 3)}
    tensors = {
        name: held[f"optimizer.fp32_from_fp16_params.{group}.{j}"]
        for name, (group, j) in places.items()
    }
    for name, tensor in tensors.items():
        assert torch.equal(tensor.half(), held[f"model.{name}"])
    return tensors, fused(tensors, inside, f"{inside}.layer_norm_weight", GROUPS)


def fsdp_dtensor(root: Path) -> tuple[Tensors, list[Layer]]:
    """The weights that the optimizer works on."""
    held = values(root / "iter_0000030")
    tensors = {
        name.removeprefix("model.module."): tensor
        for name, tensor in held.items()
        if name.startswith("model.")
    }
    inside = "decoder.layers.0.self_attention.linear_qkv"
    return tensors, fused(tensors, inside, f"{inside}.layer_norm_weight", GROUPS)


def pairs(tensors: Tensors, norm: str, query: str, key: str) -> list[Layer]:
    """Of every layer, by the names of layer 0."""
    found = []
    for i in (0, 1):
        names = [name.replace(".0.", f".{i}.") for name in (norm, query, key)]
        if names[0] in tensors:
            gain, q, k = (tensors[name] for name in names)
            found.append(of_pair(q, k, gain))
    return found


def llama(tensors: Tensors) -> list[Layer]:
    inside = "model.layers.0"
    return pairs(
        tensors,
        f"{inside}.input_layernorm.weight",
        f"{inside}.self_attn.q_proj.weight",
        f"{inside}.self_attn.k_proj.weight",
    )


def hugging_face(root: Path) -> tuple[Tensors, list[Layer]]:
    tensors = load_file(root / "checkpoint-4" / "model.safetensors")
    return tensors, llama(tensors)


def fsdp2(root: Path) -> tuple[Tensors, list[Layer]]:
    held = values(root / "checkpoint-4" / "pytorch_model_fsdp_0")
    tensors = {name.removeprefix("model."): tensor for name, tensor in held.items()}
    return tensors, llama(tensors)


def olmo(root: Path) -> tuple[Tensors, list[Layer]]:
    held = values(root / "step6" / "model_and_optim")
    tensors = {name: tensor for name, tensor in held.items() if name.startswith("model.")}
    inside = "model.blocks.0"
    return tensors, pairs(
        tensors,
        f"{inside}.attention_norm.weight",
        f"{inside}.attention.w_q.weight",
        f"{inside}.attention.w_k.weight",
    )


def olmo_ddp(root: Path) -> tuple[Tensors, list[Layer]]:
    """Each master flat, and no weights beside it."""
    held = values(root / "step6" / "model_and_optim")
    tensors = {
        name.removesuffix(".main"): tensor if "norm" in name else tensor.view(-1, HIDDEN)
        for name, tensor in held.items()
        if name.endswith(".main")
    }
    inside = "blocks.0"
    return tensors, pairs(
        tensors,
        f"{inside}.attention_norm.weight",
        f"{inside}.attention.w_q.weight",
        f"{inside}.attention.w_k.weight",
    )


def nanotron(root: Path) -> tuple[Tensors, list[Layer]]:
    """One tensor rank: all queries, then all keys, then all values."""
    names = (f"{LAYER}.attn.qkv_proj.weight", f"{LAYER}.input_layernorm.weight")
    tensors = {name: master(root, 6, name) for name in names}
    qkv = tensors[names[0]] = tensors[names[0]].view(-1, HIDDEN)
    assert torch.equal(load_file(weight(root, 6, names[0]))["data"], qkv.bfloat16())
    queries, keys = HEADS * WIDTH, GROUPS * WIDTH
    return tensors, [of_pair(qkv[:queries], qkv[queries : queries + keys], tensors[names[1]])]


def megatron_deepspeed(root: Path) -> tuple[Tensors, list[Layer]]:
    (file,) = (root / "global_step6").glob("*optim_states.pt")
    with megatron():
        shard = torch.load(file, weights_only=False)["optimizer_state_dict"]
    flats = zip(
        shard["single_partition_of_fp32_groups"], shard["param_slice_mappings"], strict=True
    )
    tensors = {
        name: flat[at.start : at.start + at.numel].detach().clone()
        for flat, mapping in flats
        for name, at in mapping.items()
    }
    weight = "0.self_attention.query_key_value.weight"
    tensors[weight] = tensors[weight].view(-1, HIDDEN)
    inside = "0.self_attention.query_key_value"
    return tensors, fused(tensors, inside, "0.input_layernorm.weight", GROUPS)


Reader = Callable[[Path], tuple[Tensors, list[Layer]]]
FORMATS: dict[str, Reader] = {
    "Megatron-LM legacy": legacy,
    "Megatron-LM torch_dist": dist,
    "Megatron-LM torch_dcp": torch_dcp,
    "Megatron-LM fsdp_dtensor": fsdp_dtensor,
    "Megatron-Bridge": dist,
    "Megatron-DeepSpeed": megatron_deepspeed,
    "Hugging Face": hugging_face,
    "FSDP2 (Accelerate, Trainer)": fsdp2,
    "OLMo-core": olmo,
    "OLMo-core, OLMoDDP": olmo_ddp,
    "nanotron": nanotron,
}


@pytest.mark.thinned(3)
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.long
def test_queries_and_keys_are_torchs_product(name: str, tmp_path: Path) -> None:
    """About half of the heads are above the threshold, the rest stays as it is bit for bit."""
    root, read = make(name, tmp_path / "run"), FORMATS[name]
    before = snapshot(root)
    expected, layers = read(root)
    every = sorted(each for layer in layers for each in estimates(layer))
    middle = len(every) // 2
    threshold = (every[middle - 1] + every[middle]) / 2
    made = operate(root, {"scale": {"qk_clip": {"threshold": threshold}}})
    count = len(every) - middle
    assert f"{count} heads are estimated above" in made.warnings[-1]
    assert clip(layers, threshold, factors(made)) == count
    found, after = read(root)
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        assert torch.equal(found[key], tensor), key
    largest = max(each for layer in after for each in estimates(layer))
    assert largest == pytest.approx(threshold, rel=1e-3)
    take_back(root, before)


# --- what is not one layer after another ---------------------------------------------------------


def test_every_file_of_weights_is_clipped(tmp_path: Path) -> None:
    """A step with safetensors and torch's file: a load takes one of them, and they stay alike."""
    root = make("Hugging Face", tmp_path / "run")
    step = root / "checkpoint-4"
    torch.save(load_file(step / "model.safetensors"), step / "pytorch_model.bin")
    made = operate(root, {"scale": {"qk_clip": {"threshold": 1e-3}}})
    assert f"{HEADS} heads are estimated above" in made.warnings[-1]
    safe, plain = load_file(step / "model.safetensors"), torch.load(step / "pytorch_model.bin")
    assert safe.keys() == plain.keys()
    assert all(torch.equal(safe[name], plain[name]) for name in safe)
    assert max(estimates(llama(safe)[0])) == pytest.approx(1e-3, rel=1e-3)


def test_a_layer_of_a_stack_is_named(tmp_path: Path) -> None:
    """`--params` narrows it to layers that have no number in the names of the tensors."""
    root = make("Megatron-LM torch_dist", tmp_path / "run")
    (_, before), recipe = dist(root), {"params": r"layers\.1\.", "qk_clip": {"threshold": 1e-3}}
    operate(root, {"scale": recipe})
    _, after = dist(root)
    same = [torch.equal(a.query, b.query) for a, b in zip(before, after, strict=True)]
    assert same == [True] * GROUPS + [False] * GROUPS


def planned(root: Path) -> None:
    surgery.plan(Run.open(root), from_data({"scale": {"qk_clip": {"threshold": 1e-3}}}))


def config(root: Path, **more: Any) -> None:
    (root / "config.json").write_text(json.dumps({**LLAMA, **more}))


def test_what_no_config_says_is_refused(tmp_path: Path) -> None:
    root = make("Hugging Face", tmp_path / "run")
    step = root / "checkpoint-4"
    (step / "config.json").rename(root / "config.json")
    planned(root)  # beside the steps does as well
    for kind, says in (
        ("gpt2", "model_type gpt2, which is none known here"),
        ("gemma3_text", "are normalized"),
        (None, "model_type None"),
    ):
        config(root, model_type=kind)
        with pytest.raises(SurgeryError, match=says):
            planned(root)
    config(root, num_key_value_heads=HEADS)
    with pytest.raises(SurgeryError, match=r"k_proj\.weight has 32 elements here"):
        planned(root)
    config(root)
    shutil.copyfile(step / "model.safetensors", step / "model_1.safetensors")
    with pytest.raises(SurgeryError, match="several models"):
        planned(root)
    (step / "model_1.safetensors").unlink()
    (root / "config.json").unlink()
    with pytest.raises(SurgeryError, match="how many attention heads") as error:
        planned(root)
    assert "config.json" in " ".join(error.value.next)


def test_what_megatrons_args_do_not_decide_is_refused(tmp_path: Path) -> None:
    for more, says in (
        ({"qk_layernorm": True}, "are normalized"),
        ({"multi_latent_attention": True}, "latent"),
        ({"use_mup": True}, "not by √width"),
        ({"expert_model_parallel_size": 2}, "each expert rank has its attention once more"),
    ):
        root = tmp_path / next(iter(more))
        megatron_legacy.save(root, (20,), **{**MEGATRON, **more})
        for rank in (root / "iter_0000020").iterdir() if "expert" in root.name else ():
            shutil.copytree(rank, rank.with_name(f"{rank.name}_001"))
            rank.rename(rank.with_name(f"{rank.name}_000"))
        with pytest.raises(SurgeryError, match=says):
            planned(root)
    root = megatron_legacy.save(tmp_path / "plain", (20,))
    with pytest.raises(SurgeryError, match="how many attention heads"):
        planned(root)


def test_mup_of_nanotron_is_refused(tmp_path: Path) -> None:
    root = make("nanotron", tmp_path / "run")
    file = root / "6" / "config.yaml"
    text = file.read_text()
    file.write_text(text.replace("{std: 0.02}", "{use_mup: true}"))
    with pytest.raises(SurgeryError, match=r"1 / width \(µP\)"):
        planned(root)
    file.unlink()
    with pytest.raises(SurgeryError, match="how many attention heads"):
        planned(root)
