"""Runs like those of GPT-NeoX: a real DeepSpeed engine, its client state, and its AnnealingLR as
described by its source (`megatron/learning_rates.py` of EleutherAI/gpt-neox at ea7aefd8)."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

START, FLOOR, WARMUP, END = 1e-3, 1e-4, 2.0, 20


class NeoXAnnealingLR:
    """Counts iterations. On load the file and the config must agree, unless a key of the config
    says which one counts."""

    NAMES = ("start_lr", "min_lr", "warmup_iter", "end_iter", "decay_style")

    def __init__(self, optimizer: Any, style: str, use_checkpoint: bool) -> None:
        self.optimizer, self.use_checkpoint = optimizer, use_checkpoint
        self.start_lr, self.min_lr, self.decay_style = START, FLOOR, style
        self.warmup_iter, self.end_iter = WARMUP, END
        self.step(0)

    def get_lr(self) -> float:
        now, warmup = self.num_iters, self.warmup_iter
        if warmup > 0 and now <= warmup:
            return self.start_lr * max(1, now) / warmup
        now, end = now - warmup, self.end_iter - warmup
        lr = self.start_lr
        if self.decay_style == "linear":
            lr = self.start_lr * (end - now) / end
        elif self.decay_style == "cosine":
            lr = self.min_lr + (self.start_lr - self.min_lr) / 2 * (
                math.cos(math.pi * now / end) + 1
            )
        elif self.decay_style == "exponential":
            lr = self.start_lr * math.exp(-0.693 * now / end)
        return max(lr, self.min_lr)

    def step(self, number: float | None = None) -> None:
        self.num_iters = self.num_iters + 1 if number is None else number
        for group in self.optimizer.param_groups:
            group["lr"] = self.get_lr() / group.get("width_mult", 1.0)

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in (*self.NAMES, "num_iters")}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name in self.NAMES:
            if not self.use_checkpoint:
                assert getattr(self, name) == state[name], f"{name} do not match"
            setattr(self, name, state[name])
        self.step(state["num_iters"])


def build(style: str, stage: int, use_checkpoint: bool, width: float | None) -> Any:
    """An engine in bf16 over torch's AdamW, in two groups."""
    import deepspeed
    import torch
    from torch import nn

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8))
    groups: list[dict[str, Any]] = [
        {"params": [p for p in model.parameters() if p.ndim > 1]},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    if width is not None:
        groups[0]["width_mult"] = width
    optimizer = torch.optim.AdamW(groups, lr=START, betas=(0.9, 0.95), weight_decay=0.1)
    scheduler = NeoXAnnealingLR(optimizer, style, use_checkpoint)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": True},
        "steps_per_print": 10**9,
    }
    engine, _, _, _ = deepspeed.initialize(
        model=model, optimizer=optimizer, lr_scheduler=scheduler, config=config
    )
    return engine


def train(
    root: Path,
    upto: int,
    style: str = "cosine",
    *,
    stage: int = 1,
    use_checkpoint: bool = True,
    width: float | None = None,
    every: int = 2,
) -> list[list[float]]:
    """Go on from the latest step, if there is one, to update `upto`, and save each `every`
    updates. The rates of the groups at each update."""
    import torch

    engine = build(style, stage, use_checkpoint, width)
    done = 0
    if (root / "latest").exists():
        loaded, state = engine.load_checkpoint(str(root))
        assert loaded is not None
        done = state["iteration"]
    engine.lr_scheduler.optimizer = engine.optimizer
    rates = []
    for number in range(done, upto):
        torch.manual_seed(number)
        loss = engine(torch.randn(4, 8).bfloat16()).float().pow(2).mean()
        engine.backward(loss)
        rates.append([group["lr"] for group in engine.optimizer.param_groups])
        engine.step()
        if (number + 1) % every == 0:
            _save(root, engine, number + 1)
    return rates


def _save(root: Path, engine: Any, iteration: int) -> None:
    import torch

    sizes = ("num_layers", "hidden_size", "padded_vocab_size", "model_parallel_size")
    state = {
        "iteration": iteration,
        "args": {**dict.fromkeys(sizes, 1), "tokenizer_type": "HFTokenizer"},
        "random_rng_state": random.getstate(),
        "torch_rng_state": torch.get_rng_state(),
        "rng_tracker_states": {},
    }
    engine.save_checkpoint(str(root), tag=f"global_step{iteration}", client_state=state)
    folder = root / f"global_step{iteration}" / "configs"
    folder.mkdir(exist_ok=True)
    (folder / "small.yml").write_text(json.dumps({"train_iters": END}))
