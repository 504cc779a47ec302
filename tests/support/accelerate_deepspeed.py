"""Accelerate with an engine of DeepSpeed, on a CPU, and with names that count its saves.

`python -m tests.support.accelerate_deepspeed RUN STOP`: trains to update STOP, saves every second
one, resumes where something is saved, and prints as JSON what each update used."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin, ProjectConfiguration

from tests.support.fsdp2 import Net, free_port, groups

PEAK, EVERY = 1e-3, 2
CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 1,
    "zero_optimization": {"stage": 2, "reduce_bucket_size": 1_000_000},
    "zero_allow_untested_optimizer": True,
}


def used(engine: Any) -> dict[str, Any]:
    """What the next update uses."""
    adam = engine.optimizer
    states = [state for state in adam.optimizer.state.values() if state]
    keys = ("lr", "betas", "eps", "weight_decay")
    return {
        **{key: [group[key] for group in adam.param_groups] for key in keys},
        "adam_step": max((int(state["step"]) for state in states), default=0),
        "moments": sum(float(state["exp_avg"].abs().sum()) for state in states),
    }


def train(root: Path, stop: int) -> dict[int, Any]:
    """The library picks the checkpoint that it goes on from, and the script counts on after it."""
    names = ProjectConfiguration(str(root), automatic_checkpoint_naming=True)
    plugin = DeepSpeedPlugin(hf_ds_config=CONFIG)
    accelerator = Accelerator(deepspeed_plugin=plugin, project_config=names)
    torch.manual_seed(0)
    model: Any = Net()
    adam: Any = torch.optim.AdamW(groups(model), lr=PEAK, betas=(0.9, 0.95))
    schedule: Any = torch.optim.lr_scheduler.LambdaLR(adam, lambda step: 0.9**step)
    model, adam, schedule = accelerator.prepare(model, adam, schedule)
    saved = len([*(root / "checkpoints").glob("checkpoint_*")])
    if saved:
        accelerator.load_state()
        names.iteration = saved
    seen: dict[int, Any] = {}
    for step in range(saved * EVERY, stop):
        seen[step + 1] = used(model)
        accelerator.backward(model(torch.ones(2, 8) * (step + 1))["loss"])
        adam.step()
        schedule.step()
        adam.zero_grad()
        if (step + 1) % EVERY == 0:
            accelerator.save_state()
    return seen


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("run", type=Path)
    parser.add_argument("stop", type=int)
    wanted = parser.parse_args()
    torch.set_num_threads(1)
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    print(json.dumps(train(wanted.run, wanted.stop)))


if __name__ == "__main__":
    main()
