"""Runs like those of BigScience's Megatron-DeepSpeed: a real DeepSpeed pipeline, its client state
under the real module names, its AnnealingLR and apex's Adam as described by their sources."""

from __future__ import annotations

import enum
import math
import random
import sys
from argparse import Namespace
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from tests.support.engines import end_engines
from tests.support.fused_adam import ApexAdam
from tests.support.in_process import one_rank

BATCH, LENGTH = 2, 4
DEFAULT: dict[str, Any] = {
    "lr": 6e-5, "min_lr": 6e-6, "lr_warmup_samples": 8, "lr_decay_samples": 80,
    "lr_decay_style": "cosine", "lr_decay_tokens": None, "override_lr_scheduler": False,
    "use_checkpoint_lr_scheduler": False, "lr_warmup_tokens": None, "weight_decay": 0.1,
    "skip_train_iteration_range": deque([[2, 2]]),
    "newer": False, "global_batch_size": BATCH, "train_iters": None, "lr_warmup_iters": 0,
    "lr_decay_iters": None, "undecayed": False,
}  # fmt: skip
"""The command line; `newer` is the scheduler of deepspeedai/Megatron-DeepSpeed, and `undecayed`
what that makes of its groups at ZeRO 3: it takes each weight for a bias, as none has elements."""
BY_ITERATIONS: dict[str, Any] = {
    "train_iters": 60, "lr_warmup_iters": 4, "lr_decay_iters": 40, "lr_warmup_samples": 0,
    "lr_decay_samples": None,
}  # fmt: skip
"""The same schedule in iterations."""


class AnnealingLR:
    """Samples, or tokens after the warm-up where `lr_decay_tokens` is given; on load the file and
    the command line must agree, unless a flag says which one counts."""

    def __init__(self, optimizer: Any, args: Namespace) -> None:
        self.optimizer, self.args = optimizer, args
        self.max_lr, self.min_lr = args.lr, args.min_lr
        self.warmup_steps, self.decay_steps = args.lr_warmup_samples, args.lr_decay_samples
        if args.train_iters:
            assert not self.warmup_steps and not self.decay_steps, "expected iterations"
            self.warmup_steps = args.lr_warmup_iters * args.global_batch_size
            self.decay_steps = args.lr_decay_iters * args.global_batch_size
        self.decay_style = args.lr_decay_style
        self.num_steps = self.num_tokens = self.warmup_tokens = 0
        self.step(0)

    def get_lr(self) -> float:
        if self.warmup_steps > 0 and self.num_steps <= self.warmup_steps:
            if self.num_steps == self.warmup_steps and self.args.lr_decay_tokens is not None:
                self.warmup_tokens = self.num_tokens
            return float(self.max_lr * self.num_steps / self.warmup_steps)
        if self.decay_style == "constant":
            return float(self.max_lr)
        done, end, start = self.num_steps, self.decay_steps, self.warmup_steps
        if self.args.lr_decay_tokens is not None:
            done, end, start = self.num_tokens, self.args.lr_decay_tokens, self.warmup_tokens
        if done > end:
            return float(self.min_lr)
        share = (done - start) / (end - start)
        left = 1 - share if self.decay_style == "linear" else (math.cos(math.pi * share) + 1) / 2
        return float(self.min_lr + left * (self.max_lr - self.min_lr))

    def step(self, increment: int, token_num: int | None = None) -> None:
        self.num_tokens = self.args.consumed_train_tokens if token_num is None else token_num
        self.num_steps += increment
        for group in self.optimizer.param_groups:
            group["lr"] = self.get_lr()

    def state_dict(self) -> dict[str, Any]:
        names = (
            "max_lr", "warmup_steps", "num_steps", "warmup_tokens", "num_tokens", "decay_style",
            "decay_steps", "min_lr",
        )  # fmt: skip
        return {name: getattr(self, name) for name in names}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        older = {"max_lr": "start_lr", "warmup_steps": "warmup_iter", "decay_steps": "end_iter"}
        for name in ("max_lr", "min_lr", "warmup_steps", "decay_steps", "decay_style"):
            saved, mine = state[older.get(name, "")] if older.get(name) in state else None, name
            saved = state[name] if saved is None else saved
            if self.args.override_lr_scheduler:
                continue
            if not self.args.use_checkpoint_lr_scheduler:
                assert getattr(self, mine) == saved, f"{mine} {getattr(self, mine)} and {saved}"
            setattr(self, mine, saved)
        self.warmup_tokens = state.get("warmup_tokens", self.warmup_tokens)
        position = state["num_iters"] if "num_iters" in state else state["num_steps"]
        self.step(position, state.get("num_tokens", self.num_tokens))


