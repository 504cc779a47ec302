"""One small GPT-2, trained by transformers' Trainer on one CPU, its matrices as transformers' own
Conv1D has them, or as nn.Linear has.

`python -m tests.support.gpt2s conv1d|linear RUN STOP [SEED]` trains on to step STOP from where the
Trainer resumes, and prints the losses as JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from tests.support.llamas import BATCH, EPS, RATE, TOKENS, tokens


def gpt2(kind: str) -> Any:
    """transformers' own, or the same with nn.Linear for each Conv1D."""
    from transformers import GPT2Config, GPT2LMHeadModel
    from transformers.pytorch_utils import Conv1D

    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=TOKENS, n_embd=32, n_layer=2, n_head=4, n_positions=64, resid_pdrop=0.0,
            embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
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


def train(kind: str, root: Path, stop: int, seed: int) -> dict[int, float]:
    """The loss of each update, which the Trainer saves."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    torch.manual_seed(seed)
    data = [{"input_ids": row, "labels": row} for step in range(1, 21) for row in tokens(step)]
    arguments = TrainingArguments(
        str(root), max_steps=stop, per_device_train_batch_size=BATCH, learning_rate=RATE,
        weight_decay=0.1, adam_epsilon=EPS, lr_scheduler_type="constant", logging_steps=1,
        save_steps=1, max_grad_norm=0.0, report_to=[], disable_tqdm=True, seed=seed, use_cpu=True,
        train_sampling_strategy="sequential",
    )  # fmt: skip
    seen: dict[int, float] = {}

    class Losses(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            if "loss" in logs:
                seen[state.global_step] = float(logs["loss"])

    trainer = Trainer(gpt2(kind), arguments, train_dataset=data, callbacks=[Losses()])
    trainer.train(resume_from_checkpoint=any(root.glob("checkpoint-*")))
    named = {id(p): name for name, p in trainer.model.named_parameters()}
    order = [named[id(p)] for g in trainer.optimizer.param_groups for p in g["params"]]
    (root / "order.txt").write_text("\n".join(order))
    return seen


if __name__ == "__main__":
    kind, root, stop, *seed = sys.argv[1:]
    print(json.dumps(train(kind, Path(root), int(stop), int(seed[0]) if seed else 0)))
