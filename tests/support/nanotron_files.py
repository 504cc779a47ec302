"""Runs with the files of nanotron since November 2024, made by torch's own AdamW and LambdaLR."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.support.tiny_attention import FUSED, HIDDEN

PEAK, RANKS = 1e-3, 2
BATCH, LENGTH = 4, 16
NAMES: dict[str, tuple[int, ...]] = {"w.weight": (8, 8), "w.bias": (16,)}
"""Each parameter with its shape."""
LAYER = "model.decoder.0.pp_block"
ATTENTION = {
    **NAMES, f"{LAYER}.attn.qkv_proj.weight": (FUSED, HIDDEN),
    f"{LAYER}.input_layernorm.weight": (HIDDEN,),
}  # fmt: skip
CONFIG = """\
parallelism: {dp: 2, pp: 1, tp: 1}
tokens: {batch_accumulation_per_replica: 1, micro_batch_size: 2, sequence_length: 16}
model:
  init_method: {std: 0.02}
  model_config: {hidden_size: 8, num_attention_heads: 4, num_key_value_heads: 2}
"""


def decayed(step: int, initial: float = PEAK) -> float:
    """The function of the schedule, which no state keeps."""
    return 0.9**step


FALLING = f"""\
{CONFIG}
optimizer:
  learning_rate_scheduler: {{
    learning_rate: {PEAK}, lr_warmup_steps: 2, lr_warmup_style: linear, lr_decay_style: 1-sqrt,
    lr_decay_starting_step: 3, lr_decay_steps: 9, min_decay_lr: 1.0e-04 }}
