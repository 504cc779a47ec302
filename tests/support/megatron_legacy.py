"""Legacy Megatron-LM checkpoints by their description: many ranks, chained optimizers, old names.

The enums in the args are classes of the real module names that exist while a file is written only:
neither the surgeon nor its reader has Megatron-LM."""

from __future__ import annotations

import argparse
import contextlib
import enum
import sys
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

BATCH = 16
SCHEDULE = {
    "max_lr": 6e-5, "lr_warmup_steps": 160, "num_steps": 0, "lr_decay_style": "cosine",
    "lr_decay_steps": 16_000, "min_lr": 6e-6, "start_wd": 0.1, "end_wd": 0.1,
    "wd_incr_style": "constant", "wd_incr_steps": 16_000,
}  # fmt: skip
OLD_NAMES = {
    "max_lr": "start_lr", "lr_warmup_steps": "warmup_iter", "num_steps": "num_iters",
    "lr_decay_style": "decay_style", "lr_decay_steps": "end_iter",
}  # fmt: skip


@contextlib.contextmanager
def megatron_enums() -> Iterator[Any]:
    """`megatron.core.enums.ModelType` for the time of a save or a load; `RerunState` beside it."""
    kind = enum.Enum("ModelType", ["encoder_or_decoder"], module="megatron.core.enums")
    machine = "megatron.core.rerun_state_machine"
    states = {"NOT_RUNNING_YET": 0, "WILL_RERUN_FROM_CHECKPOINT": 3}
    names = ("megatron", "megatron.core", machine, "megatron.core.enums")
    before = {name: sys.modules.get(name) for name in names}
    for name in names:
        sys.modules[name] = types.ModuleType(name)
    sys.modules[names[-1]].ModelType = kind  # type: ignore[attr-defined]
    states_enum = enum.Enum("RerunState", states, module=machine)  # type: ignore[misc]
    sys.modules[machine].RerunState = states_enum  # type: ignore[attr-defined]
    try:
        yield kind
    finally:
        for name, module in before.items():
            del sys.modules[name]
            if module is not None:
                sys.modules[name] = module


def cosine(schedule: dict[str, Any], now: int) -> float:
    """The lr at sample `now`, written out once more."""
    if now <= schedule["lr_warmup_steps"]:
        return schedule["max_lr"] * now / schedule["lr_warmup_steps"]
    done = (now - schedule["lr_warmup_steps"]) / (
        schedule["lr_decay_steps"] - schedule["lr_warmup_steps"]
    )
    depth = schedule["max_lr"] - schedule["min_lr"]
    return schedule["min_lr"] + depth * 0.5 * (
        1 + float(torch.tensor(torch.pi * done).double().cos())
    )


def save(
    root: Path,
    steps: tuple[int, ...] = (20, 30),
    *,
    tensor: int = 2,
    pipeline: int = 2,
    chained: int = 1,
    old: bool = False,
    peaks: tuple[float, ...] = (6e-5, 6e-5),
    first: Mapping[str, Any] | None = None,
    third: Mapping[str, Any] | None = None,
    rerun: int | None = None,
    **command_line: Any,
) -> Path:
    """A run with these steps; its tracker names the last one. `first` and `third` are what those
    param groups have else; `rerun` is the iteration that is to be run again, and 0 says that none
    is."""
    own = (first or {}, {}, third or {})
    args = argparse.Namespace(
        tensor_model_parallel_size=tensor, pipeline_model_parallel_size=pipeline,
        expert_model_parallel_size=1, data_parallel_size=2, use_distributed_optimizer=True,
        global_batch_size=BATCH, rampup_batch_size=None, lr=6e-5, min_lr=6e-6, weight_decay=0.1,
        lr_decay_style="cosine", lr_warmup_samples=160, lr_decay_samples=16_000, clip_grad=1.0,
        seed=1234, lr_warmup_init=0.0, hysteresis=2, initial_loss_scale=2**16,
        params_dtype=torch.bfloat16,
    )  # fmt: skip
    vars(args).update(command_line)
    for step in steps:
        for t in range(tensor):
            for p in range(pipeline):
                name = f"mp_rank_{t:02d}" + (f"_{p:03d}" if pipeline > 1 else "")
                folder = root / f"iter_{step:07d}" / name
                folder.mkdir(parents=True)
                views = VIEWS if "num_attention_heads" not in command_line else ATTENTION
                moments = _moments(chained, step + t + p, views)
                args.consumed_train_samples = args.iteration = step * BATCH
                args.iteration = step
                with megatron_enums() as kind:
                    args.model_type = kind.encoder_or_decoder
                    state = _state(args, step, chained, old, peaks, own)
                    state["model"] = _model(moments if chained > 1 else [moments], views)
                    if rerun is not None:
                        states = sys.modules["megatron.core.rerun_state_machine"].RerunState
                        state["rerun_state_machine"] = {
                            "state": states(3 if rerun else 0), "current_iteration": rerun,
                        }  # fmt: skip
                    torch.save(state, folder / "model_optim_rng.pt")
                torch.save(moments, folder / "distrib_optim.pt")
    (root / "latest_checkpointed_iteration.txt").write_text(str(steps[-1]))
    return root


