"""What a checkpoint holds on disk: Megatron-DeepSpeed's client state, in the surgeon's contract."""

from __future__ import annotations

import argparse
from typing import Any

import pytest
import torch

from tests.conftest import Trained


@pytest.fixture
def model_states(trained: Trained) -> dict[str, Any]:
    file = trained() / "global_step6" / "mp_rank_00_model_states.pt"
    return dict(torch.load(file, weights_only=False))


def test_the_client_state_has_megatrons_keys(model_states: dict[str, Any]) -> None:
    assert model_states["trainer"] == "ckptsurgeon"
    assert (model_states["iteration"], model_states["tokens"]) == (6, 6 * 8 * 32)
    assert model_states["checkpoint_version"] == 3.0
    assert model_states["checkpoint_info"] == {
        "padded_vocab_size": 256,
        "original_vocab_size": 256,
    }
    assert model_states["skip_train_iteration_range"] == []
    assert model_states["rng_tracker_states"] == {}
    for key in ("random_rng_state", "np_rng_state", "torch_rng_state"):
        assert key in model_states


def test_the_scheduler_is_saved_with_floats_and_ints(model_states: dict[str, Any]) -> None:
    kinds = {key: type(value) for key, value in model_states["lr_scheduler"].items()}
    assert kinds == {
        "max_lr": float, "warmup_steps": int, "num_steps": int, "warmup_tokens": int,
        "num_tokens": int, "decay_style": str, "decay_steps": int, "min_lr": float,
    }  # fmt: skip
    assert model_states["lr_scheduler"]["num_steps"] == 48


def test_args_hold_the_values_in_force_as_plain_scalars(model_states: dict[str, Any]) -> None:
    args = model_states["args"]
    assert type(args) is argparse.Namespace
    values = vars(args)
    assert all(type(v) in (int, float, str, bool, type(None)) for v in values.values())
    expected = {
        "num_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "seq_length": 32,
        "max_position_embeddings": 32, "padded_vocab_size": 256, "global_batch_size": 8,
        "micro_batch_size": 4, "rampup_batch_size": None, "lr": 1e-3, "min_lr": 1e-4,
        "lr_decay_style": "cosine", "lr_warmup_samples": 16, "lr_decay_samples": 800,
        "adam_beta1": 0.9, "adam_beta2": 0.95, "adam_eps": 1e-8, "weight_decay": 0.1,
        "clip_grad": 1.0, "seed": 1234, "consumed_train_samples": 48, "consumed_valid_samples": 0,
        "consumed_train_tokens": 1536, "tokenizer_type": "byte", "zero_stage": 1,
    }  # fmt: skip
    assert {key: values[key] for key in expected} == expected
    assert values["gigaflos_no_embeds"] > 0


def test_the_shard_has_two_groups_and_biases_do_not_decay(trained: Trained) -> None:
    file = trained() / "global_step6" / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    state = torch.load(file, weights_only=False)["optimizer_state_dict"]
    groups = state["base_optimizer_state"]["param_groups"]
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
    assert state["clip_grad"] == 1.0
    shapes = state["param_slice_mappings"]
    assert all("bias" in name or "layernorm" in name for name in shapes[1])
