"""A real Hugging Face Trainer of a tiny GPT-2: `python -m tests.support.hugging_face RUN STOP`."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

PEAK = 1e-3


def main() -> None:
    """Train to step STOP and save every 2 steps; resume where something is saved."""
    parser = argparse.ArgumentParser()
    parser.add_argument("run", type=Path)
    parser.add_argument("stop", type=int)
    parser.add_argument("--max-steps", type=int, default=12)
    parser.add_argument("--scheduler", default="cosine")
    parser.add_argument("--optim", default="adamw_torch")
    parser.add_argument("--width", type=int, default=8)
    parser.add_argument("--anew", action="store_true", help="do not resume")
    wanted = parser.parse_args()
    os.environ["TENSORBOARD_LOGGING_DIR"] = str(wanted.run / "runs")
    saved = any(wanted.run.glob("checkpoint-*"))
    trainer(wanted).train(resume_from_checkpoint=saved and not wanted.anew)


def trainer(wanted: argparse.Namespace) -> Any:
    """The Trainer, which logs each step."""
    import torch
    from transformers import (
        GPT2Config,
        GPT2LMHeadModel,
        Trainer,
        TrainerCallback,
        TrainingArguments,
    )

    class Words(torch.utils.data.Dataset):  # type: ignore[type-arg]
        def __len__(self) -> int:
            return 64

        def __getitem__(self, index: int) -> dict[str, Any]:
            generator = torch.Generator().manual_seed(index)
            tokens = torch.randint(0, 32, (8,), generator=generator)
            return {"input_ids": tokens, "labels": tokens}

    class Stop(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **live: Any) -> None:
            if state.global_step >= wanted.stop:
                control.should_training_stop = True

    torch.manual_seed(0)
    torch.set_num_threads(1)
    config = GPT2Config(vocab_size=32, n_positions=8, n_embd=wanted.width, n_layer=1, n_head=1)
    arguments = TrainingArguments(
        output_dir=str(wanted.run), max_steps=wanted.max_steps, save_steps=2,
        save_strategy="steps", warmup_steps=2, per_device_train_batch_size=4, learning_rate=PEAK,
        lr_scheduler_type=wanted.scheduler, report_to=["tensorboard"], use_cpu=True,
        weight_decay=0.1, logging_steps=1, optim=wanted.optim,
    )  # fmt: skip
    return Trainer(
        model=GPT2LMHeadModel(config), args=arguments, train_dataset=Words(), callbacks=[Stop()]
    )


if __name__ == "__main__":
    main()
