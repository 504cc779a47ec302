"""Megatron-LM's torch_dcp and fsdp_dtensor, saved and loaded by torch's own distributed checkpoint.

The trainer's nested state goes to `torch.distributed.checkpoint.save` as it is. Of fsdp_dtensor the
optimizer's state is what `sharded_param_state_fsdp_dtensor` makes in `megatron/core/optimizer/
distrib_optimizer.py` of Megatron-LM d98e8a64, with whole tensors in place of sharded ones; the
model's is fp32 there (`_init_distributed_params`), and in torch_dcp fp16 beside its masters."""

from __future__ import annotations

import argparse
import pickle
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from tests.support.megatron_legacy import BATCH, SCHEDULE, cosine
from tests.support.new_numbers import State
from tests.support.tiny_attention import FUSED, HIDDEN

NAMES = (
    "decoder.layers.0.up.weight", "decoder.layers.0.up.bias", "decoder.norm.weight",
    "decoder.norm.bias",
)  # fmt: skip
SHAPES = ((4, 4), (4,), (4,), (4,))
Groups = tuple[tuple[int, ...], ...]
GROUPS: Groups = ((0,), (1, 2, 3))
"""The parameters of each param group of torch_dcp, by their numbers."""
Table = Mapping[str, tuple[int, ...]]
TABLE: Table = dict(zip(NAMES, SHAPES, strict=True))
QKV = "decoder.layers.0.self_attention.linear_qkv"
ATTENTION: Table = {
    **TABLE,
    f"{QKV}.weight": (FUSED, HIDDEN),
    f"{QKV}.layer_norm_weight": (HIDDEN,),
}
"""With args that have heads."""
ATTENTION_GROUPS: Groups = ((0, 4), (1, 2, 3, 5))
WRAPPED = {name: f"module.module.{name}" for name in NAMES}
"""Name → that of a parameter in the optimizer of fsdp_dtensor; in the model one `module.` less."""


