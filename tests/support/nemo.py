"""Runs of NeMo 2 by its sources, trained, saved and loaded by the real megatron-core on a CPU:
`save ROOT` and `load ROOT`, with `--newest` by the newest one.

As `MegatronStrategy.save_checkpoint` and `setup_megatron_optimizer` of NVIDIA/NeMo 2381f42 (v2.4.0)
around what Lightning's `dump_checkpoint` makes. NeMo's own trainer is in `nemo_loop.py`.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import torch

from tests.support import apex_adam, megatron_real, newest_megatron
from tests.support.cpu_rank import cpu_rank
from tests.support.megatron_real import BATCH

NAME = "model--val_loss={:.2f}-step={}-consumed_samples={}.0"


class Cosine(torch.optim.lr_scheduler.LRScheduler):
    """What `CosineAnnealing` computes and what its state has: a warm-up of (n + 1) shares, half a
    cosine to `min_lr`; with `constant_steps` a warm-up from 0, and the floor before the end."""

    def __init__(self, optimizer: Any, warmup: int, end: int, floor: float, constant: int) -> None:
        self.max_steps, self.warmup_steps, self.constant_steps = end, warmup, constant
        self.decay_steps = end - constant - warmup
        self.min_lr = floor
        super().__init__(optimizer)

    def get_lr(self) -> list[float]:
        step, warmup = self.last_epoch, self.warmup_steps
        if self.constant_steps:
            top, done = self.base_lrs[0], step - warmup
            if step <= warmup:
                return [top * step / warmup for _ in self.base_lrs]
            if done > self.decay_steps:
                return [self.min_lr for _ in self.base_lrs]
            share = 0.5 * (math.cos(math.pi * done / self.decay_steps) + 1)
            return [self.min_lr + share * (top - self.min_lr) for _ in self.base_lrs]
        if step <= warmup and warmup > 0:
            return [base * (step + 1) / (warmup + 1) for base in self.base_lrs]
        if step > self.max_steps:
            return [self.min_lr for _ in self.base_lrs]
        share = 0.5 * (1 + math.cos(math.pi * (step - warmup) / (self.max_steps - warmup)))
        return [(base - self.min_lr) * share + self.min_lr for base in self.base_lrs]


class Wrapped(torch.optim.Optimizer):
    """Megatron-core's optimizer as Lightning and torch's schedulers see it."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.defaults = inner, {}

    param_groups = property(lambda self: self.inner.param_groups)  # type: ignore[assignment]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step()


def build(args: argparse.Namespace) -> tuple[Any, Any, Any]:
    """Model, optimizer and scheduler; each group's multipliers are taken into its rate and weight
    decay once, and then go by another name."""
    ddp, optimizer, _ = megatron_real.build(args)
    for group in optimizer.param_groups:
        group["lr"], group["weight_decay"] = args.lr, args.weight_decay  # no scheduler was there
        group["pre_mult_lr"], group["pre_mult_wd"] = group["lr"], group["weight_decay"]
        for key, setting in (("lr_mult", "lr"), ("wd_mult", "weight_decay")):
            group[setting] *= group.get(key, 1.0)
            if key in group:
                group[f"pre_{key}"] = group.pop(key)
    wrapped = Wrapped(optimizer)
    return ddp, wrapped, Cosine(wrapped, args.warmup, 40, 1e-4, args.constant)


def sharded(ddp: Any, wrapped: Any, args: argparse.Namespace, loading: bool) -> dict[str, Any]:
    model = ddp.module.sharded_state_dict(prefix="module.")
    for tensor in model.values():
        tensor.replica_id = (0, 0, 0)
    how = {"metadata": {"distrib_optim_sharding_type": args.sharding}}
    return {
        "sharded_state_dict" if not loading else "state_dict": model,
        "optimizer": [wrapped.inner.sharded_state_dict(model, is_loading=loading, **how)],
    }


