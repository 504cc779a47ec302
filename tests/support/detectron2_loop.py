"""A small model trained as detectron2 trains, saved and resumed by the keys that it saves.

Its wheels are on no index: this says again what `engine/train_loop.py`, `engine/hooks.py`,
`solver/lr_scheduler.py` and `tools/plain_train_net.py` do at 02b5c4e, where it was run by hand."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

PEAK, END, WARMUP, PERIOD = 0.01, 18, 3, 3


class LRMultiplier(torch.optim.lr_scheduler.LRScheduler):
    """Its factor is that of the code alone: what it saves are two keys."""

    def get_lr(self) -> list[Any]:
        at = self.last_epoch
        rise = min(1.0, (at + 1) / WARMUP)
        factor = rise * (1 + math.cos(math.pi * min(at, END) / END)) / 2
        return [rate * factor for rate in self.base_lrs]

    def state_dict(self) -> dict[str, Any]:
        return {"base_lrs": self.base_lrs, "last_epoch": self.last_epoch}


@dataclass
class Loop:
    """`plain` is the loop of `plain_train_net.py`, else it is `DefaultTrainer`'s."""

    root: Path
    plain: bool = False

    def __post_init__(self) -> None:
        torch.manual_seed(3)
        self.model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 1))
        groups = [
            {"params": list(part.parameters()), "lr": PEAK / (i + 1), "weight_decay": 0.1 * i}
            for i, part in enumerate(self.model)
        ]
        self.optimizer = torch.optim.SGD(groups, lr=PEAK, momentum=0.9)
        self.scheduler = LRMultiplier(self.optimizer)
        self.begin = 0

    def train(self, until: int) -> list[list[float]]:
        """The rates of each update up to number `until`, which is left out."""
        self.root.mkdir(parents=True, exist_ok=True)
        used = []
        for iteration in range(self.begin, until):
            used.append([group["lr"] for group in self.optimizer.param_groups])
            self.optimizer.zero_grad()
            loss = self.model(torch.ones(5, 4)).square().mean()
            loss.backward()
            self.optimizer.step()
            row = {"iteration": iteration, "lr": used[-1][0], "total_loss": loss.item()}
            with (self.root / "metrics.json").open("a") as file:
                file.write(json.dumps(row) + "\n")
            self.scheduler.step()
            if (iteration + 1) % PERIOD == 0:
                self._save(f"model_{iteration:07d}.pth", iteration)
            if iteration == END - 1:
                self._save("model_final.pth", iteration)
        return used

    def resume(self) -> Loop:
        """As `resume_or_load(resume=True)` does: hooks first, and then the optimizer."""
        name = (self.root / "last_checkpoint").read_text()
        state = torch.load(self.root / name, weights_only=False)
        trainer = state if self.plain else state["trainer"]
        self.model.load_state_dict(state["model"])
        schedule = state["scheduler"] if self.plain else trainer["hooks"]["LRScheduler"]
        self.scheduler.load_state_dict(schedule)
        inner = trainer if self.plain else trainer["_trainer"]
        self.optimizer.load_state_dict(inner["optimizer"])
        self.begin = trainer["iteration"] + 1
        return self

    def _save(self, name: str, iteration: int) -> None:
        optimizer, schedule = self.optimizer.state_dict(), self.scheduler.state_dict()
        state: dict[str, Any] = {"model": self.model.state_dict(), "iteration": iteration}
        if self.plain:
            state |= {"optimizer": optimizer, "scheduler": schedule}
        else:
            state["trainer"] = {
                "iteration": iteration,
                "hooks": {"LRScheduler": schedule},
                "_trainer": {"iteration": iteration, "optimizer": optimizer},
            }
        torch.save(state, self.root / name)
        (self.root / "last_checkpoint").write_text(name)


def run(root: Path, plain: bool = False) -> Path:
    """Four saved steps of one that broke off."""
    Loop(root, plain).train(12)
    return root