def save(
    root: Path,
    steps: tuple[int, ...] = (20, 30),
    *,
    named: bool = True,
    args: bool = True,
    shuffled: bool = False,
    groups: Groups = GROUPS,
    masters: bool = True,
    twins: bool = False,
    **command_line: Any,
) -> Path:
    """fsdp_dtensor, or without `named` torch_dcp; without `args`, as Megatron-Bridge saves it.
    `shuffled` lists the tensors in another order than the state has, as writers with threads do.
    `groups` are of torch_dcp; without `masters` it is FP32Optimizer's. `twins` are groups that
    differ in eps alone."""
    table = ATTENTION if "num_attention_heads" in command_line else TABLE
    groups = ATTENTION_GROUPS if table is ATTENTION else groups
    for step in steps:
        folder = root / f"iter_{step:07d}"
        line = argparse.Namespace(
            lr=6e-5, min_lr=6e-6, weight_decay=0.1, global_batch_size=BATCH, seed=1234,
            consumed_train_samples=step * BATCH, use_megatron_fsdp=named, clip_grad=1.0,
            ckpt_format="fsdp_dtensor" if named else "torch_dcp",
        )  # fmt: skip
        vars(line).update(command_line)
        schedule = {**SCHEDULE, "num_steps": step * BATCH}
        state = {
            "args": line, "checkpoint_version": 3.0, "iteration": step,
            **_weights(named, groups, table),
            "opt_param_scheduler": schedule, "num_floating_point_operations_so_far": 0,
        }  # fmt: skip
        if named:
            state["optimizer"] = _named(schedule, step, table)
        elif masters:
            state["optimizer"].update(_numbered(schedule, step, groups, table))
        else:
            state["optimizer"] = _numbered(schedule, step, groups, table)["optimizer"]
        if not args:
            del state["args"]
        for group in _groups(state["optimizer"]) if twins else ():
            group["eps"], group["wd_mult"] = 1e-8 if group["wd_mult"] else 3e-9, 1.0
        with warnings.catch_warnings():  # torch warns that there is no process group
            warnings.simplefilter("ignore")
            dcp.save(state, checkpoint_id=folder, no_dist=True)
        if shuffled:
            metadata = pickle.loads((folder / ".metadata").read_bytes())
            metadata.storage_data = dict(reversed(metadata.storage_data.items()))
            (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    (root / "latest_checkpointed_iteration.txt").write_text(str(steps[-1]))
    return root


def _group(schedule: dict[str, Any], step: int, decays: bool) -> dict[str, Any]:
    return {
        "wd_mult": float(decays), "lr_mult": 1.0, "is_expert_parallel": False,
        "is_decoupled_lr": False, "default_config": True, "max_lr": 6e-5, "min_lr": 6e-6,
        "lr": cosine(schedule, step * BATCH), "betas": (0.9, 0.95), "eps": 1e-8,
        "weight_decay": 0.1 * decays, "step": step, "bias_correction": True,
    }  # fmt: skip


def _weights(named: bool, groups: Groups = GROUPS, table: Table = TABLE) -> dict[str, Any]:
    """The model, and of torch_dcp the masters in the optimizer, by group."""
    masters = {name: torch.rand(shape) for name, shape in table.items()}
    if named:
        model = {f"module.{name}": tensor for name, tensor in masters.items()}
        return {"model": model, "optimizer": {}}
    numbered = list(masters.values())
    model = {name: tensor.half() for name, tensor in masters.items()}
    copies = [[numbered[i] for i in group] for group in groups]
    return {"model": model, "optimizer": {"fp32_from_fp16_params": copies}}


def _moments(shape: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """exp_avg small enough beside exp_avg_sq for gradients to lead to it."""
    return {
        name: (torch.rand(shape) ** 4 + 0.1) * scale  # some far above the median
        for name, scale in (("exp_avg", 0.2), ("exp_avg_sq", 1.0))
    }


def _named(schedule: dict[str, Any], step: int, table: Table = TABLE) -> dict[str, Any]:
    wrapped = {f"module.module.{name}": shape for name, shape in table.items()}
    metas = {name: _group(schedule, step, name == WRAPPED[NAMES[0]]) for name in wrapped}
    state = {name: _moments(shape) for name, shape in wrapped.items()}
    return {"state": state, "param_to_group_meta": metas}


def _numbered(
    schedule: dict[str, Any], step: int, groups: Groups = GROUPS, table: Table = TABLE
) -> dict[str, Any]:
    entries = [
        {**_group(schedule, step, i == 0), "params": list(numbers)}
        for i, numbers in enumerate(groups)
    ]
    states = {i: _moments(shape) for i, shape in enumerate(table.values())}
    scaler = {"scale": torch.tensor([65536.0]), "growth_tracker": 7, "hysteresis_tracker": 1}
    return {"optimizer": {"state": states, "param_groups": entries}, "grad_scaler": scaler}


def _groups(optimizer: dict[str, Any]) -> list[dict[str, Any]]:
    named = optimizer.get("param_to_group_meta", {})
    return [*named.values(), *optimizer.get("optimizer", {}).get("param_groups", ())]


def loaded(root: Path, step: int, *, named: bool = True, args: bool = True) -> dict[str, Any]:
    """As `_load_base_checkpoint` does: into a state of the same shape."""
    schedule = dict(SCHEDULE)
    held: dict[str, Any] = {
        "args": None, "iteration": 1, "opt_param_scheduler": schedule, **_weights(named),
    }  # fmt: skip
    held["optimizer"].update(_named(schedule, 0) if named else _numbered(schedule, 0))
    if not args:
        del held["args"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(held, checkpoint_id=root / f"iter_{step:07d}", no_dist=True)
    return held


def gathered(root: Path, step: int, *, named: bool = True) -> State:
    """What a load gives of each parameter: weights, master and moments."""
    state = loaded(root, step, named=named)
    optimizer = state["optimizer"]
    if named:
        return {
            name: {"weights": state["model"][f"module.{name}"], **optimizer["state"][wrapped]}
            for name, wrapped in WRAPPED.items()
        }
    masters = [tensor for group in optimizer["fp32_from_fp16_params"] for tensor in group]
    return {
        name: {
            "weights": state["model"][name],
            "param": masters[number],
            **optimizer["optimizer"]["state"][number],
        }
        for number, name in enumerate(NAMES)
    }
