"""Runs of Composer's own Trainer and CheckpointSaver: one layer, on a CPU; where there are several
ranks, FSDP2 shares it. As a program it prints what each update used."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch.library import Library
from torch.utils.data import DataLoader, TensorDataset

from tests.support.newest_megatron import beside

sys.path.insert(0, str(beside("composer")))
sys.path.append(str(beside("sources")))

# The kernels of torchvision are built for CUDA and do not load beside a torch for CPUs. It imports
# where their names are, and a model without images calls none of them.
_KERNELS = Library("torchvision", "DEF")
for _name in ("nms", "qnms"):
    _KERNELS.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

from composer import Callback, Trainer  # noqa: E402
from composer.callbacks import LRMonitor  # noqa: E402
from composer.loggers import TensorboardLogger  # noqa: E402
from composer.models import ComposerModel  # noqa: E402
from composer.optim import CosineAnnealingWithWarmupScheduler, DecoupledAdamW  # noqa: E402
from composer.utils import FSDP2Config, dist  # noqa: E402

SAMPLES, BATCH = 64, 4
"""Of an epoch, and of a batch of a rank."""
PEAK = 1e-3
OPTIMIZERS = {"AdamW": torch.optim.AdamW, "DecoupledAdamW": DecoupledAdamW}


class Model(ComposerModel):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.layer = torch.nn.Linear(4, 2)

    def forward(self, batch: Any) -> Any:
        return self.layer(batch[0])

    def loss(self, outputs: Any, batch: Any) -> Any:
        return (outputs - batch[1]).pow(2).mean()


class Watch(Callback):  # type: ignore[misc]
    """What the live optimizer uses at each update, by its number, and the batch."""

    def __init__(self) -> None:
        self.used: dict[int, dict[str, Any]] = {}

    def fit_start(self, state: Any, logger: Any) -> None:
        self.state = state
        state.optimizers[0].register_step_pre_hook(self._note)

    def _note(self, optim: Any, *_: Any) -> None:
        states = [optim.state.get(p, {}) for g in optim.param_groups for p in g["params"]]
        self.used[int(self.state.timestamp.batch) + 1] = {
            **{key: [group[key] for group in optim.param_groups]
               for key in ("lr", "betas", "eps", "weight_decay")},
            "adam_step": max((int(state["step"]) for state in states if state), default=0),
            "moments": sum(float(abs(s["exp_avg"]).sum()) for s in states if s),
            "batch": self.state.batch[0].flatten().tolist(),
            "seed": self.state.rank_zero_seed,
        }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", help="of the run, also s3://BUCKET/PREFIX")
    parser.add_argument("stop", type=int, help="after so many batches")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="AdamW")
    parser.add_argument("--at", default=".", help="the folder where it starts")
    parser.add_argument("--says", help="a folder for what it prints and its event files")
    parser.add_argument("--options", type=json.loads, default={}, help="of the Trainer")
    wanted = parser.parse_args()
    torch.set_num_threads(1)
    os.chdir(wanted.at)
    dist.initialize_dist("cpu")
    rows = torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(rows[:, :4], rows[:, 4:])
    model, watch = Model(), Watch()
    made = OPTIMIZERS[wanted.optimizer](model.parameters(), lr=PEAK, weight_decay=0.1)
    options = {"autoresume": True, "seed": 7, **wanted.options}
    if dist.get_world_size() > 1:
        options["parallelism_config"] = {"fsdp": FSDP2Config(state_dict_type="sharded")}
    if wanted.says:
        says = Path(wanted.says)
        options |= {
            "loggers": TensorboardLogger(str(says / "tb")), "log_to_console": True,
            "console_log_interval": "1ba", "console_stream": (says / "log").open("a"),
        }  # fmt: skip
    trainer = Trainer(
        model=model, optimizers=made, callbacks=[watch, LRMonitor()], device="cpu",
        progress_bar=False,
        train_dataloader=DataLoader(data, BATCH, sampler=dist.get_sampler(data)),
        schedulers=CosineAnnealingWithWarmupScheduler(t_warmup="2ba", t_max="20ba"),
        max_duration=f"{wanted.stop}ba", run_name="run", save_folder=wanted.folder,
        save_interval="2ba", save_num_checkpoints_to_keep=-1, **options,
    )  # fmt: skip
    trainer.fit()
    trainer.close()
    for uploader in multiprocessing.active_children():  # they outlive a rank that leaves at once
        uploader.terminate()
    if dist.get_global_rank() == 0:
        print(json.dumps(watch.used))


if __name__ == "__main__":
    main()