def update(ddp: Any, wrapped: Any, scheduler: Any, number: int) -> float:
    """The rate that the update used."""
    used = float(wrapped.param_groups[0]["lr"])

    class Stepped:
        def step(self, _: int) -> None:
            scheduler.step()

    megatron_real.update(ddp, wrapped.inner, Stepped(), number)
    return used


def save(root: Path, args: argparse.Namespace) -> None:
    from megatron.core import dist_checkpointing

    ddp, wrapped, scheduler = build(args)
    for step in range(1, max(args.steps) + 1):
        update(ddp, wrapped, scheduler, step)
        if step not in args.steps:
            continue
        done = {"total": {"ready": step, "completed": step}}
        checkpoint = {
            "epoch": 0, "global_step": step, "pytorch-lightning_version": "2.5.0",
            "state_dict": {}, "optimizer_states": {}, "callbacks": {},
            "loops": {"fit_loop": {"epoch_loop.batch_progress": done}},
            "lr_schedulers": [scheduler.state_dict()],
            "PreTrainingDataModule": {"consumed_samples": step * BATCH},
            **sharded(ddp, wrapped, args, loading=False),
        }  # fmt: skip
        name = NAME.format(1 / step, step, BATCH * step)
        for folder in (name, f"{name}-last") if step == max(args.steps) else (name,):
            (root / folder / "weights").mkdir(parents=True)
            content = {"distrib_optim_sharding_type": args.sharding}
            weights = str(root / folder / "weights")
            dist_checkpointing.save(dict(checkpoint), weights, content_metadata=content)
            (root / folder / "context").mkdir()
            (root / folder / "context" / "model.yaml").write_text("_target_: model\n")


def resumed(root: Path) -> Path:
    """The folder that AutoResume takes: of several `*last` the newest by its own time."""
    return max(root.glob("*last"), key=lambda path: path.lstat().st_mtime)


def load(root: Path, args: argparse.Namespace) -> dict[str, Any]:
    """What Lightning restores, in its order, and what the next two updates use."""
    from megatron.core import dist_checkpointing

    ddp, wrapped, scheduler = build(args)
    folder = str(resumed(root) / "weights")
    with torch.no_grad():
        state = dist_checkpointing.load(sharded(ddp, wrapped, args, loading=True), folder)
        weights = {k.removeprefix("module."): v for k, v in state["state_dict"].items()}
        ddp.module.load_state_dict(weights)
        wrapped.inner.load_state_dict(state["optimizer"][0])
        for mine, theirs in zip([scheduler], state["lr_schedulers"], strict=True):
            mine.load_state_dict(theirs)
    told = megatron_real._told(wrapped.inner)
    step = state["global_step"]
    return {
        **told, "step": step, "consumed_samples": state["PreTrainingDataModule"],
        "used": [update(ddp, wrapped, scheduler, step + number) for number in (1, 2, 3)],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("save", "load"))
    parser.add_argument("root", type=Path)
    parser.add_argument("--sharding", default="fully_reshardable")
    parser.add_argument("--constant", type=int, default=0)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--newest", action="store_true")
    args = parser.parse_args()
    if args.newest:
        newest_megatron.put_first()
    args.steps = [2, 4, 6]
    args.use_distributed_optimizer, args.fp16, args.gpt, args.mup_width = True, False, False, None
    args.seed, args.lr, args.min_lr, args.weight_decay = 1234, 1e-3, 1e-4, 0.1
    args.initial_loss_scale, args.lr_warmup_samples, args.lr_decay_samples = 1.0, 16, 200
    args.lr_decay_style, args.use_checkpoint, args.override = "cosine", False, False
    torch.cuda.synchronize = lambda *_: None  # type: ignore[assignment]
    torch.cuda.current_stream = torch.cpu.current_stream  # type: ignore[assignment]
    apex_adam.install()
    from megatron.core import parallel_state

    with cpu_rank():
        parallel_state.initialize_model_parallel()
        if args.what == "save":
            save(args.root, args)
        else:
            print(json.dumps(load(args.root, args)))


if __name__ == "__main__":
    main()
