"""Runs of Coqui's trainer, nerfstudio, rsl_rl, DETR and sd-scripts, written by torch's functions as
the sources do that their pages name; and what a resume of each loads."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

import torch

NAMES = ("fields", "camera_opt")


class Loop:
    """A model with an optimizer, or two, each with its scheduler: torch's own loop."""

    def __init__(self, optimizers: int = 1) -> None:
        self.model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 1))
        parts = [self.model] if optimizers == 1 else list(self.model)
        self.optimizers = [
            torch.optim.AdamW(part.parameters(), lr=1e-3 / (i + 1)) for i, part in enumerate(parts)
        ]
        self.schedules = [torch.optim.lr_scheduler.StepLR(each, 2, 0.9) for each in self.optimizers]

    def update(self) -> None:
        self.model(torch.ones(3, 4)).pow(2).sum().backward()
        for each in (*self.optimizers, *self.schedules):
            each.step()
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def load(self, optimizers: Any, schedules: Any = ()) -> None:
        for optimizer, state in zip(self.optimizers, optimizers, strict=True):
            optimizer.load_state_dict(state)
        for schedule, state in zip(self.schedules, schedules, strict=False):
            schedule.load_state_dict(state)

    def next(self) -> list[dict[str, Any]]:
        """What the next update uses, by optimizer."""
        used = []
        for optimizer in self.optimizers:
            (group,) = optimizer.param_groups
            steps = {float(state["step"]) for state in optimizer.state.values()}
            used.append({**{k: group[k] for k in ("lr", "betas", "weight_decay")}, "step": steps})
        return used


def coqui(root: Path) -> Path:
    """`save_checkpoint` and `save_best_model` of coqui-tts-trainer 0.4.0: the first update is 0."""
    root.mkdir(parents=True)
    loop = Loop()
    for step in range(9):
        loop.update()
        if step and step % 2 == 0 and step < 8:
            torch.save(_coqui(loop, step), root / f"checkpoint_{step}.pth")
    torch.save(_coqui(loop, 9), root / "best_model_9.pth")
    torch.save(_coqui(loop, 9), root / "best_model.pth")
    return root


def _coqui(loop: Loop, step: int) -> dict[str, Any]:
    return {
        "config": {"lr": 1e-3}, "model": loop.model.state_dict(),
        "optimizer": [each.state_dict() for each in loop.optimizers],
        "scheduler": [each.state_dict() for each in loop.schedules],
        "scaler": None, "step": step, "epoch": 0, "date": "November 30, 2026",
    }  # fmt: skip


def coqui_resumed(root: Path) -> tuple[int, Loop]:
    """By `get_last_checkpoint`: the highest number of either kind; of a best model without one its
    copy. The step, and the loop."""
    numbers: dict[str, dict[int, Path]] = {"checkpoint": {}, "best_model": {}}
    for kind, found in numbers.items():
        for path in root.glob("*.pth"):
            if match := re.search(f"{kind}_([0-9]+)", path.name):
                found[int(match[1])] = path
        if not found and (copy := root / f"{kind}.pth").exists():
            found[torch.load(copy, weights_only=False)["step"]] = copy
    every = numbers["best_model"] | numbers["checkpoint"]
    saved = torch.load(every[max(every)], weights_only=False)
    loop = Loop()
    loop.load(saved["optimizer"], saved["scheduler"])
    return saved["step"], loop


def nerfstudio(root: Path, optimizers: int = 1) -> Path:
    """`Trainer.save_checkpoint` of nerfstudio at 50e0e3c: the first update is 0."""
    folder = root / "nerfstudio_models"
    folder.mkdir(parents=True)
    loop = Loop(optimizers)

    def named(parts: Any) -> dict[str, Any]:
        return {name: part.state_dict() for name, part in zip(NAMES, parts, strict=False)}

    for step in range(8):
        loop.update()
        if (step and step % 2 == 0) or step == 7:
            state = {
                "step": step, "pipeline": loop.model.state_dict(),
                "optimizers": named(loop.optimizers),
                "schedulers": named(loop.schedules),
                "scalers": torch.amp.GradScaler("cpu", enabled=False).state_dict(),
            }  # fmt: skip
            torch.save(state, folder / f"step-{step:09d}.ckpt")
    return root


