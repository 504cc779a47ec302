"""Trainers that save and load as torchtitan and OLMo-core do, by torch.distributed.checkpoint."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, StorageReader
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from tests.support.tiny_attention import OLMO_NAMES, Layered

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
STEPS = (2, 4, 6)


class Trainer:
    """AdamW on two linear layers; biases do not decay, and the lr falls by a LambdaLR."""

    def __init__(
        self,
        lr: Any = 1e-3,
        amsgrad: bool = False,
        heads: tuple[str, str, str, str] | None = None,
    ) -> None:
        """`heads` are the names of attention, in place of the linear layers."""
        torch.manual_seed(5)
        self.model: torch.nn.Module = torch.nn.Sequential(
            torch.nn.Linear(8, 16), torch.nn.Linear(16, 4)
        )
        if heads is not None:
            self.model = Layered(heads)
        named = dict(self.model.named_parameters())
        groups = [
            {"params": [p for n, p in named.items() if "weight" in n], "weight_decay": 0.1},
            {"params": [p for n, p in named.items() if "bias" in n], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), amsgrad=amsgrad)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda n: 1 / (n + 1))

    def update(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.ones(3, 8)).pow(2).sum().backward()
        self.optimizer.step()
        self.schedule.step()

    def flat(self) -> dict[str, Any]:
        return get_optimizer_state_dict(self.model, self.optimizer, options=FLAT)

    def load_flat(self, state: dict[str, Any]) -> None:
        set_optimizer_state_dict(self.model, self.optimizer, state, options=FLAT)

    def used(self) -> dict[str, Any]:
        states = list(self.optimizer.state.values())
        return {
            "lr": [group["lr"] for group in self.optimizer.param_groups],
            "betas": [group["betas"] for group in self.optimizer.param_groups],
            "eps": [group["eps"] for group in self.optimizer.param_groups],
            "weight_decay": [group["weight_decay"] for group in self.optimizer.param_groups],
            "adam_step": [float(state["step"]) for state in states],
            "moments": [
                float(state[name].abs().sum())
                for state in states
                for name in ("exp_avg", "exp_avg_sq")
            ],
        }


def _titan_state(trainer: Trainer, step: int, old: bool) -> dict[str, Any]:
    schedule = trainer.schedule.state_dict()
    return {
        **trainer.model.state_dict(),
        "optimizer": trainer.flat(),
        "lr_scheduler": schedule if old else {"last_epoch": schedule["last_epoch"]},
        "train_state": {"step": torch.tensor(step) if old else step, "ntokens_seen": step * 512},
        "dataloader": {"dp_rank_0": b"where the data stands"},
    }


def torchtitan(root: Path, *, old: bool = True, lr: Any = 1e-3) -> Path:
    trainer = Trainer(lr)
    for step in range(1, STEPS[-1] + 1):
        trainer.update()
        if step in STEPS:
            state = _titan_state(trainer, step, old)
            dcp.save(state, checkpoint_id=root / f"step-{step}", no_dist=True)
    return root


def resumed_titan(root: Path, *, old: bool = True, lr: Any = 1e-3) -> Trainer:
    """What torchtitan has after it loaded the highest step."""
    step = max(int(path.name.partition("-")[2]) for path in root.glob("step-*"))
    return loaded_titan(FileSystemReader(root / f"step-{step}"), old=old, lr=lr)


def loaded_titan(reader: StorageReader, *, old: bool = True, lr: Any = 1e-3) -> Trainer:
    """What it has after it loaded a step by this reader."""
    trainer = Trainer(lr)
    trainer.update()
    state = _titan_state(trainer, 0, old)
    dcp.load(state, storage_reader=reader, no_dist=True)
    trainer.model.load_state_dict(state, strict=False)
    trainer.load_flat(state["optimizer"])
    if old:
        trainer.schedule.load_state_dict(copy.deepcopy(state["lr_scheduler"]))
    else:
        trainer.schedule.last_epoch = state["lr_scheduler"]["last_epoch"]
    return trainer


CONFIG: dict[str, Any] = {
    "train_module": {
        "optim": {"lr": 1e-3, "fixed_fields": ["initial_lr"]},
        "scheduler": {
            "_CLASS_": "olmo_core.optim.scheduler.CosWithWarmup", "warmup": 2, "units": "steps",
        },
    },
    "data_loader": {"global_batch_size": 512},
    "trainer": {"max_duration": {"value": 20, "unit": "steps"}},
}  # fmt: skip
"""What OLMo-core's ConfigSaverCallback keeps of a run with a schedule."""


def _ddp_state(trainer: Trainer) -> dict[str, Any]:
    """What OLMoDDPOptimizer.state_dict has: each parameter flat, and no param groups."""
    state: dict[str, Any] = {"__moe_skip_step_losses": [0.5], "__moe_skip_step_grad_norms": [0.1]}
    for name, parameter in trainer.model.named_parameters():
        held = trainer.optimizer.state[parameter]
        state[f"{name}.main"] = parameter.detach().flatten()
        state[f"{name}.step"] = held["step"].clone()
        for moment in ("exp_avg", "exp_avg_sq"):
            state[f"{name}.{moment}"] = held[moment].flatten()
    return state


def olmo(
    root: Path,
    *,
    ranks: int = 2,
    config: dict[str, Any] | None = CONFIG,
    ddp: bool = False,
    heads: bool = False,
) -> Path:
    """Of a TransformerTrainModule, or of an OLMoDDPTrainModule."""
    trainer = Trainer(heads=OLMO_NAMES if heads else None)
    for step in range(1, STEPS[-1] + 1):
        trainer.update()
        if step in STEPS:
            folder = root / f"step{step}"
            state = {"model": trainer.model.state_dict(), "optim": trainer.flat()}
            if ddp:
                state = _ddp_state(trainer)
            dcp.save(state, checkpoint_id=folder / "model_and_optim", no_dist=True)
            (folder / "train").mkdir()
            for rank in range(ranks):
                counters = {
                    "global_step": step, "global_train_tokens_seen": step * 512, "epoch": 1,
                    "world_size": ranks, "max_steps": 20,
                    "data_loader": {
                        "batches_processed": step, "tokens_processed": step * 512, "epoch": 1,
                        "seed": 7, "dataset_type": "fsl",
                    },
                }  # fmt: skip
                torch.save(counters, folder / "train" / f"rank{rank}.pt")
            (folder / ".metadata.json").write_text(json.dumps({"version": "2.4.0"}))
            if config is not None:
                (folder / "config.json").write_text(json.dumps(config))
    return root
