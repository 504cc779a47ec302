"""One small GPT-2, trained by transformers' Trainer on one CPU, its matrices as transformers' own
Conv1D has them, or as nn.Linear has.

`python -m tests.support.gpt2s conv1d|linear RUN STOP [SEED [BATCHES]]` trains on to step STOP from
where the Trainer resumes, and prints the losses as JSON. BATCHES is a file of another trainer's
samples, whose model this one is as large as.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from tests.support.llamas import BATCH, EPS, RATE, TOKENS, tokens

TINY = {"vocab_size": 256, "n_head": 2, "n_positions": 32}
"""What train/configs/tiny.yaml has otherwise."""


def gpt2(kind: str, **sizes: int) -> Any:
    """transformers' own, or the same with nn.Linear for each Conv1D."""
    from transformers import GPT2Config, GPT2LMHeadModel
    from transformers.pytorch_utils import Conv1D

    model = GPT2LMHeadModel(
        GPT2Config(
            **{"vocab_size": TOKENS, "n_head": 4, "n_positions": 64, **sizes}, n_embd=32, n_layer=2,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
            attn_implementation="eager",
        )
    )  # fmt: skip
    for outer in list(model.modules()) if kind == "linear" else ():
        for name, inner in list(outer.named_children()):
            if isinstance(inner, Conv1D):
                linear = torch.nn.Linear(*inner.weight.shape)
                linear.weight.data = inner.weight.data.t().contiguous()
                linear.bias.data = inner.bias.data.clone()
                setattr(outer, name, linear)
    return model


def train(kind: str, root: Path, stop: int, seed: int, batches: str = "") -> dict[int, float]:
    """The loss of each update, which the Trainer saves."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    torch.manual_seed(seed)
    data = [{"input_ids": row, "labels": row} for step in range(1, 21) for row in tokens(step)]
    size = BATCH
    if batches:  # whose targets are shifted already
        held = torch.load(batches)
        size = held["batch"]
        data = [
            {"input_ids": row, "labels": targets, "shift_labels": targets}
            for row, targets in zip(held["inputs"], held["targets"], strict=True)
        ]
    arguments = TrainingArguments(
        str(root), max_steps=stop, per_device_train_batch_size=size, learning_rate=RATE,
        weight_decay=0.1, adam_epsilon=EPS, lr_scheduler_type="constant", logging_steps=1,
        save_steps=1, max_grad_norm=0.0, report_to=[], disable_tqdm=True, seed=seed, use_cpu=True,
        train_sampling_strategy="sequential", remove_unused_columns=not batches,
    )  # fmt: skip
    seen: dict[int, float] = {}

    class Losses(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            if "loss" in logs:
                seen[state.global_step] = float(logs["loss"])

    trainer = Trainer(
        gpt2(kind, **(TINY if batches else {})), arguments, train_dataset=data, callbacks=[Losses()]
    )
    trainer.train(resume_from_checkpoint=any(root.glob("checkpoint-*")))
    named = {id(p): name for name, p in trainer.model.named_parameters()}
    order = [named[id(p)] for g in trainer.optimizer.param_groups for p in g["params"]]
    (root / "order.txt").write_text("\n".join(order))
    return seen


if __name__ == "__main__":
    kind, root, stop, *more = sys.argv[1:]
    seed, *batches = more or ["0"]
    print(json.dumps(train(kind, Path(root), int(stop), int(seed), *batches)))
