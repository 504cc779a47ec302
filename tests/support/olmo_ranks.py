"""A run of OLMo-core's own Trainer whose ranks share each tensor by FSDP, on CPUs that speak gloo.

`python -m tests.support.olmo_ranks RUN STOP OUT`, once for each rank: trains on to step STOP from
where the Trainer resumes, and saves to OUT what it loaded, the words of each batch and its loss.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from olmo_core.train import prepare_training_environment, teardown_training_environment
from olmo_core.train.callbacks import Callback

from tests.support import llamas
from tests.support.fsdp2 import whole_tensor
from tests.support.olmo_core import Start, trainer


@dataclass
class Seen(Callback):
    """What all ranks have together."""

    loaded: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)
    words: dict[int, torch.Tensor] = field(default_factory=dict)
    losses: dict[int, float] = field(default_factory=dict)

    def pre_train(self) -> None:
        module: Any = self.trainer.train_module
        states = module.optim.state
        for name, p in module.model.named_parameters():
            kinds = ("exp_avg", "exp_avg_sq") if states.get(p) else ()
            self.loaded[name] = {kind: whole_tensor(states[p][kind]).clone() for kind in kinds}
            self.loaded[name]["weights"] = whole_tensor(p.detach()).clone()

    def pre_step(self, batch: dict[str, Any]) -> None:
        each: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(each, batch["input_ids"])
        self.words[self.step] = torch.cat(each)

    def log_metrics(self, step: int, metrics: dict[str, float]) -> None:
        if "train/CE loss" in metrics:
            self.losses[step] = metrics["train/CE loss"]


def main() -> None:
    root, stop, out = Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    prepare_training_environment(backend="cpu:gloo")
    live, _ = trainer(root, stop, Start(scheduler=None, lr=llamas.RATE, save_interval=1))
    seen = Seen()
    live.add_callback("seen", seen)
    live.metrics_collect_interval = 1
    live.fit()
    if dist.get_rank() == 0:
        torch.save([seen.loaded, seen.words, seen.losses], out)
    teardown_training_environment()


if __name__ == "__main__":
    main()
