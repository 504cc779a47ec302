"""Runs as NeMo RL saves them with DTensor. Source: `nemo_rl/utils/native_checkpoint.py` and
`checkpoint.py` of NVIDIA-NeMo/RL at 7ea279a; OptimizerState of nemo-automodel 0.7.0."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.optim.lr_scheduler import ConstantLR, LinearLR, SequentialLR

from tests.support.described_runs import update


def parts() -> tuple[torch.nn.Module, Any, Any]:
    """With the scheduler of its example configs."""
    torch.manual_seed(5)
    model = torch.nn.Sequential(torch.nn.Linear(4, 2))
    adam = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    rise, stay = LinearLR(adam, 0.1, 1.0, 3), ConstantLR(adam, 1.0, 10**10)
    return model, adam, SequentialLR(adam, [rise, stay], [3])


def _options(native: bool) -> StateDictOptions:
    return StateDictOptions(flatten_optimizer_state_dict=not native)


def _state(model: torch.nn.Module, adam: Any, schedule: Any, native: bool) -> dict[str, Any]:
    optimizer = get_optimizer_state_dict(model, adam, options=_options(native))
    state = {"optim": optimizer, "sched": schedule.state_dict()}
    return {"optim": state} if native else state


def _folder(root: Path, step: int, native: bool) -> Path:
    folder = root / f"step_{step}" / "policy" / "optimizer"
    return folder if native else folder / "optim"


def make(root: Path, *, native: bool = False) -> Path:
    """By its second worker, or by the first: six updates, with a save of every second one."""
    model, adam, schedule = parts()
    for step in range(1, 7):
        update(model, adam, schedule)
        if step % 2:
            continue
        weights = root / f"step_{step}" / "policy" / "weights"
        saved: dict[str, Any] = {**model.state_dict()}
        dcp.save(
            {"model": saved} if native else saved,
            checkpoint_id=weights if native else weights / "model",
            no_dist=True,
        )
        state = _state(model, adam, schedule, native)
        dcp.save(state, checkpoint_id=_folder(root, step, native), no_dist=True)
        counted = {"epoch": 0, "step": step, "total_steps": step, "consumed_samples": 2 * step}
        (root / f"step_{step}" / "training_info.json").write_text(json.dumps(counted))
        torch.save({"read": step}, root / f"step_{step}" / "train_dataloader.pt")
    return root


def resumed(root: Path, *, native: bool) -> dict[str, Any]:
    """As its loaders do at the highest step: the settings of the first update, and the rate of the
    second one."""
    step = max(int(path.name.removeprefix("step_")) for path in root.glob("step_*"))
    model, adam, schedule = parts()
    state = _state(model, adam, schedule, native)
    dcp.load(state, checkpoint_id=_folder(root, step, native), no_dist=True)
    saved = state["optim"] if native else state
    set_optimizer_state_dict(model, adam, saved["optim"], options=_options(native))
    schedule.load_state_dict(saved["sched"])
    (group,) = adam.param_groups
    used = {key: group[key] for key in ("lr", "betas", "eps", "weight_decay")}
    used["adam_step"] = {float(held["step"]) for held in adam.state.values()}
    used["moments"] = any(bool(held["exp_avg"].any()) for held in adam.state.values())
    adam.step()
    schedule.step()
    return {**used, "then": group["lr"]}
