"""Runs of trainers that a page describes, written by functions of torch as the cited sources do."""

from __future__ import annotations

import json
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
)

WALL_CLOCK = timedelta(seconds=1.5)
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def stepped_cosine(model: torch.nn.Module, times: int) -> tuple[Any, Any]:
    """An Adam and its scheduler after some updates of `model`."""
    adam = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(adam, T_max=40)
    for _ in range(times):
        model(torch.rand(3, 4)).sum().backward()
        adam.step()
        schedule.step()
    return adam, schedule


def update(model: torch.nn.Module, adam: Any, schedule: Any) -> None:
    """One of a model of four inputs, and the step of its scheduler."""
    model(torch.ones(3, 4)).pow(2).sum().backward()
    adam.step()
    schedule.step()
    adam.zero_grad()


def composer(root: Path) -> Path:
    """As `State.state_dict` and `CheckpointSaver` of Composer 0.32 write it, optimizer and weights
    by torch's own functions; source: mosaicml/composer at 6405188."""
    root.mkdir(parents=True)
    model = torch.nn.Sequential(torch.nn.Linear(4, 2))
    for step in (2, 4, 6):
        adam, schedule = stepped_cosine(model, step)
        state = composed(step, model, adam, schedule)
        torch.save(state, root / f"ep0-ba{step}-rank0.pt")
    (root / "latest-rank0.pt").symlink_to("ep0-ba6-rank0.pt")
    return root


def composed(step: int, model: torch.nn.Module, adam: Any, schedule: Any) -> dict[str, Any]:
    """What Composer saves of these."""
    weights, optimizer = get_state_dict(model, adam)
    counts = {"batch": step, "sample": 8 * step, "token": 64 * step, "total_wct": WALL_CLOCK}
    state = {
        "model": weights,
        "optimizers": {"AdamW": optimizer},
        "schedulers": {type(schedule).__name__: schedule.state_dict()},
        "timestamp": {"Timestamp": counts},
        "metadata": {"torch_version": torch.__version__},
    }
    return {"state": state, "rng": [{}]}


def stepped(times: int) -> tuple[torch.nn.Module, Any, Any]:
    """A model, its AdamW and LambdaLR after some updates."""
    torch.manual_seed(5)
    model = torch.nn.Sequential(torch.nn.Linear(4, 2))
    adam = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(adam, lambda step: 0.9**step)
    for _ in range(times):
        model(torch.ones(3, 4)).pow(2).sum().backward()
        adam.step()
        schedule.step()
    return model, adam, schedule


def composer_state(step: int) -> dict[str, Any]:
    """`State.state_dict` of mosaicml/composer 6405188 with fsdp state_dict_type sharded."""
    return composed(step, *stepped(step))


def composer_sharded(root: Path) -> Path:
    for step in (2, 4, 6):
        dcp.save(composer_state(step), checkpoint_id=root / f"ep0-ba{step}", no_dist=True)
    (root / "latest-rank0.pt").symlink_to("ep0-ba6")
    return root


def automodel_state(step: int) -> dict[str, Any]:
    """`OptimizerState.state_dict` of NVIDIA-NeMo/Automodel 36044ad, and its scheduler's."""
    model, adam, _ = stepped(step)
    schedule = {
        "max_lr": 1e-3, "lr_warmup_steps": 0, "num_steps": step, "lr_decay_style": "cosine",
        "lr_decay_steps": 40, "min_lr": 0.0, "start_wd": 0.01, "end_wd": 0.01,
        "wd_incr_style": "constant", "wd_incr_steps": 40,
    }  # fmt: skip
    return {"optim": get_optimizer_state_dict(model, adam, options=FLAT), "sched": schedule}


def automodel(root: Path, form: str = "") -> Path:
    """With the weights in the `form` of model_save_format, or without `model/`."""
    for step in (2, 4, 6):
        folder = root / f"epoch_0_step_{step}"
        dcp.save(automodel_state(step), checkpoint_id=folder / "optim", no_dist=True)
        if form:
            path = folder / "model"
            safe = HuggingFaceStorageWriter(str(path), save_distributed=True)
            writer = safe if form == "safetensors" else dcp.FileSystemWriter(path)
            weights = {**stepped(step)[0].state_dict()}
            dcp.save(weights, storage_writer=writer, no_dist=True)
        torch.save({"step": step, "epoch": 0}, folder / "step_scheduler.pt")
    (root / "LATEST").symlink_to("epoch_0_step_6")
    return root


