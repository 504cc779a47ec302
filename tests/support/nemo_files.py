"""The files of a NeMo 2 run by its sources, on what torch writes of Megatron-core's torch_dist.

`tests/support/nemo.py` makes them with megatron-core itself."""

from __future__ import annotations

import io
import shutil
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from tests.support import megatron_dist
from tests.support.megatron_legacy import BATCH

NAME = "model--val_loss={:.2f}-step={}-consumed_samples={}.0"
PEAK, FLOOR, WARMUP, END = 6e-5, 6e-6, 2, 100


def make(root: Path, steps: tuple[int, ...] = (20, 30), *, file: bool = True) -> Path:
    """A folder for each step, and a copy of the last one, which AutoResume loads. Unless the common
    state is in a `file`, it is a value as of megatron-core 0.19."""
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
        if file:
            torch.save(checkpoint, weights / "common.pt")
        else:
            _among_values(checkpoint, weights)
        (root / name / "context").mkdir()
        (root / name / "context" / "model.yaml").write_text("_target_: model\n")
    shutil.copytree(root / name, root / f"{name}-last")
    shutil.rmtree(made)
    return root


def _among_values(checkpoint: dict[str, Any], weights: Path) -> None:
    """Write the tensors of `weights` anew, with the common state as one more value."""
    (weights / "common.pt").unlink()
    names = dcp.FileSystemReader(weights).read_metadata().state_dict_metadata
    state: dict[str, Any] = {
        name: torch.empty(item.size, dtype=item.properties.dtype) for name, item in names.items()
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that there is no process group
        dcp.load(state, checkpoint_id=weights, no_dist=True)
        for path in (*weights.glob("*.distcp"), weights / ".metadata"):
            path.unlink()
        state[megatron_dist.COMMON] = io.BytesIO()
        torch.save([checkpoint], state[megatron_dist.COMMON])
        dcp.save(state, checkpoint_id=weights, planner=megatron_dist.Planner(), no_dist=True)
