"""DeepSpeedStrategy by Lightning's own Trainer, on CPU ranks that speak gloo.

`python -m tests.support.lightning_deepspeed ROOT STOP RESUME`, once for each rank: trains to step
STOP, saves every second step below ROOT/checkpoints, and prints as JSON what each update used.
RESUME is a `ckpt_path`, or empty. The strategy asks for an accelerator of CUDA and for nothing
that CUDA does: its name is given to the CPU's, and each rank is a node of one device.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.accelerators import CPUAccelerator, CUDAAccelerator
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.strategies import DeepSpeedStrategy
from lightning.pytorch.utilities.deepspeed import convert_zero_checkpoint_to_fp32_state_dict

from tests.support.deepspeed_engine import effective, take_any_dtype

PEAK, EVERY = 1e-3, 2
OPTIMIZER = {"type": "AdamW", "params": {"lr": PEAK, "weight_decay": 0.1, "torch_adam": True}}
SCHEDULER = {
    "type": "WarmupDecayLR",
    "params": {"warmup_max_lr": PEAK, "warmup_num_steps": 2, "total_num_steps": 40},
}


class Cpu(CPUAccelerator, CUDAAccelerator):  # type: ignore[misc]
    """The CPU, for a strategy that wants CUDA by name."""

    @staticmethod
    def get_parallel_devices(devices: Any) -> list[torch.device]:
        return [torch.device("cpu", 0)]


class Module(lightning.LightningModule):
    """Two layers, of which one decays; the schedule goes to 1e-5 in 40 steps. The batch is a
    function of step and rank."""

    def __init__(self, optimizer: str) -> None:
        super().__init__()
        self.optimizer = optimizer
        self.seen: dict[int, Any] = {}
        torch.manual_seed(0)
        self.first = torch.nn.Linear(8, 16)
        self.second = torch.nn.Linear(16, 4)

    def training_step(self, batch: Any, index: int) -> Any:
        draws = torch.Generator().manual_seed(self.trainer.global_step * 100 + self.global_rank)
        x = torch.rand(4, 8, generator=draws).to(self.first.weight.dtype)
        self.loss = self.second(self.first(x)).float().pow(2).mean()
        return self.loss

    def configure_optimizers(self) -> Any:
        if self.optimizer == "config":
            return None
        groups = [
            {"params": list(self.first.parameters()), "weight_decay": 0.1},
            {"params": list(self.second.parameters()), "weight_decay": 0.0},
        ]
        if self.optimizer == "sgd":
            return torch.optim.SGD(groups, lr=PEAK, momentum=0.9)
        adam = torch.optim.AdamW(groups, lr=PEAK)
        cosine = torch.optim.lr_scheduler.CosineAnnealingLR(adam, T_max=40, eta_min=1e-5)
        return {"optimizer": adam, "lr_scheduler": {"scheduler": cosine, "interval": "step"}}

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        held = {"loss": float(self.loss)}
        if self.optimizer != "sgd":
            held |= effective(self.trainer.model)
        self.seen[self.trainer.global_step + 1] = held


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("root", type=Path)
    parser.add_argument("stop", type=int)
    parser.add_argument("resume")
    parser.add_argument("--stage", type=int, default=2)
    parser.add_argument("--precision", default="32-true")
    parser.add_argument("--optimizer", default="adamw", help="or config, or sgd")
    parser.add_argument("--lr", type=float, default=PEAK, help="of the optimizer in the config")
    parser.add_argument("--clip", type=float)
    parser.add_argument("--weights", type=Path, help="a step whose weights are loaded alone")
    parser.add_argument("--log", type=Path, help="where TensorBoard's events go")
    wanted = parser.parse_args()
    os.environ.update(GROUP_RANK=os.environ["RANK"], LOCAL_RANK="0")
    torch.set_num_threads(1)
    take_any_dtype()
    module = Module(wanted.optimizer)
    if wanted.weights:
        module.load_state_dict(joined(wanted.weights))
    saver = ModelCheckpoint(
        dirpath=wanted.root / "checkpoints", every_n_train_steps=EVERY, save_top_k=-1,
        save_last=True,
    )  # fmt: skip
    strategy = DeepSpeedStrategy(
        stage=wanted.stage, process_group_backend="gloo", initial_scale_power=8,
        reduce_bucket_size=1_000_000, allgather_bucket_size=1_000_000,
    )  # fmt: skip
    if wanted.optimizer == "config":
        strategy.config |= {"optimizer": with_rate(OPTIMIZER, "lr", wanted.lr)}
        strategy.config |= {"scheduler": with_rate(SCHEDULER, "warmup_max_lr", wanted.lr)}
    trainer = lightning.Trainer(
        default_root_dir=wanted.root, max_steps=wanted.stop, accelerator=Cpu(), devices=1,
        num_nodes=int(os.environ["WORLD_SIZE"]), precision=wanted.precision, strategy=strategy,
        callbacks=[saver, *([LearningRateMonitor("step")] if wanted.log else [])],
        logger=TensorBoardLogger(wanted.log, name="", version="") if wanted.log else False,
        log_every_n_steps=1, gradient_clip_val=wanted.clip, enable_progress_bar=False,
        enable_model_summary=False, use_distributed_sampler=False,
    )  # fmt: skip
    trainer.fit(module, torch.utils.data.DataLoader(range(256)), ckpt_path=wanted.resume or None)
    if trainer.is_global_zero:
        print(json.dumps(module.seen))
    torch.distributed.destroy_process_group()


def joined(step: Path) -> dict[str, Any]:
    """The weights of a step, as Lightning joins them."""
    with tempfile.NamedTemporaryFile() as file:
        state = convert_zero_checkpoint_to_fp32_state_dict(step, file.name)
    return dict(state["state_dict"])


def with_rate(section: dict[str, Any], key: str, rate: float) -> dict[str, Any]:
    return {**section, "params": {**section["params"], key: rate}}


if __name__ == "__main__":
    sys.exit(main())
