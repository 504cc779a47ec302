"""MMEngine's own Runner on a tiny model and a CPU, which may resume.

Usage: python -m tests.support.mmengine_trainer RUN UPDATES SCHEDULES [--epochs] [--resume] [--best]

SCHEDULES are the param_scheduler of its config. It prints, as JSON, what each update used.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch

from tests.support.trainers_folder import FOLDER

sys.path.append(str(FOLDER))

from mmengine.evaluator import BaseMetric
from mmengine.model import BaseModel
from mmengine.runner import Runner
from torch.utils.data import DataLoader

EVERY, EPOCH, PEAK = 2, 3, 1e-2
"""Updates between saves; updates of an epoch, each of which is saved with --epochs."""


class Tiny(BaseModel):
    """Two layers, and the mean square of what they make as the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))

    def forward(self, inputs: Any, mode: str = "tensor") -> Any:
        made = self.layers(inputs)
        return {"loss": made.square().mean()} if mode == "loss" else [made]


class Mean(BaseMetric):
    """Of what the model makes: the higher, the better."""

    def process(self, data_batch: Any, data_samples: Any) -> None:
        self.results.append(float(data_samples[0].mean()))

    def compute_metrics(self, results: list[float]) -> dict[str, float]:
        return {"mean": sum(results)}


def main() -> None:
    """Train as the command line says."""
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser()
    parser.add_argument("run", type=Path)
    parser.add_argument("updates", type=int)
    parser.add_argument("schedules", type=json.loads)
    parser.add_argument("--epochs", action="store_true")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--best", action="store_true")
    given = parser.parse_args()
    torch.manual_seed(1)
    rows = torch.rand(3 * EPOCH, 4, generator=torch.Generator().manual_seed(3))
    loader = DataLoader([{"inputs": row} for row in rows], batch_size=3)  # type: ignore[arg-type]
    by, length = ("epoch", EPOCH) if given.epochs else ("iter", 1)
    loop = {"by_epoch": given.epochs, f"max_{by}s": given.updates // length}
    more = {}
    if given.best:
        loop["val_interval"] = 1 if given.epochs else EVERY
        more = {"val_dataloader": loader, "val_cfg": {}, "val_evaluator": [Mean()]}
    said: dict[int, Any] = {}
    step = torch.optim.AdamW.step

    def heard(self: Any, *words: Any, **named: Any) -> Any:
        group = self.param_groups[0]
        states = [state for state in self.state.values() if state]
        said[runner.iter + 1] = {
            "lr": group["lr"], "betas": group["betas"], "eps": group["eps"],
            "weight_decay": group["weight_decay"],
            "adam_step": max((float(state["step"]) for state in states), default=0),
            "norm": sum(float(state["exp_avg"].norm()) for state in states),
        }  # fmt: skip
        return step(self, *words, **named)

    torch.optim.AdamW.step = heard  # type: ignore[method-assign]
    saving = {"type": "CheckpointHook", "interval": EVERY // length or 1, "by_epoch": given.epochs}
    if given.best:
        saving |= {"save_best": "mean", "rule": "greater"}
    runner = Runner(
        model=Tiny(),
        work_dir=str(given.run),
        train_dataloader=loader,
        optim_wrapper={
            "optimizer": {"type": "AdamW", "lr": PEAK, "betas": (0.9, 0.95)},
        },
        param_scheduler=given.schedules,
        train_cfg=loop,
        default_hooks={"checkpoint": saving, "logger": {"type": "LoggerHook", "interval": 1}},
        visualizer={"type": "Visualizer", "vis_backends": [{"type": "LocalVisBackend"}]},
        resume=given.resume,
        randomness={"seed": 1},
        log_level="ERROR",
        **more,
    )
    runner.train()
    print(json.dumps(said))


if __name__ == "__main__":
    main()
