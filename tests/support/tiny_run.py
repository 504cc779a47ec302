"""The smallest run that the surgeon knows, made by hand: no trainer, no torch, three files a step.

Hugging Face's Trainer saves such folders. A torch file is a zip with a pickle in it."""

from __future__ import annotations

import json
import pickle
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

GROUP = {"lr": 1e-3, "initial_lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
LAMBDA_LR = {
    "base_lrs": [1e-3],
    "last_epoch": 4,
    "_step_count": 5,
    "_last_lr": [1e-3],
    "lr_lambdas": [None],
}


def make_run(root: Path, steps: Sequence[int] = (4,)) -> Path:
    """A run with one checkpoint, or those of `steps`, saved at a constant rate of 1e-3."""
    for step in steps:
        folder = root / f"checkpoint-{step}"
        folder.mkdir(parents=True)
        adam = {"state": {0: {"step": float(step)}}, "param_groups": [{**GROUP, "params": [0]}]}
        write_torch_file(folder / "optimizer.pt", adam)
        scheduler = {**LAMBDA_LR, "last_epoch": step, "_step_count": step + 1}
        write_torch_file(folder / "scheduler.pt", scheduler)
        (folder / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    return root


def write_torch_file(path: Path, content: dict[str, Any]) -> None:
    """What torch.save writes of a dict without tensors."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{path.stem}/data.pkl", pickle.dumps(content, protocol=2))
        archive.writestr(f"{path.stem}/version", "3\n")