def verl(root: Path) -> Path:
    """`FSDPCheckpointManager.save_checkpoint` of volcengine/verl b178a3c, FSDP1: views of flat
    parameters, as torch's state_dict() has them."""
    for step in (2, 4, 6):
        folder = root / f"global_step_{step}" / "actor"
        folder.mkdir(parents=True)
        for rank in range(2):
            model, adam, schedule = stepped(step)
            name = f"world_size_2_rank_{rank}.pt"
            torch.save(model.state_dict(), folder / f"model_{name}")
            torch.save(adam.state_dict(), folder / f"optim_{name}")
            extra = {"lr_scheduler": schedule.state_dict(), "rng": {}}
            torch.save(extra, folder / f"extra_state_{name}")
        torch.save({"samples": 8 * step}, root / f"global_step_{step}" / "data.pt")
    (root / "latest_checkpointed_iteration.txt").write_text("6")
    return root


def _model_and_adam() -> tuple[torch.nn.Module, Any]:
    torch.manual_seed(5)
    model = torch.nn.Sequential(torch.nn.Linear(4, 2))
    return model, torch.optim.AdamW(
        model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1
    )


def lingua_parts() -> tuple[torch.nn.Module, Any, Any]:
    """What `build_optimizer` of facebookresearch/lingua 437d680 makes: a rate of 0 at the start."""
    model, adam = _model_and_adam()
    rate = partial(warmed_up, warmup=2)
    return model, adam, torch.optim.lr_scheduler.LambdaLR(adam, rate)


def warmed_up(step: int, warmup: int) -> float:
    """The share of the peak: its schedules are partial functions, which keep nothing."""
    return min(1.0, step / warmup) * 0.99**step


def lingua(root: Path) -> Path:
    """`CheckpointManager.save` and `TrainState.state_dict` of the same, two ranks."""
    model, adam, schedule = lingua_parts()
    for step in range(1, 7):
        update(model, adam, schedule)
        if step % 2:
            continue
        folder = root / f"{step:010d}"
        weights, optimizer = get_state_dict(model, adam)
        state = {"model": weights, "optim": optimizer}
        dcp.save(state, checkpoint_id=folder, no_dist=True)
        (folder / "params.json").write_text(json.dumps({"name": "lingua"}))
        for rank in range(2):
            counted = {
                "step": step,
                "acc_step": 0,
                "data_loader_state": {"start_token": 0, "it_state": {"seed": rank}},
                "scheduler": schedule.state_dict(),
            }
            (folder / f"train_state_{rank:05d}.json").write_text(json.dumps(counted))
    return root


class Noam(torch.optim.lr_scheduler.LRScheduler):
    """What NoamLR of fairseq2 0.8.1 keeps, and makes of a step."""

    def __init__(self, optimizer: Any, num_warmup_steps: int) -> None:
        self.num_warmup_steps = num_warmup_steps
        super().__init__(optimizer)

    def get_lr(self) -> list[float]:
        now, warmup = self.last_epoch, self.num_warmup_steps
        share = now * warmup**-1.5 if now < warmup else now**-0.5
        return [base * share for base in self.base_lrs]


def fairseq2(root: Path) -> Path:
    """`StandardCheckpointManager` of the same, two ranks of its data."""
    parts = []
    for _ in range(2):
        model, adam = _model_and_adam()
        parts.append((model, adam, Noam(adam, 2)))
    for step in range(1, 7):
        for rank, (model, adam, schedule) in enumerate(parts):
            update(model, adam, schedule)
            if step % 2:
                continue
            counted = {
                "_step_nr": step,
                "_data_epoch_nr": 1,
                "_lr_scheduler": schedule.state_dict(),
                "_fp16_loss_scaler": {},
                "_base_wall_time": 0.5,
            }
            for name, state in {
                f"trainer/rank_{rank:02d}": counted,
                f"optimizer/pp_00/tp_00/sdp_{rank:02d}": adam.state_dict(),
                f"model/pp_00/tp_00/sdp_{rank:02d}": model.state_dict(),
                f"data_reader/dp_{rank:02d}": {"read": step},
            }.items():
                file = root / f"step_{step}" / f"{name}.pt"
                file.parent.mkdir(parents=True, exist_ok=True)
                torch.save(state, file)
    return root


