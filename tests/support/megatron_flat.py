"""Megatron-LM's torch_dcp and fsdp_dtensor, saved and loaded by torch's own distributed checkpoint.

The trainer's nested state goes to `torch.distributed.checkpoint.save` as it is. Of fsdp_dtensor the
optimizer's state is what `sharded_param_state_fsdp_dtensor` makes in `megatron/core/optimizer/
distrib_optimizer.py` of Megatron-LM d98e8a64, with whole tensors in place of sharded ones."""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from tests.support.megatron_legacy import BATCH, SCHEDULE, cosine

NAMES = ("decoder.layers.0.up.weight", "decoder.layers.0.up.bias", "decoder.norm.weight")


def save(
    root: Path,
    steps: tuple[int, ...] = (20, 30),
    *,
    named: bool = True,
    args: bool = True,
    **command_line: Any,
) -> Path:
    """fsdp_dtensor, or without `named` torch_dcp; without `args`, as Megatron-Bridge saves it."""
    for step in steps:
        line = argparse.Namespace(
            lr=6e-5, min_lr=6e-6, weight_decay=0.1, global_batch_size=BATCH, seed=1234,
            consumed_train_samples=step * BATCH, use_megatron_fsdp=named, clip_grad=1.0,
            ckpt_format="fsdp_dtensor" if named else "torch_dcp",
        )  # fmt: skip
        vars(line).update(command_line)
        schedule = {**SCHEDULE, "num_steps": step * BATCH}
        state = {
            "args": line, "checkpoint_version": 3.0, "iteration": step,
            "model": {name: torch.rand(4, 4) for name in NAMES},
            "optimizer": _named(schedule, step) if named else _numbered(schedule, step),
            "opt_param_scheduler": schedule, "num_floating_point_operations_so_far": 0,
        }  # fmt: skip
        if not args:
            del state["args"]
        with warnings.catch_warnings():  # torch warns that there is no process group
            warnings.simplefilter("ignore")
            dcp.save(state, checkpoint_id=root / f"iter_{step:07d}", no_dist=True)
    (root / "latest_checkpointed_iteration.txt").write_text(str(steps[-1]))
    return root


def _group(schedule: dict[str, Any], step: int, decays: bool) -> dict[str, Any]:
    return {
        "wd_mult": float(decays), "lr_mult": 1.0, "is_expert_parallel": False,
        "is_decoupled_lr": False, "default_config": True, "max_lr": 6e-5, "min_lr": 6e-6,
        "lr": cosine(schedule, step * BATCH), "betas": (0.9, 0.95), "eps": 1e-8,
        "weight_decay": 0.1 * decays, "step": step, "bias_correction": True,
    }  # fmt: skip


def _moments() -> dict[str, torch.Tensor]:
    """exp_avg small enough beside exp_avg_sq for gradients to lead to it."""
    return {
        name: (torch.rand(4, 4) + 0.1) * scale
        for name, scale in (("exp_avg", 0.2), ("exp_avg_sq", 1.0))
    }


def _named(schedule: dict[str, Any], step: int) -> dict[str, Any]:
    metas = {name: _group(schedule, step, name == NAMES[0]) for name in NAMES}
    return {"state": {name: _moments() for name in NAMES}, "param_to_group_meta": metas}


def _numbered(schedule: dict[str, Any], step: int) -> dict[str, Any]:
    groups = [
        {**_group(schedule, step, True), "params": [0]},
        {**_group(schedule, step, False), "params": [1, 2]},
    ]
    inner = {"state": {i: _moments() for i in range(len(NAMES))}, "param_groups": groups}
    scaler = {"scale": torch.tensor([65536.0]), "growth_tracker": 7, "hysteresis_tracker": 1}
    return {"optimizer": inner, "grad_scaler": scaler}


def loaded(root: Path, step: int, *, named: bool = True, args: bool = True) -> dict[str, Any]:
    """As `_load_base_checkpoint` does: into a state of the same shape."""
    schedule = dict(SCHEDULE)
    held: dict[str, Any] = {
        "args": None, "iteration": 1, "opt_param_scheduler": schedule,
        "optimizer": _named(schedule, 0) if named else _numbered(schedule, 0),
    }  # fmt: skip
    if not args:
        del held["args"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(held, checkpoint_id=root / f"iter_{step:07d}", no_dist=True)
    return held
