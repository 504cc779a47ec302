"""LitGPT's own `pretrain` and `finetune_full` on a model of one tiny layer, which may resume.

Usage: python -m tests.support.litgpt_trainer pretrain|finetune RUN UPDATES [--resume] [--lr PEAK]

It prints, as JSON, what each update used.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
from tokenizers import Tokenizer, models, pre_tokenizers

from tests.support.trainers_folder import FOLDER

sys.path.append(str(FOLDER))

from litgpt import Config, pretrain
from litgpt.args import EvalArgs, LogArgs, TrainArgs
from litgpt.data import DataModule, SFTDataset, get_sft_collate_fn
from litgpt.finetune import full
from litgpt.prompts import Default
from torch.utils.data import DataLoader

PEAK, EVERY, MICRO, LENGTH = 1e-2, 2, 2, 8
"""Micro-batches of 2 samples, 2 of them in an update, saved every 2 updates."""
WORDS = ["<s>", "</s>", *"abcdefgh"]
TINY = Config(
    name="tiny", block_size=LENGTH, vocab_size=len(WORDS), padded_vocab_size=16, n_layer=1,
    n_head=2, n_embd=8,
)  # fmt: skip


class Resumable(DataLoader):  # type: ignore[type-arg]
    """A loader that says where it is, as litdata's does: what Fabric saves of any other is the
    object itself."""

    def state_dict(self) -> dict[str, int]:
        return {"batch": 0}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """From the start again."""


class Letters(DataModule):
    """Random letters."""

    def connect(self, tokenizer: Any = None, batch_size: int = 1, **given: Any) -> None:
        self.tokenizer, self.batch_size = tokenizer, batch_size

    def train_dataloader(self) -> Any:
        made = torch.Generator().manual_seed(3)
        return Resumable(torch.randint(2, 10, (400, LENGTH + 1), generator=made), self.batch_size)

    def val_dataloader(self) -> Any:
        return self.train_dataloader()


class Sentences(Letters):
    """The same, for a fine-tuning."""

    prompt_style = Default()

    def train_dataloader(self) -> Any:
        data = [{"instruction": "a b c", "output": f"{WORDS[2 + i % 8]} d e"} for i in range(400)]
        inside = SFTDataset(data, self.tokenizer, self.prompt_style, LENGTH)
        return DataLoader(inside, self.batch_size, collate_fn=get_sft_collate_fn(LENGTH))


def base(folder: Path) -> Path:
    """Weights, a config and a tokenizer to fine-tune from."""
    from litgpt.model import GPT
    from litgpt.utils import save_config

    folder.mkdir(exist_ok=True)
    torch.save(GPT(TINY).state_dict(), folder / "lit_model.pth")
    save_config(TINY, folder)
    own = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="a"))
    own.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[attr-defined]
    own.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "Letters", "bos_token": "<s>", "eos_token": "</s>"}'
    )
    return folder


def listening(said: dict[int, Any]) -> None:
    """Each update of an AdamW is noted before it is made, by the number of the call."""
    step = torch.optim.AdamW.step

    def heard(self: Any, *given: Any, **named: Any) -> Any:
        group = self.param_groups[0]
        states = [state for state in self.state.values() if state]
        said[len(said) + 1] = {
            "lr": group["lr"], "betas": group["betas"], "eps": group["eps"],
            "weight_decay": group["weight_decay"],
            "adam_step": max((float(state["step"]) for state in states), default=0),
            "norm": sum(float(state["exp_avg"].norm()) for state in states),
        }  # fmt: skip
        return step(self, *given, **named)

    torch.optim.AdamW.step = heard  # type: ignore[method-assign]


def main() -> None:
    """Train as the command line says."""
    warnings.simplefilter("ignore")
    torch._dynamo.config.disable = True  # pretrain compiles its model, which takes a minute
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=["pretrain", "finetune"])
    parser.add_argument("run", type=Path)
    parser.add_argument("updates", type=int)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--lr", type=float, default=PEAK)
    parser.add_argument("--logger", default="csv")
    given = parser.parse_args()
    said: dict[int, Any] = {}
    listening(said)
    train = TrainArgs(
        save_interval=EVERY, log_interval=1, global_batch_size=2 * MICRO, micro_batch_size=MICRO,
        lr_warmup_steps=2, max_seq_length=LENGTH, min_lr=0.0,
    )  # fmt: skip
    setup = {"class_path": "torch.optim.AdamW", "init_args": {"lr": given.lr, "weight_decay": 0.1}}
    same = {
        "out_dir": given.run, "precision": "32-true", "resume": given.resume, "devices": 1,
        "optimizer": setup, "logger_name": given.logger, "log": LogArgs(), "train": train,
    }  # fmt: skip
    evaluate = EvalArgs(interval=4, max_iters=1)
    if given.kind == "pretrain":
        train.max_norm, train.max_tokens = 1.0, given.updates * 2 * MICRO * LENGTH
        sys.argv[1:] = ["pretrain", "tiny"]  # which it parses once more, for hyperparameters.yaml
        pretrain.setup("tiny", TINY, data=Letters(), eval=evaluate, **same)
    else:
        train.epochs, train.max_steps = 4, given.updates
        evaluate = EvalArgs(
            interval=given.updates + 1, max_iters=1, max_new_tokens=1
        )  # it would write a sample
        first = base(given.run.with_name("base"))
        sys.argv[1:] = ["finetune_full", str(first)]
        full.setup(first, data=Sentences(), eval=evaluate, **same)
    print(json.dumps(said))


if __name__ == "__main__":
    main()