def nerfstudio_resumed(root: Path) -> tuple[int, Loop]:
    """By `_load_checkpoint` with `load_dir`, which takes each name there for a step."""
    folder = root / "nerfstudio_models"
    names = [path.name for path in folder.iterdir()]
    step = max(int(name[name.find("-") + 1 : name.find(".")]) for name in names)
    saved = torch.load(folder / f"step-{step:09d}.ckpt", weights_only=False)
    loop = Loop(len(saved["optimizers"]))
    loop.load(saved["optimizers"].values(), saved["schedulers"].values())
    return saved["step"], loop


def rsl_rl(root: Path) -> Path:
    """`OnPolicyRunner.save` of rsl-rl-lib 5.5.1: two updates an iteration, and the first is 0."""
    root.mkdir(parents=True)
    loop = Loop()
    for iteration in range(7):
        for _ in range(2):
            loop.update()
        if iteration % 2 == 0:
            state = {
                "actor_state_dict": loop.model[0].state_dict(),
                "critic_state_dict": loop.model[1].state_dict(),
                "optimizer_state_dict": loop.optimizers[0].state_dict(),
                "iter": iteration, "infos": None,
            }  # fmt: skip
            torch.save(state, root / f"model_{iteration}.pt")
    return root


def rsl_rl_resumed(root: Path) -> tuple[int, Loop]:
    """By `load` of the highest, as Isaac Lab picks it."""
    last = max(root.glob("model_*.pt"), key=lambda path: f"{path.name:0>15}")
    saved = torch.load(last, weights_only=False)
    loop = Loop()
    loop.load([saved["optimizer_state_dict"]])
    return saved["iter"], loop


def detr(root: Path) -> Path:
    """`main` of facebookresearch/detr at 29901c5: two updates an epoch, the first is 0."""
    root.mkdir(parents=True)
    loop = Loop()
    for epoch in range(6):
        for _ in range(2):
            loop.update()
        state = {
            "model": loop.model.state_dict(), "optimizer": loop.optimizers[0].state_dict(),
            "lr_scheduler": loop.schedules[0].state_dict(), "epoch": epoch,
            "args": argparse.Namespace(lr=1e-3),
        }  # fmt: skip
        torch.save(state, root / "checkpoint.pth")
        if epoch % 2:
            torch.save(state, root / f"checkpoint{epoch:04}.pth")
        with (root / "log.txt").open("a") as log:
            log.write(json.dumps({"train_loss": 3.0 - epoch / 10, "epoch": epoch}) + "\n")
    return root


def detr_resumed(root: Path) -> tuple[int, Loop]:
    """By `--resume checkpoint.pth`."""
    saved = torch.load(root / "checkpoint.pth", weights_only=False)
    assert json.loads((root / "log.txt").read_text().splitlines()[-1])["epoch"] == saved["epoch"]
    loop = Loop()
    loop.load([saved["optimizer"]], [saved["lr_scheduler"]])
    return saved["epoch"], loop


def sd_scripts(root: Path, only_steps: bool = False) -> Path:
    """`save_and_remove_state_*` of kohya-ss/sd-scripts at 48d368fa: what Accelerate saves, by names
    of steps, of an epoch, and of the end, whose number is one more than the updates. Of the last
    two no name says the step."""
    loop = Loop()
    for step in range(1, 7):
        loop.update()
        name = f"-step{step:08d}" if step % 2 == 0 else f"-{step // 3:06d}" if step == 3 else None
        for kind in (name, "" if step == 6 else None):
            if kind is None or (only_steps and "step" not in kind):
                continue
            folder = root / f"lora{kind}-state"
            folder.mkdir(parents=True)
            torch.save(loop.optimizers[0].state_dict(), folder / "optimizer.bin")
            torch.save(loop.schedules[0].state_dict(), folder / "scheduler.bin")
            count = {"current_epoch": 1, "current_step": step + ("step" not in kind)}
            (folder / "train_state.json").write_text(json.dumps(count))
            (root / f"lora{kind}.safetensors").touch()
    return root


def sd_scripts_resumed(root: Path) -> tuple[int, Loop]:
    """By `--resume` of the folder with the highest step."""
    folders = {_count(path): path for path in root.glob("*-state")}
    last = folders[max(folders)]
    loop = Loop()
    loop.load([torch.load(last / "optimizer.bin")], [torch.load(last / "scheduler.bin")])
    return _count(last), loop


def _count(folder: Path) -> int:
    return int(json.loads((folder / "train_state.json").read_text())["current_step"])
