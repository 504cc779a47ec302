"""The files of a NeMo 2 run by its sources, on what torch writes of Megatron-core's torch_dist.

`tests/support/nemo.py` makes them with megatron-core itself."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch

from tests.support import megatron_dist
from tests.support.megatron_legacy import BATCH

NAME = "model--val_loss={:.2f}-step={}-consumed_samples={}.0"
PEAK, FLOOR, WARMUP, END = 6e-5, 6e-6, 2, 100


def make(root: Path, steps: tuple[int, ...] = (20, 30)) -> Path:
    """A folder for each step, and a copy of the last one, which AutoResume loads."""
    made = root / "made"
    megatron_dist.save(made, steps, file=True, args=False)
    for step in steps:
        name = NAME.format(1 / step, step, BATCH * step)
        weights = root / name / "weights"
        shutil.copytree(made / f"iter_{step:07d}", weights)
        common = torch.load(weights / "common.pt", weights_only=True)
        adam = torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))], lr=PEAK)
        inner = torch.optim.lr_scheduler.CosineAnnealingLR(adam, END - WARMUP, FLOOR)
        inner.last_epoch = step - WARMUP
        (rate,) = inner._get_closed_form_lr()
        groups = common["optimizer"]["optimizer"]["param_groups"]
        for group in groups:
            for key in ("wd_mult", "lr_mult"):
                group[f"pre_{key}"] = group.pop(key)
            group |= {"lr": rate, "initial_lr": PEAK}
        schedule = {
            "max_steps": END, "warmup_steps": WARMUP, "constant_steps": 0,
            "decay_steps": END - WARMUP, "min_lr": FLOOR, "base_lrs": [PEAK] * len(groups),
            "last_epoch": step, "_step_count": step + 1, "_last_lr": [rate] * len(groups),
        }  # fmt: skip
        checkpoint = {
            "epoch": 0, "global_step": step, "pytorch-lightning_version": "2.5.0",
            "state_dict": {}, "optimizer_states": {}, "callbacks": {}, "loops": {},
            "lr_schedulers": [schedule], "optimizer": [common["optimizer"]],
            "PreTrainingDataModule": {"consumed_samples": step * BATCH},
        }  # fmt: skip
        torch.save(checkpoint, weights / "common.pt")
        (root / name / "context").mkdir()
        (root / name / "context" / "model.yaml").write_text("_target_: model\n")
    shutil.copytree(root / name, root / f"{name}-last")
    shutil.rmtree(made)
    return root
