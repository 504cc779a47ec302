"""QK-clip of what libraries train: their own attention computes smaller logits, by the factor.

Run by `make test-formats`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptsurgeon import Run, surgery
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.formats.heads.head_counts import PLAIN, WITH_QK_NORM
from ckptsurgeon.recipe.file import from_data
from tests.support import attention_seen
from tests.support.attention import logits_of
from tests.support.launch import REPO
from tests.support.snapshot import snapshot
from tests.support.surgeries import operate, take_back

pytestmark = [
    pytest.mark.formats,
    pytest.mark.filterwarnings("ignore"),  # of the libraries' own making
]
SHAPE: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0,
}  # fmt: skip
OWN: dict[str, list[dict[str, Any]]] = {
    "bloom": [{"n_head": 4, "n_layer": 1}],
    "falcon": [{"new_decoder_architecture": True, "num_kv_heads": 2}, {"multi_query": True},
               {"multi_query": False, "alibi": True, "bias": True}],
    "gpt_neox": [{}, {"attention_bias": True}],
    "llama": [{}, {"head_dim": 16, "attention_bias": True}],
    "phi": [{}, {"qk_layernorm": False}],
}  # fmt: skip
"""What else a type is asked to be; fused types have their own words for shared keys."""
NORMED = {"qwen3": {}, "stablelm": {"qk_layernorm": True}, "phi": {"qk_layernorm": True}}


def built(kind: str, **more: Any) -> Any:
    """With weights from which heads differ, and a norm that is not 1."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(2)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SHAPE, **more))
    for name, parameter in model.named_parameters():
        if "emb" in name:
            continue
        if parameter.ndim == 1:
            parameter.data.uniform_(0.5, 2)
        else:
            parameter.data.normal_(0, 0.3)
    return model.eval()


def saved(root: Path, model: Any) -> Path:
    """The files of a Trainer's step, by transformers' own `save_pretrained` and torch's AdamW."""
    step = root / "checkpoint-4"
    model.save_pretrained(step)
    adam = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for parameter in adam.param_groups[0]["params"]:
        parameter.grad = torch.rand_like(parameter) * 0.1
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    adam.step()
    model.load_state_dict(before)
    schedule = torch.optim.lr_scheduler.LambdaLR(adam, lambda step: 1 - step / 100)
    torch.save(adam.state_dict(), step / "optimizer.pt")
    torch.save(schedule.state_dict(), step / "scheduler.pt")
    (step / "trainer_state.json").write_text(json.dumps({"global_step": 4, "max_steps": 100}))
    return root


def cases() -> list[Any]:
    return [
        pytest.param(kind, more, id="-".join([kind, *more]))
        for kind in sorted(PLAIN)
        for more in OWN.get(kind, [{}])
    ]


@pytest.mark.witness("Hugging Face", "scale --qk-clip", by="transformers")
@pytest.mark.parametrize(("kind", "more"), cases())
def test_the_logits_of_transformers_fall_by_the_factor(
    kind: str, more: dict[str, Any], tmp_path: Path
) -> None:
    """The estimate is what its modules compute of noise; after the surgery the heads above the
    threshold have that much smaller logits, for the same inputs, and the others what they had."""
    from transformers import AutoModelForCausalLM

    model = built(kind, **more)
    root = saved(tmp_path / "run", model)
    before = snapshot(root)
    torch.manual_seed(3)
    inputs = torch.randn(1000, SHAPE["hidden_size"])
    (old,) = attention_seen.logits(model, inputs)
    told = logits_of(Run.open(root).checkpoint(4))
    assert [each.head for each in told] == [0, 1, 2, 3]
    apart = ~torch.eye(len(inputs), dtype=torch.bool)
    for head, each in enumerate(told):
        measured = float(old[head][apart].pow(2).mean().sqrt())
        assert each.rms == pytest.approx(measured, rel=0.1), (kind, head)
        assert float(old[head].abs().max()) <= each.bound
    threshold = 5 * sum(sorted(each.rms for each in told)[1:3]) / 2  # two are above it
    operate(root, {"scale": {"qk_clip": {"threshold": threshold}}})
    again = AutoModelForCausalLM.from_pretrained(root / "checkpoint-4").eval()
    (new,) = attention_seen.logits(again, inputs)
    for head, each in enumerate(told):
        factor = min(1.0, threshold / (5 * each.rms))
        torch.testing.assert_close(new[head], old[head] * factor, rtol=1e-3, atol=1e-3)
    take_back(root, before)


