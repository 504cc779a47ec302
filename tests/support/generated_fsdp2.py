"""Steps of the Trainer as FSDP2 saves them, of any sizes and on any number of ranks.

`python -m tests.support.generated_fsdp2 ROOT STEP WIDTH WIDTH`, once for each rank, trains to this
step and saves it. torch shards, trains and saves; the folders are called as Accelerate's
`save_fsdp_optimizer` does, and two small files are the Trainer's.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.fsdp import fully_shard

from tests.support.deepspeed_engine import PEAK
from tests.support.engine_models import model_of

FOLDERS = "pytorch_model_fsdp_0", "optimizer_0"


def train(root: Path, step: int, widths: tuple[int, int]) -> None:
    """To this step, and save it."""
    model = model_of(f"sized-{widths[0]}-{widths[1]}")
    for module in (*model, model):
        fully_shard(module)
    groups = [
        {"params": [p for p in model.parameters() if (p.ndim > 1) == matrix], "weight_decay": decay}
        for matrix, decay in ((True, 0.1), (False, 0.0))
    ]
    adam: Any = torch.optim.AdamW(groups, lr=PEAK, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.LambdaLR(adam, lambda number: 1.0)
    for number in range(step):
        adam.zero_grad()
        data = torch.rand(3, 8, generator=torch.Generator().manual_seed(number + 10 * step))
        model(data).pow(2).sum().backward()
        adam.step()
        schedule.step()
    states = (
        {"model": get_model_state_dict(model)},
        {"optimizer": get_optimizer_state_dict(model, adam)},
    )
    folder = root / f"checkpoint-{step}"
    for name, state in zip(FOLDERS, states, strict=True):
        dcp.save(state, checkpoint_id=folder / name)
    if dist.get_rank() == 0:
        torch.save(schedule.state_dict(), folder / "scheduler.pt")
        trainer = {"global_step": step, "max_steps": 100, "train_batch_size": 3}
        (folder / "trainer_state.json").write_text(json.dumps(trainer))
    dist.barrier()


def main() -> None:
    root, *numbers = sys.argv[1:]
    step, one, two = map(int, numbers)
    dist.init_process_group("gloo")
    train(Path(root), step, (one, two))
    dist.destroy_process_group()


if __name__ == "__main__":
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        main()
