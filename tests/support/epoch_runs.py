"""Runs of trainers that save at each epoch, written by torch as the cited sources do."""

from __future__ import annotations

import copy
import os
import shutil
import sys
import types
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

UPDATES = 3


def epochs(number: int) -> Iterator[tuple[int, torch.nn.Module, Any]]:
    """A model and its AdamW after each epoch."""
    torch.manual_seed(5)
    model = torch.nn.Sequential(torch.nn.Linear(4, 2))
    adam = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
    for epoch in range(number):
        for _ in range(UPDATES):
            adam.zero_grad()
            model(torch.rand(3, 4)).square().sum().backward()
            adam.step()
        yield epoch, model, adam


def table(path: Path, head: str, numbers: Iterable[int]) -> None:
    """A table of an epoch a row, by these numbers."""
    rows = [[str(number)] + ["0.5"] * head.count(",") for number in numbers]
    path.write_text("\n".join([head, *(",".join(row) for row in rows), ""]))


def open_clip(root: Path) -> Path:
    """`main` of open_clip_train, open_clip_torch 3.3.0, with --save-most-recent."""
    root.mkdir(parents=True)
    for epoch, model, adam in epochs(4):
        state = {"epoch": epoch + 1, "name": "tiny", "state_dict": model.state_dict()}
        state["optimizer"] = adam.state_dict()
        torch.save(state, root / f"epoch_{epoch + 1}.pt")
        torch.save(state, root / "epoch_latest.pt")
    return root


def timm(root: Path) -> Path:
    """`CheckpointSaver.save_checkpoint` of timm 1.0.31, with its hard links, and `update_summary`;
    epoch 1 was best."""
    root.mkdir(parents=True)
    table(root / "summary.csv", "epoch,train_loss,eval_top1,lr", range(4))
    last = root / "last.pth.tar"
    for epoch, model, adam in epochs(4):
        for group in adam.param_groups:
            group["initial_lr"] = 1e-3
        state = {"epoch": epoch, "arch": "tiny", "state_dict": model.state_dict(), "version": 2}
        last.unlink(missing_ok=True)
        torch.save({**state, "optimizer": adam.state_dict()}, last)
        if epoch:
            os.link(last, root / f"checkpoint-{epoch}.pth.tar")
        if epoch == 1:
            os.link(last, root / "model_best.pth.tar")
    return root


YOLO = "ultralytics.nn.tasks.DetectionModel"
"""The class of the object that its saver writes; it may evaluate a text when it is called."""


@contextmanager
def _in_ultralytics() -> Iterator[type[torch.nn.Module]]:
    """A class by that name, while it is saved."""
    module, _, name = YOLO.rpartition(".")
    made = type(name, (torch.nn.Sequential,), {"__module__": module})
    with pytest.MonkeyPatch.context() as patch:
        for above in ("ultralytics", "ultralytics.nn", module):
            patch.setitem(sys.modules, above, types.SimpleNamespace(**{name: made}))
        yield made


def loaded(path: Path) -> Any:
    """What torch reads where the class is known."""
    with _in_ultralytics():
        return torch.load(path, weights_only=False)


def ultralytics(root: Path) -> Path:
    """`BaseTrainer.save_model` of ultralytics 8.4.190 with save_period=3: the model is one object,
    and what an optimizer has is of 16 bits. `save_metrics` counts epochs from 1, and these from 0.
    """
    folder = root / "weights"
    folder.mkdir(parents=True)
    (root / "args.yaml").write_text("epochs: 9\n")
    table(root / "results.csv", "epoch,time,train/box_loss,lr/pg0", range(1, 6))
    for epoch, model, adam in epochs(5):
        for group in adam.param_groups:
            group["initial_lr"] = 1e-3
        state = copy.deepcopy(adam.state_dict())
        for each in state["state"].values():
            each |= {key: value.half() for key, value in each.items() if key != "step"}
        saved = {"epoch": epoch, "best_fitness": 0.5, "model": None, "updates": UPDATES * epoch}
        saved |= {"optimizer": state, "scaler": {}, "train_args": {"lr0": 1e-3}}
        with _in_ultralytics() as kind:
            torch.save({**saved, "ema": kind(*model)}, folder / "last.pt")
        for name in [f"epoch{epoch}.pt"] * (epoch % 3 == 0) + ["best.pt"] * (epoch == 1):
            shutil.copyfile(folder / "last.pt", folder / name)
    return root


def torchtune(root: Path) -> Path:
    """`save_checkpoint` of torchtune 0.6.1: the weights of each epoch, and one recipe state."""
    for epoch, model, adam in epochs(4):
        for group in adam.param_groups:
            group["initial_lr"] = 1e-3
        weights = root / f"epoch_{epoch}" / "model-00001-of-00001.bin"
        weights.parent.mkdir(parents=True)
        torch.save(model.state_dict(), weights)
        state = root / "recipe_state" / "recipe_state.pt"
        state.parent.mkdir(exist_ok=True)
        counted = {"epochs_run": epoch + 1, "total_epochs": 9, "seed": 1, "dataloader": {}}
        torch.save({"optimizer": adam.state_dict(), **counted}, state)
    return root


class WarmupLR(torch.optim.lr_scheduler.LRScheduler):
    """What that of espnet 202511 keeps, and makes of a step."""

    def __init__(self, optimizer: Any, warmup_steps: int) -> None:
        self.warmup_steps = warmup_steps
        super().__init__(optimizer)

    def get_lr(self) -> list[float]:
        now, warmup = self.last_epoch + 1, self.warmup_steps
        return [base * min((warmup / now) ** 0.5, now / warmup) for base in self.base_lrs]


def espnet(root: Path, warmup: int = 10) -> Path:
    """What `Trainer.run` of espnet2 202511 saves of four epochs."""
    root.mkdir(parents=True)
    model = torch.nn.Linear(4, 2)
    adam = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
    schedule = WarmupLR(adam, warmup)
    for epoch in range(1, 5):
        for _ in range(UPDATES):
            adam.zero_grad()
            model(torch.ones(3, 4)).square().sum().backward()
            adam.step()
            schedule.step()
        state = {
            "model": model.state_dict(),
            "reporter": {"stats": {epoch: {}}, "epoch": epoch},
            "optimizers": [adam.state_dict()],
            "schedulers": [schedule.state_dict()],
            "scaler": None,
        }
        torch.save(state, root / "checkpoint.pth")
        torch.save(model.state_dict(), root / f"{epoch}epoch.pth")
        (root / "latest.pth").unlink(missing_ok=True)
        (root / "latest.pth").symlink_to(f"{epoch}epoch.pth")
    return root