"""


def falling(step: int, initial: float) -> float:
    """The same as `FALLING` has it, for a group of which the rate was `initial`."""
    if step <= 3:
        return min(step / 2, 1.0)
    return (1e-4 + (initial - 1e-4) * (1 - math.sqrt(min(1, (step - 3) / 9)))) / initial


def built(
    rank: int, names: Mapping[str, tuple[int, ...]] = NAMES, rate: Callable[..., float] = decayed
) -> tuple[torch.optim.AdamW, torch.optim.lr_scheduler.LambdaLR]:
    """One rank's slices of matrices, which decay, and of a bias, which does not."""
    torch.manual_seed(rank)
    groups = [
        {
            "params": [torch.nn.Parameter(torch.randn(torch.Size(shape).numel() // RANKS))],
            "weight_decay": 0.1 if len(shape) > 1 else 0.0,
        }
        for shape in names.values()
    ]
    adam = torch.optim.AdamW(groups, lr=PEAK, betas=(0.9, 0.95))
    return adam, scheduled(adam, rate)


def scheduled(
    adam: torch.optim.AdamW, rate: Callable[..., float] = decayed
) -> torch.optim.lr_scheduler.LambdaLR:
    """With a function for each group, made of the lr that it has."""
    functions = [partial(rate, initial=group["lr"]) for group in adam.param_groups]
    return torch.optim.lr_scheduler.LambdaLR(adam, functions)


def named(rank: int) -> str:
    return f"optimizer_pp-0-of-1_dp-{rank}-of-{RANKS}_tp-0-of-1_exp-0-of-1.pt"


def make(
    root: Path,
    names: Mapping[str, tuple[int, ...]] = NAMES,
    rate: Callable[..., float] = decayed,
    config: str = CONFIG,
) -> Path:
    """A run with steps 2, 4 and 6 of two data-parallel ranks."""
    for rank in range(RANKS):
        adam, schedule = built(rank, names, rate)
        for step in range(1, 7):
            for group in adam.param_groups:
                group["params"][0].grad = torch.randn_like(group["params"][0])
            adam.step()
            schedule.step()
            if step % 2:
                continue
            for inner in ("optimizer", "lr_scheduler"):
                (root / str(step) / inner).mkdir(parents=True, exist_ok=True)
            slices = [group["params"][0].detach().clone() for group in adam.param_groups]
            state = {**adam.state_dict(), "names": dict(enumerate(names))}
            masters = dict(zip(names, slices, strict=True))
            torch.save({**state, "gradient_accumulator": masters}, shard(root, step, rank))
            torch.save(schedule.state_dict(), scheduler(root, step))
            sizes = {
                "type": "ZeroDistributedOptimizer",
                "parallelism": {
                    "tp_size": "1", "dp_size": "2", "pp_size": "1", "expert_parallel_size": "1",
                },
            }  # fmt: skip
            (root / str(step) / "optimizer" / "optimizer_config.json").write_text(json.dumps(sizes))
            metadata = root / str(step) / "checkpoint_metadata.json"
            metadata.write_text(json.dumps(metas(step), indent=2, sort_keys=True))
            (root / str(step) / "config.yaml").write_text(config)
    for step in (2, 4, 6):
        for name in names:
            save_weight(root, step, name)
    (root / "latest.txt").write_text("6")
    return root


def master(root: Path, step: int, name: str) -> torch.Tensor:
    """The whole of it: each data rank has the next elements."""
    shards = [torch.load(shard(root, step, rank)) for rank in range(RANKS)]
    return torch.cat([each["gradient_accumulator"][name] for each in shards])


def save_weight(root: Path, step: int, name: str) -> None:
    """In bf16, as `nanotron/serialize/weights.py` does: a file for each, one tensor called data."""
    path = weight(root, step, name)
    path.parent.mkdir(parents=True, exist_ok=True)
    data = master(root, step, name).bfloat16().reshape(ATTENTION[name])
    save_file({"data": data}, path, {"version": "1.4"})


def metas(step: int) -> dict[str, Any]:
    """As `nanotron/serialize/metadata.py` saves it: two stages of data, the first one over."""
    stages = [("warm", 1, 3 * BATCH), ("stable", 4, BATCH * step - 3 * BATCH)]
    return {
        "version": "1.4", "tp": 1, "dp": RANKS, "cp": 1, "custom_metas": None,
        "metas": {
            "last_train_step": step, "consumed_train_samples": BATCH * step,
            "consumed_tokens_total": BATCH * step * LENGTH, "last_stage_idx": 1,
            "data_stages": [
                {
                    "name": name, "start_training_step": first, "sequence_length": LENGTH,
                    "consumed_train_samples": samples,
                    "consumed_tokens_per_dataset_folder": {"data/a": samples * LENGTH},
                }
                for name, first, samples in stages
            ],
        },
    }  # fmt: skip


def shard(root: Path, step: int, rank: int) -> Path:
    return root / str(step) / "optimizer" / named(rank)


def weight(root: Path, step: int, name: str) -> Path:
    """What tensor-parallel ranks cut has their number in its name."""
    *folders, last = name.split(".")
    ranks = "_pp-rank-0-of-1_tp-rank-0-of-1" if last == "weight" else ""
    return root.joinpath(str(step), "model", *folders, f"model_{last}{ranks}.safetensors")


def scheduler(root: Path, step: int) -> Path:
    return root / str(step) / "lr_scheduler" / "lr_scheduler_pp-0-of-1_tp-0-of-1_exp-0-of-1.pt"


def piped(root: Path, stages: list[dict[str, tuple[float, float]]]) -> Path:
    """One step of pipeline stages, without masters, by torch's own AdamW and LambdaLR. Each stage
    has parameters by name, each with the share of the rate and the weight decay of its group."""
    pp, step = len(stages), 2
    for inner in ("optimizer", "lr_scheduler"):
        (root / str(step) / inner).mkdir(parents=True)
    for p, names in enumerate(stages):
        groups = [
            {"params": [torch.nn.Parameter(torch.ones(4))], "lr": PEAK * share, "weight_decay": wd}
            for share, wd in names.values()
        ]
        adam = torch.optim.AdamW(groups, betas=(0.9, 0.95))
        schedule = scheduled(adam)
        for _ in range(step):
            for group in adam.param_groups:
                group["params"][0].grad = torch.ones(4)
            adam.step()
            schedule.step()
        state = {**adam.state_dict(), "names": dict(enumerate(names))}
        ranks = f"pp-{p}-of-{pp}_tp-0-of-1_exp-0-of-1.pt"
        torch.save(state, root / str(step) / "optimizer" / f"optimizer_{ranks}")
        torch.save(
            schedule.state_dict(), root / str(step) / "lr_scheduler" / f"lr_scheduler_{ranks}"
        )
    sizes = {
        "type": "NamedOptimizer",
        "parallelism": {
            "tp_size": "1", "dp_size": "1", "pp_size": str(pp), "expert_parallel_size": "1",
        },
    }  # fmt: skip
    (root / str(step) / "optimizer" / "optimizer_config.json").write_text(json.dumps(sizes))
    metadata = root / str(step) / "checkpoint_metadata.json"
    metadata.write_text(json.dumps({"metas": {"last_train_step": step}}))
    (root / "latest.txt").write_text(str(step))
    return root