class OptimizerParamScheduler(AnnealingLR):
    """Other names in the file, a rate and a weight decay for each group, a warm-up in tokens; a
    flag that is loaded too late for the weight decay of the position that it sets."""

    NAMES = {  # noqa: RUF012
        "max_lr": "max_lr", "min_lr": "min_lr", "lr_warmup_steps": "warmup_steps",
        "lr_decay_steps": "decay_steps", "lr_decay_style": "decay_style",
        "lr_warmup_tokens": "warmup_tokens", "lr_decay_tokens": "decay_tokens",
        "num_steps": "num_steps", "num_tokens": "num_tokens", "start_wd": "start_wd",
        "end_wd": "end_wd", "wd_incr_style": "wd_incr_style", "wd_incr_steps": "wd_incr_steps",
    }  # fmt: skip

    def __init__(self, optimizer: Any, args: Namespace) -> None:
        self.start_wd = self.end_wd = args.weight_decay
        self.wd_incr_style, self.wd_incr_steps = "constant", 1000
        self.decay_tokens = args.lr_decay_tokens
        super().__init__(optimizer, args)
        self.warmup_tokens = args.lr_warmup_tokens
        self.step(0)

    def get_lr(self) -> float:
        if not self.warmup_tokens or self.num_tokens > self.warmup_tokens:
            return super().get_lr()
        return float(self.max_lr * self.num_tokens / self.warmup_tokens)

    def step(self, increment: int, token_num: int | None = None) -> None:
        super().step(increment, token_num)
        for group in self.optimizer.param_groups:
            group["lr"] *= group["lr_mult"]
            group["weight_decay"] = self.end_wd * group["wd_mult"]

    def state_dict(self) -> dict[str, Any]:
        return {key: getattr(self, name) for key, name in self.NAMES.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        late = ("start_wd", "end_wd", "wd_incr_style", "wd_incr_steps")
        for early in (True, False):
            for key, name in self.NAMES.items():
                if key.startswith("num_") or (key in late) is early:
                    continue
                if self.args.override_opt_param_scheduler:
                    continue
                if not self.args.use_checkpoint_opt_param_scheduler:
                    assert getattr(self, name) == state[key], f"{key} is {state[key]}"
                setattr(self, name, state[key])
            if early:
                self.step(state["num_steps"], state["num_tokens"])


class PositionEmbeddingType(enum.Enum):
    alibi = 3


PositionEmbeddingType.__module__ = "megatron.enums"


@contextmanager
def megatron() -> Iterator[None]:
    """A process group of this process alone, and the modules that the saved `args` import. Engines
    end with it, unless there were others before: the grid of each has fifteen groups."""
    from deepspeed import comm

    alone = not comm.is_initialized()
    enums = ModuleType("megatron.enums")
    enums.PositionEmbeddingType = PositionEmbeddingType  # type: ignore[attr-defined]
    names = {"megatron": ModuleType("megatron"), "megatron.enums": enums}
    before = {name: sys.modules.get(name) for name in names}
    sys.modules.update(names)
    try:
        with one_rank():
            yield
    finally:
        if alone:
            end_engines()
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


def arguments(**command_line: Any) -> Namespace:
    """What `args` of a fresh start hold."""
    alibi = PositionEmbeddingType.alibi
    line = {**DEFAULT, **command_line}
    if line["newer"]:
        for flag in ("override", "use_checkpoint"):
            del line[f"{flag}_lr_scheduler"]
            line.setdefault(f"{flag}_opt_param_scheduler", False)
        line |= dict.fromkeys(("start_weight_decay", "end_weight_decay"), line["weight_decay"])
    return Namespace(
        **line, consumed_train_samples=0, consumed_valid_samples=0,
        consumed_train_tokens=0, gigaflos_no_embeds=0.0, iteration=0, seed=42, clip_grad=1.0,
        rampup_batch_size=None, position_embedding_type=alibi, tensor_model_parallel_size=1,
        pipeline_model_parallel_size=1, adam_beta1=0.9, adam_beta2=0.95,
    )  # fmt: skip


def build(args: Namespace) -> Any:
    """A pipeline of one stage in bf16 with BF16_Optimizer over apex's Adam, in three groups."""
    import deepspeed
    import torch
    from deepspeed.pipe import PipelineModule
    from deepspeed.runtime import bf16_optimizer
    from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
    from torch import nn

    from tests.support.tiny_attention import Fused

    bf16_optimizer.see_memory_usage = lambda *rest, **more: None  # seconds for each line of it
    torch.manual_seed(0)
    first = Fused() if hasattr(args, "num_attention_heads") else nn.Linear(8, 8)
    layers = [first, nn.LayerNorm(8), nn.Linear(8, 8)]
    model = PipelineModule(
        layers=layers,
        topology=PipeModelDataParallelTopology(num_pp=1, num_mp=1, num_dp=1),
        loss_fn=lambda out, label: (out.float() - label.float()).pow(2).mean(),
    )
    groups = [
        {
            "params": [p for p in first.parameters() if p.ndim == 2],
            "weight_decay": args.weight_decay,
        },
        {"params": [layers[2].weight], "weight_decay": args.weight_decay},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    for group in groups if args.newer else ():
        decays = any(p.ndim > 1 for p in group["params"]) and not args.undecayed
        group |= {"wd_mult": float(decays), "lr_mult": 1.0}
    scheduler = OptimizerParamScheduler if args.newer else AnnealingLR
    optimizer = ApexAdam(groups, lr=args.lr, betas=(0.9, 0.95), eps=1e-8)
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 1},
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": "fp32"},
        "steps_per_print": 10**9,
    }
    engine, _, _, _ = deepspeed.initialize(
        model=model, optimizer=optimizer, lr_scheduler=scheduler(optimizer, args), config=config
    )
    return engine


