"""Experts in a pipeline, by a real DeepSpeed engine.

`python -m tests.support.piped_experts ROOT STOP SEED STAGE` trains on to step STOP from the latest
step, on as many pipeline stages as there are ranks, saves it, and prints the losses as JSON.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from tests.support.deepspeed_engine import client
from tests.support.in_process import one_rank
from train import distributed


def build(seed: int, stage: int) -> Any:
    """An engine of two layers with experts between two without."""
    import deepspeed
    import torch
    from deepspeed.moe.layer import MoE
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
    from deepspeed.pipe import PipelineModule
    from torch import nn

    class Sparse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            # Which words go first is drawn otherwise, and each stage would draw its own.
            self.moe = MoE(8, nn.Linear(8, 8), 2, ep_size=1, k=1, min_capacity=0, use_rts=False)

        def forward(self, x: Any) -> Any:
            return x + self.moe(x)[0]

    torch.manual_seed(seed)
    model = PipelineModule(
        [nn.Linear(8, 8), Sparse(), Sparse(), nn.Linear(8, 8)],
        num_stages=int(os.environ.get("WORLD_SIZE", 1)),
        partition_method="uniform",
        loss_fn=lambda out, wanted: (out - wanted).pow(2).mean(),
    )
    groups = split_params_into_different_moe_groups_for_optimizer(
        {"params": [*model.parameters()], "name": "all"}
    )
    config = {
        "train_micro_batch_size_per_gpu": 2, "steps_per_print": 10**9,
        "zero_allow_untested_optimizer": True, "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 1_000_000},
    }  # fmt: skip
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def train(root: Path, stop: int, seed: int, stage: int) -> dict[int, float]:
    import torch

    engine, losses = build(seed, stage), {}
    if (root / "latest").exists():
        assert engine.load_checkpoint(str(root))[0] is not None
    while engine.global_steps < stop:
        torch.manual_seed(engine.global_steps)
        pair = torch.randn(2, 8), torch.randn(2, 8)
        loss = float(engine.train_batch(iter([pair])))
        losses[engine.global_steps] = loss
    engine.save_checkpoint(str(root), client_state=client(stop))
    return losses


def main() -> None:
    alone = "RANK" not in os.environ
    with one_rank() if alone else nullcontext():
        if not alone:
            distributed.start(1)
        losses = train(Path(sys.argv[1]), *map(int, sys.argv[2:]))
        if distributed.rank() == 0:
            print(f"\n{json.dumps(losses)}", flush=True)
        if not alone:
            distributed.finish()


if __name__ == "__main__":
    main()
