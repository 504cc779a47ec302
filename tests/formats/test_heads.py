"""Queries and keys of single heads, found in real checkpoints, and the logits they lead to."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from ckptsurgeon import Run
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.files.pickles.tree import Tensor, strides
from ckptsurgeon.formats.capabilities import HasHeads
from ckptsurgeon.formats.fields.values import Part, Place
from ckptsurgeon.formats.heads import head_counts, heads
from ckptsurgeon.formats.tensors.logits import Logits
from ckptsurgeon.formats.tensors.stretches import by_parameter, numbers
from tests.conftest import Trained
from tests.support.attention import logits_of, train_shared_keys
from tests.support.dcp_trainers import CONFIG, olmo, torchtitan
from tests.support.gathered import gathered
from tests.support.in_process import one_rank
from tests.support.launch import launch
from tests.support.torch_files import load_shard
from train.config import load_config
from train.grid import Grid
from train.model import Block

SAMPLES = 4000


def estimated(root: Path, step: int) -> list[Logits]:
    checkpoint = Run.open(root).checkpoint(step)
    _, apart = checkpoint.attention()
    assert apart == []
    return logits_of(checkpoint)


def noise(count: int, hidden: int, center: bool) -> torch.Tensor:
    """What a norm makes of isotropic inputs, before its gain."""
    torch.manual_seed(3)
    x = torch.randn(count, hidden, dtype=torch.float64)
    x = x - x.mean(1, keepdim=True) if center else x
    return x / x.pow(2).mean(1, keepdim=True).sqrt()


def seen(query: torch.Tensor, key: torch.Tensor) -> tuple[float, float]:
    """Root mean square and largest of the logits of independent inputs; one row is one input."""
    half = len(query) // 2
    scores = query[:half] @ key[half:].T / math.sqrt(query.shape[1])
    return float(scores.pow(2).mean().sqrt()), float(scores.abs().max())


def agrees(told: Logits, query: torch.Tensor, key: torch.Tensor) -> None:
    rms, largest = seen(query, key)
    assert told.rms == pytest.approx(rms, rel=0.05)
    assert largest <= told.bound


def model_file(root: Path, step: int) -> Path:
    return root / f"global_step{step}" / "mp_rank_00_model_states.pt"


SHAPES: dict[str, list[str]] = {
    "layernorm with biases": [],
    "grouped, rms norm": ["num_attention_heads=4", "num_query_groups=2", "normalization=RMSNorm",
                          "add_bias_linear=false"],
}  # fmt: skip


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.long
def test_logits_are_those_of_the_trainers_own_block(
    name: str, tmp_path: Path, corpus: Path
) -> None:
    root = tmp_path / "run"
    launch(
        "--config=train/configs/tiny.yaml", "--from-scratch", f"save={root}", f"data={corpus}",
        "train_iters=2", "dtype=fp32", "lr=0.05", *SHAPES[name],
    )  # fmt: skip
    config = load_config(root / "train.yaml")
    module = load_shard(model_file(root, 2))["module"]
    told = estimated(root, 2)
    assert len(told) == config.num_layers * config.num_attention_heads
    for number in range(config.num_layers):
        block = Block(config, Grid(), number).double()
        prefix = f"layers.{number}."
        block.load_state_dict(
            {k.removeprefix(prefix): v for k, v in module.items() if k.startswith(prefix)}
        )
        x = noise(SAMPLES, config.hidden_size, center=config.normalization == "LayerNorm")
        with torch.no_grad():
            groups, each = block.groups, block.heads // block.groups
            mixed = block.query_key_value(block.input_layernorm(x[None]))[0]
            mixed = mixed.view(SAMPLES, groups, each + 2, block.width)
        for head in range(block.heads):
            mine = told[number * block.heads + head]
            assert (mine.layer, mine.head) == (f"layers.{number}", head)
            group, place = divmod(head, each)
            agrees(mine, mixed[:, group, place], mixed[:, group, each])


@pytest.mark.parametrize("layout", [(1, 0, "fp32"), (2, 3, "fp32"), (1, 2, "bf16")])
def test_every_layout_has_the_same_logits(trained: Trained, layout: tuple[int, int, str]) -> None:
    """One rank or two, with masters or without: the elements are the same."""
    ranks, zero, dtype = layout
    root = trained(ranks=ranks, zero=zero, dtype=dtype)
    checkpoint = Run.open(root).checkpoint(8)
    layers, _ = checkpoint.attention()
    known = by_parameter(checkpoint.parts())
    name = "layers.1.query_key_value.weight"
    masters = gathered(root, 8) if zero else load_shard(model_file(root, 8))["module"]
    rows = masters[name].double().view(2, 3, 16, 32)
    for head in layers[1].heads:
        query = numbers(checkpoint, known, head.query).reshape(16, 32)
        key = numbers(checkpoint, known, head.key).reshape(16, 32)
        assert torch.equal(torch.from_numpy(query), rows[head.number, 0])
        assert torch.equal(torch.from_numpy(key), rows[head.number, 1])


def test_tensor_ranks_hold_whole_heads(tmp_path: Path, corpus: Path) -> None:
    """Two ranks with a group each: the logits are those of the joined matrix."""
    root = tmp_path / "run"
    train_shared_keys(root, corpus)
    checkpoint = Run.open(root).checkpoint(2)
    (first, *_), _ = checkpoint.attention()
    known = by_parameter(checkpoint.parts())
    ranks = [
        load_shard(root / "global_step2" / f"mp_rank_0{rank}_model_states.pt")["module"]
        for rank in (0, 1)
    ]
    assert [head.query[0].cut for head in first.heads] == ["0", "0", "1", "1"]
    for head in first.heads:
        group, place = divmod(head.number, 2)
        rows = ranks[group]["layers.0.query_key_value.weight"].double().view(4, 8, 32)
        query = torch.from_numpy(numbers(checkpoint, known, head.query)).view(8, 32)
        key = torch.from_numpy(numbers(checkpoint, known, head.key)).view(8, 32)
        assert torch.equal(query.bfloat16().double(), rows[place])  # the masters, rounded
        assert torch.equal(key.bfloat16().double(), rows[2])
    assert len(estimated(root, 2)) == 8


OLMO: dict[str, Any] = {
    "d_model": 16,
    "block": {"name": "default", "sequence_mixer": {"name": "default", "n_heads": 4,
              "n_kv_heads": 2, "qk_norm": None}},
}  # fmt: skip


TWO = {**OLMO, "block": {"sequence_mixer": {"n_heads": 2}}}


def olmo_run(root: Path, model: dict[str, Any]) -> dict[str, torch.Tensor]:
    """A step of OLMo-core by torch's own DCP, with one layer's attention in it."""
    olmo(root, config={**CONFIG, "model": model})
    torch.manual_seed(1)
    inside = "blocks.0.attention"
    weights = {
        f"{inside}.w_q.weight": torch.randn(16, 16), f"{inside}.w_k.weight": torch.randn(8, 16),
        f"{inside}.w_v.weight": torch.randn(8, 16),
        "blocks.0.attention_norm.weight": torch.rand(16),
    }  # fmt: skip
    step = root / "step6" / "model_and_optim"
    shutil.rmtree(step)
    state = {"model": weights, "optim": {}}
    dcp.save(state, checkpoint_id=step, no_dist=True)
    return weights


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_separate_queries_and_keys_of_olmo_core(tmp_path: Path) -> None:
    weights = olmo_run(tmp_path, OLMO)
    x = noise(SAMPLES, 16, center=False) * weights["blocks.0.attention_norm.weight"]
    query, key = (x @ weights[f"blocks.0.attention.w_{k}.weight"].double().T for k in "qk")
    told = estimated(tmp_path, 6)
    assert [each.head for each in told] == [0, 1, 2, 3]
    for each in told:
        group = each.head // 2
        mine = query[:, each.head * 4 : each.head * 4 + 4]
        agrees(each, mine, key[:, group * 4 : group * 4 + 4])


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize(
    ("model", "says"),
    [
        ({}, "does not say how many attention heads"),
        (TWO, "2 heads of 8 with 2 keys make 16 rows of 16"),
        ({**OLMO, "block_overrides": {"0": {}}}, "no plain norm before"),
        ({**OLMO, "block": {**OLMO["block"], "name": "reordered_norm"}}, "no plain norm before"),
        ({"d_model": 16, "block": {"attention": {"n_heads": 4, "qk_norm": {}}}}, "are normalized"),
    ],
)
def test_what_is_not_known_is_refused(tmp_path: Path, model: dict[str, Any], says: str) -> None:
    olmo_run(tmp_path, model)
    with pytest.raises(SurgeryError) as error:
        HasHeads.of(Run.open(tmp_path).checkpoint(6)).attention()
    assert says in error.value.what and error.value.next


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_a_trainer_that_saves_no_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SurgeryError, match="how many attention heads"):
        HasHeads.of(Run.open(torchtitan(tmp_path / "run")).checkpoint(6)).attention()


# --- what a checkpoint says of its model ---------------------------------------------------------


def test_the_numbers_of_other_trainers() -> None:
    megatron: dict[str, Any] = {"num_attention_heads": 8, "hidden_size": 64}
    assert head_counts.of_megatron(megatron, "step") == head_counts.Model(64, 8, 8, 8)
    grouped = {**megatron, "group_query_attention": True, "num_query_groups": 2, "kv_channels": 16}
    assert head_counts.of_megatron(grouped, "step") == head_counts.Model(64, 8, 2, 16)
    ungrouped = {**grouped, "group_query_attention": False}  # Megatron-LM keeps 1 as the default
    assert head_counts.of_megatron(ungrouped, "step") == head_counts.Model(64, 8, 8, 16)
    assert head_counts.of_megatron({**megatron, "apply_layernorm_1p": True}, "step").plus_one
    for wrong in ({"qk_layernorm": True}, {"multi_latent_attention": True}, {"hidden_size": 63}):
        with pytest.raises(SurgeryError):
            head_counts.of_megatron({**megatron, **wrong}, "step")
    llama = {
        "model_type": "llama",
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "hidden_size": 64,
        "head_dim": None,
    }
    assert head_counts.of_hugging_face(llama, "step") == head_counts.Model(64, 8, 2, 8)
    with pytest.raises(SurgeryError, match="gemma2"):
        head_counts.of_hugging_face({**llama, "model_type": "gemma2"}, "step")


def part(name: str, cut: str, numel: int) -> Part:
    tensor = Tensor("0", "float32", numel, 0, (numel,), (1,))
    return Part(name, cut, "weights", Place(Path("x"), (name,), tensor), 0, numel, 0)


def test_names_that_are_not_enough_are_said() -> None:
    model = head_counts.Model(hidden=4, heads=2, groups=2, width=2)
    fused, norm = "layers.0.attention.linear_qkv.weight", "layers.0.input_layernorm.weight"
    found, apart = heads.attentions([part(fused, "0", 48), part(norm, "0", 4)], model)
    assert [a.layer for a in found] == ["layers.0"] and apart == []
    assert found[0].heads[1].key == (heads.Rows(fused, "0", 32, 40),)
    found, apart = heads.attentions([part(fused, "0", 48)], model)
    assert found == [] and "no norm before" in apart[0]
    normed = [part(fused, "0", 48), part("layers.0.attention.q_layernorm.weight", "0", 2)]
    assert "normalizes them" in heads.attentions(normed, model)[1][0]
    assert "is among the weights" in heads.attentions([part(norm, "0", 4)], model)[1][0]
    split = [part(fused, "0", 20), part(fused, "1", 28), part(norm, "0", 4)]
    with pytest.raises(SurgeryError, match="cut inside a head"):
        heads.attentions(split, model)
    columns = [part(fused, "0.0", 24), part(fused, "0.2", 24), part(norm, "0", 4)]
    with pytest.raises(SurgeryError, match="cut into columns"):
        heads.attentions(columns, model, chunked=True)


def test_rows_in_blocks_of_two_tensor_ranks() -> None:
    """Each rank of nanotron has its queries, its keys and its values behind one another."""
    model = head_counts.Model(hidden=4, heads=4, groups=2, width=2)
    fused = "model.decoder.0.pp_block.attn.qkv_proj.weight"
    norm = "model.decoder.0.pp_block.input_layernorm.weight"
    (found,), apart = heads.attentions(
        [part(fused, "0.0.0", 32), part(fused, "0.1.0", 32), part(norm, "0.0.0", 4)], model
    )
    assert apart == [] and found.layer == "model.decoder.0"
    rows = [(head.query[0], head.key[0]) for head in found.heads]
    assert rows == [
        (heads.Rows(fused, cut, start, start + 8), heads.Rows(fused, cut, 16, 24))
        for cut in ("0.0.0", "0.1.0")
        for start in (0, 8)
    ]
    uneven = [part(fused, "0.0.0", 48), part(fused, "0.1.0", 16), part(norm, "0.0.0", 4)]
    with pytest.raises(SurgeryError, match="cut inside a head"):
        heads.attentions(uneven, model)


def test_a_stack_of_layers_in_chunks() -> None:
    """megatron-core's names leave out the layer; a chunk holds one, or several, or some rows."""
    model = head_counts.Model(hidden=4, heads=2, groups=1, width=2)
    inside = "decoder.layers.self_attention.linear_qkv"
    norm, fused = f"{inside}.layer_norm_weight", f"{inside}.weight"

    def chunk(name: str, cut: str, *size: int) -> Part:
        numel = math.prod(size)
        tensor = Tensor("0", "float32", numel, 0, size, strides(size))
        return Part(name, cut, "weights", Place(Path("x"), (name,), tensor), 0, numel, 0)

    parts = [
        chunk(norm, "0.0", 2, 4),
        *(chunk(fused, f"{layer}.{row}.0", 1, 4, 4) for layer in (0, 1) for row in (0, 4)),
    ]
    (first, second), apart = heads.attentions(parts, model, chunked=True)
    assert apart == [] and (first.layer, second.layer) == ("decoder.layers.0", "decoder.layers.1")
    assert second.queries == "decoder.layers.1.self_attention.linear_qkv.weight"
    assert second.gain == (heads.Rows(norm, "0.0", 4, 8),)
    assert second.heads[1].query == (heads.Rows(fused, "1.0.0", 8, 16),)
    assert second.heads[1].key == (heads.Rows(fused, "1.4.0", 0, 8),)