def train(engine: Any, args: Namespace, steps: int) -> list[float]:
    """The rate of each of `steps` updates."""
    import torch

    rates = []
    for _ in range(steps):
        torch.manual_seed(engine.global_steps)
        batch = (torch.randn(BATCH, 8).bfloat16(), torch.zeros(BATCH, 8).bfloat16())
        (rate,) = {group["lr"] for group in engine.optimizer.optimizer.param_groups}
        rates.append(rate)
        args.iteration += 1
        args.consumed_train_samples += BATCH
        args.consumed_train_tokens += BATCH * LENGTH
        engine.train_batch(iter([batch]))
    return rates


def decays(engine: Any) -> tuple[float, ...]:
    """The weight decay of each group."""
    return tuple(group["weight_decay"] for group in engine.optimizer.optimizer.param_groups)


def save(root: Path, engine: Any, args: Namespace) -> None:
    """With Megatron's client state."""
    import torch

    state = {
        "args": args,
        "checkpoint_version": 3.0,
        "iteration": args.iteration,
        "tokens": args.consumed_train_tokens,
        "checkpoint_info": {"padded_vocab_size": 8, "original_vocab_size": 7},
        "random_rng_state": random.getstate(),
        "torch_rng_state": torch.get_rng_state(),
        "rng_tracker_states": {"model-parallel-rng": torch.get_rng_state()},
    }
    engine.save_checkpoint(str(root), client_state=state)


def make(root: Path, steps: int = 6, **command_line: Any) -> None:
    """A run of `steps`, saved at its end and two steps before."""
    args = arguments(**command_line)
    engine = build(args)
    train(engine, args, steps - 2)
    save(root, engine, args)
    train(engine, args, 2)
    save(root, engine, args)


def resume(root: Path, steps: int = 4, **command_line: Any) -> dict[str, Any]:
    """What a relaunch with this command line holds, and the rates of its next updates."""
    args = arguments(**command_line)
    engine = build(args)
    loaded, state = engine.load_checkpoint(str(root))
    assert loaded is not None
    args.iteration, args.consumed_train_tokens = state["iteration"], state["tokens"]
    args.consumed_train_samples = state["args"].consumed_train_samples
    inner = engine.optimizer.optimizer
    held = {
        "iteration": args.iteration,
        "consumed_samples": args.consumed_train_samples,
        "betas": {tuple(group["betas"]) for group in inner.param_groups},
        "eps": {group["eps"] for group in inner.param_groups},
        "weight_decay": decays(engine),
        "steps": {group.get("step", 0) for group in inner.param_groups},
        "clip_grad": engine.optimizer.clip_grad,
        "moments": sum(
            float(state[name].abs().sum())
            for state in inner.state.values()
            for name in ("exp_avg", "exp_avg_sq")
        ),
    }
    held["rates"] = train(engine, args, steps)
    held["later_weight_decay"] = decays(engine)
    return held
