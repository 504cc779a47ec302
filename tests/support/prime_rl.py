"""A run as prime-rl saves it: its optimizer, its scheduler with a warm-up, and its counters in one
folder of values. Source: `trainer/ckpt.py` of PrimeIntellect-ai/prime-rl at 559b447."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.optim.lr_scheduler import ConstantLR, LinearLR, SequentialLR

from tests.support.described_runs import update

PEAK = 1e-3


def parts(lr: float = PEAK, *, warmup: bool = True) -> tuple[torch.nn.Module, Any, Any]:
    """What `setup_optimizer` and `setup_scheduler` make."""
    torch.manual_seed(5)
    model = torch.nn.Sequential(torch.nn.Linear(4, 2))
    adam = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.1)
    if not warmup:
        return model, adam, ConstantLR(adam, factor=1.0)
    rise = LinearLR(adam, start_factor=1e-8, end_factor=1.0, total_iters=3)
    stay = LinearLR(adam, start_factor=1.0, end_factor=1.0, total_iters=11)
    fall = LinearLR(adam, start_factor=1.0, end_factor=1e-8, total_iters=5)
    return model, adam, SequentialLR(adam, [rise, stay, fall], milestones=[3, 14])


def _state(model: torch.nn.Module, adam: Any, schedule: Any, step: int) -> dict[str, Any]:
    """`AppState.state_dict`."""
    weights, optimizer = get_state_dict(model, [adam])
    counted = {"step": step, "total_tokens": 8 * step, "total_samples": 2 * step}
    state = {"model": weights, "optimizers": optimizer, "scheduler": schedule.state_dict()}
    return {"app": {**state, "progress": counted}}


def _folder(root: Path, step: int) -> Path:
    return root / "checkpoints" / f"step_{step}" / "trainer"


def make(root: Path, *, warmup: bool = True) -> Path:
    """Six updates, with a save of every second one, and the lines of its monitor."""
    root.mkdir(parents=True)
    model, adam, schedule = parts(warmup=warmup)
    for step in range(1, 7):
        update(model, adam, schedule)
        if step % 2 == 0:
            folder = _folder(root, step)
            (folder / "dataloader").mkdir(parents=True)
            torch.save({"read": step}, folder / "dataloader" / "rank_0.pt")
            dcp.save(_state(model, adam, schedule, step), checkpoint_id=folder, no_dist=True)
        with (root / "metrics.jsonl").open("a") as lines:
            lines.write(json.dumps({"step": step, "time": 1.0, "loss/mean": 1 / step}) + "\n")
    return root


def resumed(root: Path, *, offload: bool, warmup: bool = True) -> dict[str, Any]:
    """As `AppState.load_state_dict` does at the highest step: the settings of the first update, the
    rate of the second one. With `offload` the tensors of the optimizer are what the load fills
    in, and nothing else of it is put back."""
    step = max(int(path.name.removeprefix("step_")) for path in (root / "checkpoints").iterdir())
    model, adam, schedule = parts(warmup=warmup)
    state = _state(model, adam, schedule, 0)
    dcp.load(state, checkpoint_id=_folder(root, step), no_dist=True)
    saved = state["app"]
    if offload:
        set_model_state_dict(model, saved["model"])
    else:
        set_state_dict(
            model, [adam], model_state_dict=saved["model"], optim_state_dict=saved["optimizers"]
        )
    schedule.load_state_dict(saved["scheduler"])
    (group,) = adam.param_groups
    used = {key: group[key] for key in ("lr", "betas", "eps", "weight_decay")}
    used["adam_step"] = {float(held["step"]) for held in adam.state.values()}
    used["moments"] = any(bool(held["exp_avg"].any()) for held in adam.state.values())
    used["step"] = saved["progress"]["step"] + 1
    adam.step()
    schedule.step()
    return {**used, "then": group["lr"]}