def litgpt(root: Path) -> Path:
    """`save_checkpoint` of pretrain.py in LitGPT 0.5.13: two micro-batches are one update."""
    model, adam = _model_and_adam()
    for step in range(1, 7):
        _update(model, adam)
        counted = {"iter_num": 2 * step, "step_count": step, "train_dataloader": {"batch": step}}
        _save_litgpt(root / f"step-{step:08d}", model, adam, counted)
    return root


def litgpt_finetune(root: Path) -> Path:
    """`fit` of finetune/full.py of the same, with its scheduler."""
    model, adam = _model_and_adam()
    rise = torch.optim.lr_scheduler.LambdaLR(adam, lambda step: step / 2)
    fall = torch.optim.lr_scheduler.CosineAnnealingLR(adam, T_max=8)
    schedule = torch.optim.lr_scheduler.SequentialLR(adam, [rise, fall], milestones=[2])
    for step in range(1, 7):
        _update(model, adam)
        schedule.step()
        counted = {"iter_num": step, "step_count": step, "scheduler": schedule.state_dict()}
        _save_litgpt(root / f"step-{step:06d}", model, adam, counted)
    return root


def nanochat(root: Path) -> Path:
    """`save_checkpoint` of nanochat at 92d63d4, whose script makes lr of initial_lr."""
    root.mkdir(parents=True)
    model, adam = _model_and_adam()
    for group in adam.param_groups:
        group |= {"kind": "adamw", "initial_lr": group["lr"]}
    for step in range(1, 7):
        for group in adam.param_groups:
            group["lr"] = group["initial_lr"] * (1 - step / 20)
        _update(model, adam)
        if step % 2:
            continue
        torch.save(model.state_dict(), root / f"model_{step:06}.pt")
        torch.save(adam.state_dict(), root / f"optim_{step:06}_rank0.pt")
        meta = {"step": step, "model_config": {"n_layer": 2}, "user_config": {"depth": 2}}
        (root / f"meta_{step:06}.json").write_text(json.dumps(meta))
    return root


def mmengine(root: Path, by: str = "iter") -> Path:
    """`Runner.save_checkpoint` of mmengine 0.10.7, with a LinearLR that is over."""
    root.mkdir(parents=True)
    model, adam = _model_and_adam()
    for group in adam.param_groups:
        group["initial_lr"] = group["lr"]
    for step in range(1, 7):
        _update(model, adam)
        if step % 2:
            continue
        number = step if by == "iter" else step // 2
        schedule = {
            "param_name": "lr", "begin": 0, "end": 1, "by_epoch": False, "last_step": 0,
            "base_values": [1e-3], "_last_value": [1e-3], "_global_step": step, "verbose": False,
            "start_factor": 1.0, "end_factor": 1.0, "total_iters": 1,
        }  # fmt: skip
        state = {
            "meta": {"iter": step, "epoch": number if by == "epoch" else 0},
            "state_dict": model.state_dict(),
            "message_hub": {"runtime_info": {"iter": step}},
            "optimizer": adam.state_dict(),
            "param_schedulers": [schedule],
        }
        torch.save(state, root / f"{by}_{number}.pth")
        (root / "last_checkpoint").write_text(str(root / f"{by}_{number}.pth"))
    return root


def _update(model: torch.nn.Module, adam: Any) -> None:
    model(torch.ones(3, 4)).pow(2).sum().backward()
    adam.step()
    adam.zero_grad()


def _save_litgpt(folder: Path, model: torch.nn.Module, adam: Any, more: dict[str, Any]) -> None:
    if more["step_count"] % 2:
        return
    folder.mkdir(parents=True)
    state = {"model": model.state_dict(), "optimizer": adam.state_dict(), **more}
    torch.save(state, folder / "lit_model.pth")
    (folder / "hyperparameters.yaml").write_text("seed: 42\n")
