"""Runs of Megatron-Bridge by their description, on what Megatron-core's formats are made of.

As `save_checkpoint` in `training/checkpointing.py` of megatron-bridge 0.6.2 (`bridge_trainer.py`
asks it): no args in the common state, the counters in `train_state.pt`, and `latest_train_state.pt`
a copy of it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch

from tests.support import megatron_dist, megatron_flat
from tests.support.megatron_legacy import BATCH

CONFIG = """\
_target_: megatron.bridge.training.config.ConfigContainer
checkpoint:
  _target_: megatron.bridge.training.config.CheckpointConfig
  load: {run}
  save: {run}
  load_optim: true
  finetune: false
  pretrained_checkpoint: null
  non_persistent_ckpt_type: {tier}
model:
  _target_: megatron.bridge.models.gpt_provider.GPTModelProvider
  num_attention_heads: 4
  hidden_size: 8
  num_query_groups: 2
  kv_channels: 2
  qk_layernorm: false
  softmax_scale: null
optimizer:
  lr: 6.0e-05
  min_lr: 6.0e-06
  weight_decay: 0.1
  clip_grad: 1.0
rng:
  seed: 1234
scheduler:
  lr_decay_style: cosine
  lr_decay_iters: 1000
  lr_warmup_iters: 10
  lr_warmup_samples: 0
  lr_decay_samples: null
  lr_warmup_fraction: null
  lr_wsd_decay_iters: null
  lr_wsd_decay_samples: null
  lr_wsd_decay_style: exponential
  weight_decay_incr_style: constant
  lr_warmup_init: 0.0
  start_weight_decay: 0.1
  end_weight_decay: 0.1
  override_opt_param_scheduler: {override}
train:
  train_iters: 1000
  train_samples: null
  global_batch_size: {batch}
  rampup_batch_size: null
  step_batch_size_schedule: null
"""


def save(
    root: Path,
    steps: tuple[int, ...] = (20, 30),
    *,
    flat: bool = False,
    override: bool = False,
    tier: str = "null",
    sharding: str = "fully_reshardable",
) -> Path:
    """Of torch_dist, or with `flat` of fsdp_dtensor; its config overrides the schedule or not, and
    has `tier` as the kind of checkpoints that are not persistent."""
    if flat:
        megatron_flat.save(root, steps, args=False)
    else:
        megatron_dist.save(root, steps, args=False, sharding=sharding)
    for step in steps:
        folder = root / f"iter_{step:07d}"
        numbers: dict[str, Any] = {
            "step": step, "consumed_train_samples": step * BATCH, "skipped_train_samples": 0,
            "consumed_valid_samples": 0,
        }  # fmt: skip
        state = {key: torch.tensor(value, dtype=torch.int64) for key, value in numbers.items()}
        flops = torch.tensor(1e9, dtype=torch.float32)
        state["floating_point_operations_so_far"] = flops
        for key in ("do_train", "do_valid", "do_test"):
            state[key] = torch.tensor(True)
        torch.save(state, folder / "train_state.pt")
        over = str(override).lower()
        text = CONFIG.format(run=root, override=over, batch=BATCH, tier=tier)
        (folder / "run_config.yaml").write_text(text)
    shutil.copy(folder / "train_state.pt", root / "latest_train_state.pt")
    return root


def resumed(root: Path) -> tuple[int, dict[str, Any]]:
    """The iteration that `_resolve_checkpoint_iteration` finds, and the counters of it."""
    latest = torch.load(root / "latest_train_state.pt", weights_only=True)
    step = latest["step"].item()
    state = torch.load(root / f"iter_{step:07d}" / "train_state.pt", weights_only=True)
    return step, {key: value.item() for key, value in state.items()}