@pytest.mark.parametrize("kind", NORMED)
def test_normalized_queries_are_refused(kind: str, tmp_path: Path) -> None:
    """By the type, or by the names of the norms: scaling in front of them changes nothing."""
    assert kind in WITH_QK_NORM | PLAIN
    root = saved(tmp_path / "run", built(kind, **NORMED[kind]))
    before = snapshot(root)
    with pytest.raises(SurgeryError, match="normalize"):
        recipe = from_data({"scale": {"qk_clip": {"threshold": 1.0}}})
        surgery.plan(Run.open(root), recipe)
    assert snapshot(root) == before


KINDS = {
    "legacy": ["--sharding", "legacy", "--fp16"],
    "legacy-plain": ["--sharding", "legacy", "--no-distributed", "--fp16"],
    "fully": ["--sharding", "fully_reshardable", "--fp16"],
}


def megatron(what: str, roots: list[Path], *flags: str) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPO)}
    command = [sys.executable, "-W", "ignore", "-m", "tests.support.megatron_real", what]
    done = subprocess.run(
        [*command, *map(str, roots), "--gpt", *flags],
        cwd=REPO, env=environment, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.witness("Megatron-LM legacy", "scale --qk-clip", by="megatron-core")
@pytest.mark.witness("Megatron-LM torch_dist", "scale --qk-clip", by="megatron-core")
@pytest.mark.parametrize("kind", KINDS)
def test_the_logits_of_megatron_fall_by_the_factor(kind: str, tmp_path: Path) -> None:
    """Its own model, optimizer and checkpoints; what it loads back attends less, by the factor."""
    root = tmp_path / "run"
    megatron("save", [root], "--steps", "2", "--lr", "0.1", *KINDS[kind])
    before, old = snapshot(root), tmp_path / "old"
    shutil.copytree(root, old)
    told = logits_of(Run.open(root).checkpoint(2))
    assert len(told) == 8
    first = [each for each in told if each.layer.endswith("layers.0")]
    threshold = 5 * sum(sorted(each.rms for each in first)[1:3]) / 2
    recipe = {"params": r"layers\.0\.", "qk_clip": {"threshold": threshold}}
    operate(root, {"scale": recipe})
    new = tmp_path / "new"
    shutil.copytree(root, new, ignore=shutil.ignore_patterns(".ckptsurgeon"))
    megatron("gather", [old, new], *KINDS[kind])
    held = [torch.load(path.with_suffix(".pt")) for path in (old, new)]
    name = "decoder.layers.0.self_attention.linear_qkv.weight"
    for state in held:
        master = next(state[name][key] for key in ("param", "fp32_param") if key in state[name])
        assert torch.equal(state[name]["weights"], master.half())
    factors = [min(1.0, threshold / (5 * each.rms)) for each in first]
    assert sum(factor < 1 for factor in factors) == 2
    was, now = (state["logits"]["layers.0"] for state in held)
    expected = was * torch.tensor(factors, dtype=was.dtype)[:, None, None]
    torch.testing.assert_close(now, expected, rtol=2e-2, atol=2e-2 * float(was.abs().max()))
    name = name.replace("layers.0", "layers.1")  # which stays
    assert torch.equal(held[0][name]["weights"], held[1][name]["weights"])
    take_back(root, before)
