"""A LoRA by peft on the Llama of `llamas`, trained by transformers' Trainer, alone or with an
engine of DeepSpeed.

`python -m tests.support.loras RUN STOP` trains on to step STOP from where the Trainer resumes,
saves each step, and prints the losses as JSON. The frozen model is the same in each run, as its
trainers load it from elsewhere; `--seed` is that of the adapters.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tests.support.llamas import BATCH, BETAS, EPS, HOW, RATE, llama, tokens


def adapted(rank: int, targets: Sequence[str], seed: int) -> Any:
    """The model with its adapters, as peft makes it."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    model = llama()
    torch.manual_seed(seed)
    return get_peft_model(model, LoraConfig(r=rank, lora_alpha=8, target_modules=[*targets]))


def train(
    root: Path,
    stop: int,
    how: str,
    rank: int = 4,
    targets: Sequence[str] = ("q_proj", "v_proj"),
    seed: int = 0,
) -> dict[int, float]:
    """The loss of each update."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    data = [{"input_ids": row, "labels": row} for step in range(1, 41) for row in tokens(step)]
    arguments = TrainingArguments(
        str(root), max_steps=stop, per_device_train_batch_size=BATCH, learning_rate=RATE,
        weight_decay=0.1, adam_beta2=BETAS[1], adam_epsilon=EPS, lr_scheduler_type="constant",
        logging_steps=1, save_steps=1, max_grad_norm=0.0, report_to=[], disable_tqdm=True,
        seed=seed, train_sampling_strategy="sequential", **HOW[how],
    )  # fmt: skip
    seen: dict[int, float] = {}

    class Losses(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            if "loss" in logs:
                seen[state.global_step] = float(logs["loss"])

    model = adapted(rank, targets, seed)
    trainer = Trainer(model, arguments, train_dataset=data, callbacks=[Losses()])
    trainer.train(resume_from_checkpoint=any(root.glob("checkpoint-*")))
    if not how and not (root / "order.txt").exists():
        named = {id(p): name for name, p in trainer.model.named_parameters()}
        order = [named[id(p)] for g in trainer.optimizer.param_groups for p in g["params"]]
        # peft saves them without the name of the adapter.
        (root / "order.txt").write_text("\n".join(order).replace(".default.", "."))
    return seen


def main() -> None:
    words = argparse.ArgumentParser()
    words.add_argument("root", type=Path)
    words.add_argument("stop", type=int)
    words.add_argument("--how", choices=HOW, default="")
    words.add_argument("--seed", type=int, default=0)
    given = words.parse_args()
    if given.how.startswith("zero"):
        from tests.support.fsdp2 import free_port

        os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    seen = train(given.root, given.stop, given.how, seed=given.seed)
    print(json.dumps(seen))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
