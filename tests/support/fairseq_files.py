"""Checkpoints as `metaseq/trainer.py` (`Trainer.state_dict`) describes them: neither it nor fairseq
installs beside a present torch. A real Adam of torch makes the optimizer states."""

from __future__ import annotations

import copy
import shutil
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

PEAK, WARMUP, TOTAL = 1.2e-4, 10, 100
NAMES = tuple(f"-model_part-{m}-shard{d}" for m in range(2) for d in range(2))


def rate(updates: int, peak: float = PEAK) -> float:
    """Polynomial decay of power 1 to 0, as the flags give it at a number of updates."""
    if updates <= WARMUP:
        return peak * updates / WARMUP
    return peak * (1 - (updates - WARMUP) / (TOTAL - WARMUP))


def configuration(world: int) -> dict[str, Any]:
    """What a trainer with `world` ranks in all saves as `cfg`."""
    return {
        "_name": None,
        "common": {"fp16": True, "fp16_init_scale": 4, "model_parallel_size": min(world, 2)},
        "distributed_training": {"distributed_world_size": world, "use_sharded_state": world > 1},
        "optimization": {"lr": [PEAK], "clip_norm": 1.0},
        "lr_scheduler": {
            "_name": "polynomial_decay", "warmup_updates": WARMUP, "total_num_update": TOTAL,
            "end_learning_rate": 0.0,
        },
        "optimizer": {"_name": "adam", "adam_betas": "(0.9, 0.95)", "weight_decay": 0.1},
    }  # fmt: skip


def optimizer(rank: int) -> torch.optim.Adam:
    """Of one rank: its flat parameter."""
    torch.manual_seed(rank)
    parameter = torch.nn.Parameter(torch.randn(64))
    return torch.optim.Adam(
        [{"params": [parameter], "weight_decay": 0.1}], lr=0.0, betas=(0.9, 0.95), eps=1e-8
    )


def saved(adam: torch.optim.Adam, updates: int, *, fused: bool, world: int) -> dict[str, Any]:
    """The dict of one file; `fused`: apex's second FusedAdam, which steps in the group."""
    state = copy.deepcopy(adam.state_dict())
    for inner in state["state"].values():
        step = int(inner.pop("step"))
        if fused:
            state["param_groups"][0]["step"] = step
        else:
            inner["step"] = step
    state["loss_scale"] = 8.0
    history = {
        "criterion_name": "VocabParallelCrossEntropyCriterion",
        "optimizer_name": "MemoryEfficientFP16Optimizer",
        "lr_scheduler_state": {"best": None},
        "num_updates": updates,
    }
    return {
        "cfg": configuration(world),
        "model": {"flat_param_0": adam.param_groups[0]["params"][0].detach().half()},
        "criterion": None,
        "optimizer_history": [{**history, "num_updates": 5}, history],
        "task_state": {},
        "extra_state": {
            "train_iterator": {"epoch": 1, "sequences_consumed": [updates, updates], "n": 0},
            "metrics": [("default", [(0, "wall", "TimeMeter", {"init": 0.0, "n": 0})])],
            "previous_training_time": 12.5,
        },
        "last_optimizer_state": state,
        "shard_metadata": {"param_metadata": [{"fsdp_path": "", "params": {"numels": [64]}}]},
    }  # fmt: skip


def make_run(
    root: Path,
    *,
    steps: Sequence[int] = (10, 20, 30),
    suffixes: Sequence[str] = NAMES,
    fused: bool = False,
    folders: bool = False,
    arguments: bool = False,
    command_line: Mapping[str, Mapping[str, Any]] | None = None,
) -> Path:
    """A run with the files of every step, and `checkpoint_last*` as copies of the last one.
    `folders`: a folder a step and no copies. `arguments`: the flags as an argparse.Namespace."""
    root.mkdir(parents=True)
    for rank, suffix in enumerate(suffixes):
        adam = optimizer(rank)
        parameter = adam.param_groups[0]["params"][0]
        for update in range(1, max(steps) + 1):
            parameter.grad = torch.randn(64)
            adam.step()
            adam.param_groups[0]["lr"] = rate(update)
            if update not in steps:
                continue
            document = saved(adam, update, fused=fused, world=len(suffixes))
            for section, flags in (command_line or {}).items():
                document["cfg"].setdefault(section, {}).update(flags)
            if arguments:
                flat = {k: v for part in document["cfg"].values() if part for k, v in part.items()}
                document |= {"cfg": None, "args": Namespace(**flat)}
            name = f"checkpoint_{update}/checkpoint" if folders else f"checkpoint_{update}"
            path = root / f"{name}{suffix}.pt"
            path.parent.mkdir(exist_ok=True)
            torch.save(document, path)
        if not folders:
            shutil.copyfile(path, root / f"checkpoint_last{suffix}.pt")
    return root


def resumed(file: Path, *, peak: float = PEAK) -> tuple[torch.optim.Adam, dict[str, Any]]:
    """What a restart holds: torch's own load, then the lr of the flags at the saved updates."""
    document = torch.load(file, weights_only=False)
    state = document["last_optimizer_state"]
    for inner in state["state"].values():
        inner.setdefault("step", state["param_groups"][0].get("step"))
        inner["step"] = torch.tensor(float(inner["step"]))
    adam = optimizer(0)
    adam.load_state_dict({key: state[key] for key in ("state", "param_groups")})
    for group in adam.param_groups:
        group["lr"] = rate(document["optimizer_history"][-1]["num_updates"], peak)
    return adam, document