def _state(
    args: argparse.Namespace,
    step: int,
    chained: int,
    old: bool,
    peaks: tuple[float, ...],
    own: tuple[Mapping[str, Any], ...],
) -> dict[str, Any]:
    schedule: dict[str, Any] = {**SCHEDULE, "num_steps": step * BATCH}
    lr = cosine(schedule, step * BATCH)
    groups = [
        {
            "wd_mult": mult, "lr_mult": 1.0, "is_expert_parallel": False, "is_decoupled_lr": False,
            "lr": lr * (peak / 6e-5), "bias_correction": True, "betas": (0.9, 0.95), "eps": 1e-8,
            "weight_decay": 0.1 * mult, "step": step,
            **({} if old else {"default_config": True, "max_lr": peak, "min_lr": peak / 10}),
            **more,
        }
        for mult, peak, more in zip((1.0, 0.0, 1.0), peaks, own, strict=False)
    ]  # fmt: skip
    chain = [
        {
            "optimizer": {"param_groups": [dict(group) for group in groups]},
            "grad_scaler": {
                "scale": torch.tensor([65536.0]), "growth_tracker": 7, "hysteresis_tracker": 1,
            },
        }
        for _ in range(chained)
    ]  # fmt: skip
    if old:
        schedule = {OLD_NAMES.get(key, key): value for key, value in schedule.items()}
    return {
        "args": args, "checkpoint_version": 3.0, "iteration": step,
        "optimizer": chain[0] if chained == 1 else chain,
        "lr_scheduler" if old else "opt_param_scheduler": schedule,
        "rng_state": [{"np_rng_state": None}],
    }  # fmt: skip


def _moments(chained: int, seed: int, views: Views) -> Any:
    generator = torch.Generator().manual_seed(seed)
    start, size = next(iter(views.values()))
    end = start + torch.Size(size).numel()

    def one() -> dict[Any, Any]:
        buffers = {
            name: torch.rand(end + 6, generator=generator) + 0.1
            for name in ("param", "exp_avg", "exp_avg_sq")
        }
        buffers["exp_avg_sq"][128] = 100.0
        buffers["exp_avg"] *= 0.2  # what gradients can lead to beside such an exp_avg_sq
        bucket = {(torch.bfloat16, torch.float32): {**buffers, "numel_unpadded": end}}
        return {"buckets_coalesced": True, 0: bucket}

    return one() if chained == 1 else [one() for _ in range(chained)]


Views = Mapping[str, tuple[int, tuple[int, ...]]]
VIEWS: Views = {"up.weight": (128, (2, 61)), "up.bias": (64, (32,)), "norm.weight": (0, (32,))}
"""Weight → where it lies in the buffer, the last one first, each at a multiple of 64."""
ATTENTION: Views = {
    "decoder.layers.0.mlp.weight": (192, (2, 61)),
    "decoder.layers.0.self_attention.linear_qkv.weight": (128, (8, 8)),
    "decoder.layers.0.self_attention.linear_qkv.bias": (64, (8,)),
    "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight": (0, (8,)),
}
"""With args that have heads: each tensor rank has one group of two heads of width 2."""


def _model(moments: list[Any], views: Views) -> dict[str, torch.Tensor]:
    """The rounded masters as views of one buffer for each optimizer, as torch saves them."""
    out = {}
    for i, buffers in enumerate(moments):
        (bucket,) = buffers[0].values()
        data = bucket["param"].bfloat16()
        for name, (start, size) in views.items():
            numel = torch.Size(size).numel()
            out[f"{'experts.' * i}{name}"] = data[start : start + numel].view(size)
    return out
