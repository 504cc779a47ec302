"""Trains a small model with a library that no format here knows, or resumes it.

Usage: python -m tests.support.unknown_trainers fvcore|torchtnt RUN [--resume]

With --resume it prints, as JSON, what the library's loader gave the optimizer, and trains on.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch

from tests.support.newest_megatron import beside

FOLDER = beside("trainers")
STEPS = 15


def said(step: int, adam: Any) -> None:
    """What the next update uses."""
    (group,) = adam.param_groups
    states = list(adam.state.values())
    print(json.dumps({
        "step": step, "lr": group["lr"], "betas": group["betas"], "eps": group["eps"],
        "adam_step": int(states[0]["step"]),
        "norm": sum(float(state["exp_avg"].norm()) for state in states),
    }), flush=True)  # fmt: skip


def made() -> tuple[torch.nn.Module, Any, Any]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    adam = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return model, adam, torch.optim.lr_scheduler.CosineAnnealingLR(adam, 100)


def fvcore(root: Path, resume: bool) -> None:
    """The Checkpointer that detectron2 trains with: flat files, and a pointer with their name."""
    from fvcore.common.checkpoint import Checkpointer, PeriodicCheckpointer

    model, adam, schedule = made()
    checkpointer = Checkpointer(model, str(root), optimizer=adam, scheduler=schedule)
    start = 0
    if resume:
        start = checkpointer.resume_or_load("", resume=True)["iteration"] + 1
        said(start, adam)
    saver = PeriodicCheckpointer(checkpointer, 5, max_iter=1000)
    for step in range(start, start + STEPS):
        adam.zero_grad()
        model(torch.rand(3, 4)).square().mean().backward()
        adam.step()
        schedule.step()
        saver.step(step)


def torchtnt(root: Path, resume: bool) -> None:
    """Its AutoUnit and DistributedCheckpointSaver: folders of torch.distributed.checkpoint."""
    from torchtnt.framework import train
    from torchtnt.framework.auto_unit import AutoUnit
    from torchtnt.framework.callbacks import DistributedCheckpointSaver

    class Unit(AutoUnit[torch.Tensor]):
        def configure_optimizers_and_lr_scheduler(self, module: torch.nn.Module) -> Any:
            adam = torch.optim.AdamW(module.parameters(), lr=1e-3)
            return adam, torch.optim.lr_scheduler.CosineAnnealingLR(adam, 100)

        def compute_loss(self, state: Any, data: torch.Tensor) -> Any:
            out = self.module(data)
            return out.square().mean(), out

    unit = Unit(module=made()[0], step_lr_interval="step", device=torch.device("cpu"))
    if resume:
        DistributedCheckpointSaver.restore_from_latest(str(root), unit)
        said(unit.train_progress.num_steps_completed, unit.optimizer)
    saver = DistributedCheckpointSaver(str(root), save_every_n_train_steps=5)
    batches = [torch.rand(3, 4) for _ in range(STEPS)]
    train(unit, batches, max_epochs=2 if resume else 1, callbacks=[saver])


def main() -> None:
    library, root, *options = sys.argv[1:]
    sys.path.append(str(FOLDER))
    warnings.simplefilter("ignore")  # the libraries' own
    {"fvcore": fvcore, "torchtnt": torchtnt}[library](Path(root), "--resume" in options)


if __name__ == "__main__":
    main()
