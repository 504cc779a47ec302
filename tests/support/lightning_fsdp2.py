"""FSDP2 and FSDP1 by Lightning's own Trainer, on CPU ranks that speak gloo.

`python -m tests.support.lightning_fsdp2 ROOT STOP RESUME`, once for each rank: trains to step STOP,
saves every second step below ROOT/checkpoints, and prints as JSON what each update used. RESUME is
a `ckpt_path`, or empty. FSDP1's strategy asks for an accelerator of CUDA, and for nothing that CUDA
does: its name is given to the CPU's.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.accelerators import CPUAccelerator, CUDAAccelerator
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy, Strategy
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

PEAK, EVERY = 1e-3, 2
STRATEGIES = ("two", "two-full", "one")


class Cpu(CPUAccelerator, CUDAAccelerator):  # type: ignore[misc]
    """The CPU, for a strategy that wants CUDA by name."""


class Module(lightning.LightningModule):
    """Two layers, of which one decays; the schedule goes to 1e-5 in 40 steps."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[int, Any] = {}

    def configure_model(self) -> None:
        if hasattr(self, "first"):
            return
        torch.manual_seed(0)
        self.first = torch.nn.Linear(8, 16)
        self.second = torch.nn.Linear(16, 4)
        if isinstance(self.trainer.strategy, FSDPStrategy):
            here: Any = {"device_id": torch.device("cpu"), "use_orig_params": True}
            self.first = FullyShardedDataParallel(self.first, **here)
            self.second = FullyShardedDataParallel(self.second, **here)
            return
        for layer in (self.first, self.second):
            fully_shard(layer, mesh=self.device_mesh["data_parallel"])
        fully_shard(self, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: Any, index: int) -> Any:
        return self.second(self.first(batch)).pow(2).mean()

    def configure_optimizers(self) -> Any:
        groups = [
            {"params": list(self.first.parameters()), "weight_decay": 0.1},
            {"params": list(self.second.parameters()), "weight_decay": 0.0},
        ]
        adam = torch.optim.AdamW(groups, lr=PEAK)
        cosine = torch.optim.lr_scheduler.CosineAnnealingLR(adam, T_max=40, eta_min=1e-5)
        return {"optimizer": adam, "lr_scheduler": {"scheduler": cosine, "interval": "step"}}

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.seen[self.trainer.global_step + 1] = used(optimizer)


class Pair(Module):
    """An optimizer and a schedule for each layer, stepped by hand: each counts as a step."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, index: int) -> None:
        both = self.optimizers()
        self.seen[self.trainer.global_step + 1] = [used(one.optimizer) for one in both]
        self.manual_backward(self.second(self.first(batch)).pow(2).mean())
        for one, schedule in zip(both, self.lr_schedulers(), strict=True):
            one.step()
            one.zero_grad()
            schedule.step()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        """Both are seen before either steps."""

    def configure_optimizers(self) -> Any:
        layers = (self.first, self.second)
        both = [torch.optim.AdamW(layer.parameters(), lr=PEAK * (i + 1)) for i, layer in
                enumerate(layers)]  # fmt: skip
        return both, [torch.optim.lr_scheduler.LambdaLR(one, lambda s: 0.9**s) for one in both]


def used(optimizer: Any) -> dict[str, Any]:
    """What the next update uses: the sum of this rank's moments, and all of the tensors."""
    states = [state for state in optimizer.state.values() if state]
    keys = ("lr", "betas", "eps", "weight_decay")
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return {
        "tensors": {
            "weights": [whole(p) for p in parameters],
            **{
                kind: [whole(optimizer.state[p][kind]) for p in parameters if optimizer.state[p]]
                for kind in ("exp_avg", "exp_avg_sq")
            },
        },
        **{key: [group[key] for group in optimizer.param_groups] for key in keys},
        "adam_step": max((int(state["step"]) for state in states), default=0),
        "moments": sum(float(own(s["exp_avg"]).abs().sum()) for s in states),
    }


def whole(tensor: Any) -> list[float]:
    """Of all ranks, which call this together; of FSDP1, what this rank has."""
    tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return list(tensor.flatten().tolist())


def own(tensor: Any) -> Any:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def strategy_of(kind: str, ranks: int) -> Strategy:
    """FSDP1 (`one`) or FSDP2, with a folder for each step or a file (`full`)."""
    if kind == "one":
        return FSDPStrategy(state_dict_type="sharded", process_group_backend="gloo")
    return ModelParallelStrategy(
        data_parallel_size=ranks, tensor_parallel_size=1, process_group_backend="gloo",
        save_distributed_checkpoint=not kind.endswith("full"),
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("root", type=Path)
    parser.add_argument("stop", type=int)
    parser.add_argument("resume")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--strategy", choices=STRATEGIES, default="two")
    parser.add_argument("--pair", action="store_true", help="two optimizers")
    wanted = parser.parse_args()
    torch.set_num_threads(1)
    module = Pair() if wanted.pair else Module()
    saver = ModelCheckpoint(
        dirpath=wanted.root / "checkpoints", every_n_train_steps=EVERY, save_top_k=-1,
        save_last=True,
    )  # fmt: skip
    trainer = lightning.Trainer(
        default_root_dir=wanted.root, max_steps=wanted.stop, accelerator=Cpu(),
        devices=wanted.ranks, callbacks=[saver], logger=False, enable_progress_bar=False,
        enable_model_summary=False, use_distributed_sampler=False,
        strategy=strategy_of(wanted.strategy, wanted.ranks),
    )  # fmt: skip
    data = torch.rand(256, 8, generator=torch.Generator().manual_seed(1))
    loader = torch.utils.data.DataLoader(data, batch_size=4)
    trainer.fit(module, loader, ckpt_path=wanted.resume or None)
    if trainer.is_global_zero:
        print(json.dumps(module.seen))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