# --- transformers --------------------------------------------------------------------------------


@pytest.mark.formats
def test_llama_under_deepspeed(tmp_path: Path) -> None:
    """By transformers' config beside the shards, against its own modules; ZeRO 2, grouped keys."""
    import deepspeed
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    torch.manual_seed(2)
    model = LlamaForCausalLM(config)
    for layer in model.model.layers:
        layer.input_layernorm.weight.data.uniform_(0.5, 2)
    with one_rank():
        engine, *_ = deepspeed.initialize(
            model=model,
            config={
                "train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 2},
                "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
            },
        )  # fmt: skip
        ids = torch.arange(16).view(2, 8)
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()
        engine.save_checkpoint(str(tmp_path))
    config.save_pretrained(tmp_path)
    told = estimated(tmp_path, 1)
    assert [each.head for each in told] == [0, 1, 2, 3] * 2
    x = noise(SAMPLES, 32, center=False).float()
    for i, layer in enumerate(model.model.layers):
        with torch.no_grad():
            inner = x * layer.input_layernorm.weight
            query, key = (
                p(inner).double() for p in (layer.self_attn.q_proj, layer.self_attn.k_proj)
            )
        for each in told[4 * i : 4 * i + 4]:
            group = each.head // 2
            mine = query[:, each.head * 8 : each.head * 8 + 8]
            agrees(each, mine, key[:, group * 8 : group * 8 + 8])
