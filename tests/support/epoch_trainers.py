"""Trains a small model by the code of a trainer that saves at each epoch, or resumes it.

Usage: python -m tests.support.epoch_trainers timm|open_clip RUN [--resume] [WORD …]

With --resume it prints, as JSON, what the first update uses, and trains on. Words are its own.
"""

from __future__ import annotations

import argparse
import json
import sys
import types
import warnings
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from tests.support.newest_megatron import beside

FOLDER = beside("trainers")
EPOCHS, UPDATES = 4, 3


def telling() -> None:
    """Each first update of an AdamW says what it uses."""
    step, told = torch.optim.AdamW.step, []

    def heard(self: Any, *given: Any) -> Any:
        if not told:
            told.append(True)
            states = [state for state in self.state.values() if state]
            group = self.param_groups[-1]
            print(json.dumps({
                "lr": group["lr"], "betas": group["betas"], "eps": group["eps"],
                "weight_decay": [each["weight_decay"] for each in self.param_groups],
                "adam_step": max((float(state["step"]) for state in states), default=0),
                "norm": sum(float(state["exp_avg"].norm()) for state in states),
            }), flush=True)  # fmt: skip
        return step(self, *given)

    torch.optim.AdamW.step = heard


def timm(root: Path, resume: bool, words: list[str]) -> None:
    """What `train.py` does in each of its parts, by the functions of the package."""
    from timm.models import resume_checkpoint
    from timm.optim import create_optimizer_v2
    from timm.scheduler import create_scheduler_v2
    from timm.utils import CheckpointSaver, update_summary

    root.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    adam = create_optimizer_v2(
        model, opt="adamw", lr=float((words or ["1e-3"])[0]), weight_decay=0.05
    )
    start = resume_checkpoint(model, str(root / "last.pth.tar"), optimizer=adam) if resume else 0
    schedule, _ = create_scheduler_v2(adam, sched="cosine", num_epochs=20, warmup_epochs=1)
    if start:
        schedule.step(start)
    saver = CheckpointSaver(
        model, adam, args=argparse.Namespace(model="tiny"), checkpoint_dir=str(root), max_history=3
    )
    for epoch in range(start, start + EPOCHS):
        for _ in range(UPDATES):
            adam.zero_grad()
            model(torch.rand(3, 4)).square().mean().backward()
            adam.step()
        schedule.step(epoch + 1)
        metric = {"loss": abs(epoch - 1.2)}
        update_summary(epoch, metric, metric, root / "summary.csv", lr=adam.param_groups[0]["lr"])
        saver.save_checkpoint(epoch, metric=-abs(epoch - 1.2))


TINY = {
    "embed_dim": 8,
    "vision_cfg": {
        "image_size": 16, "layers": 1, "width": 16, "head_width": 8, "patch_size": 8,
    },
    "text_cfg": {"context_length": 8, "vocab_size": 49408, "width": 8, "heads": 1, "layers": 1},
}  # fmt: skip


def open_clip(root: Path, resume: bool, words: list[str]) -> None:
    """Its own `main`. `root` is the folder `checkpoints` of the run."""
    if find_spec("pandas") is None:  # reads tables of pairs, and there is none here
        sys.modules["pandas"] = empty = types.ModuleType("pandas")
        empty.__spec__ = ModuleSpec("pandas", None)
    from open_clip.factory import add_model_config
    from open_clip_train.main import main

    config = root.parent.parent / "tiny.json"
    config.parent.mkdir(parents=True, exist_ok=True)
    config.write_text(json.dumps(TINY))
    add_model_config(config)
    main([
        "--dataset-type", "synthetic", "--train-num-samples", str(2 * UPDATES), "--batch-size", "2",
        "--model", "tiny", "--workers", "0", "--precision", "fp32", "--lr", "1e-3", "--warmup", "2",
        "--epochs", str(2 * EPOCHS if resume else EPOCHS), "--logs", str(root.parent.parent),
        "--name", root.parent.name, "--save-frequency", "1", "--log-every-n-steps", "1",
        *(["--resume", "latest"] if resume else []), *words,
    ])  # fmt: skip


def main() -> None:
    library, root, *words = sys.argv[1:]
    sys.path.append(str(FOLDER))
    warnings.simplefilter("ignore")  # the libraries' own
    from tests.support import trainers_folder  # noqa: F401  # what stands for compiled operators

    resume = "--resume" in words
    if resume:
        telling()
        words.remove("--resume")
    {"timm": timm, "open_clip": open_clip}[library](Path(root), resume, words)


if __name__ == "__main__":
    main()
