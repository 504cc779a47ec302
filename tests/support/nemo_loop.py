"""NeMo 2's own trainer on a CPU: a GPT of one layer, which its ModelCheckpoint saves and its
AutoResume finds. `nemo_trainer.py` is the program.

`llm.train` is done by its steps, as its package imports every collection."""

from __future__ import annotations

import multiprocessing
import tempfile
from pathlib import Path
from typing import Any

import torch

from tests.support import nemo_library

nemo_library.load()

import lightning.pytorch as pl  # noqa: E402
from megatron.core.dist_checkpointing.strategies import filesystem_async  # noqa: E402
from megatron.core.distributed import DistributedDataParallelConfig  # noqa: E402
from megatron.core.optimizer import OptimizerConfig  # noqa: E402
from nemo import lightning as nl  # noqa: E402
from nemo.collections.llm.gpt.data.pre_training import PreTrainingDataModule  # noqa: E402
from nemo.collections.llm.gpt.model.base import (  # noqa: E402
    GPTConfig,
    GPTModel,
    local_layer_spec,
)
from nemo.core.optim.mcore_optim import McoreDistributedOptimizer  # noqa: E402
from nemo.lightning.pytorch.optim import lr_scheduler  # noqa: E402
from nemo.lightning.pytorch.trainer import (  # noqa: E402
    configure_no_restart_validation_training_loop,
)

WORDS, LENGTH, SAMPLES, BATCH, MICRO, EVERY = 128, 8, 4096, 8, 4, 2
PEAK, FLOOR, WARMUP, END = 1e-3, 1e-4, 2, 40
SETTINGS: dict[str, Any] = {
    "lr": PEAK, "min_lr": FLOOR, "constant": 0, "schedule": "cosine", "clip_grad": 1.0,
    "batch": BATCH, "load_optimizer": True,
}  # fmt: skip


def begin() -> None:
    """Start the process by which the saver collects results, while this one has no thread."""
    filesystem_async._results_queue = multiprocessing.get_context("fork").Manager().Queue()


class Texts(torch.utils.data.Dataset[dict[str, Any]]):
    """Made by their numbers, which it counts."""

    def __init__(self) -> None:
        self.numbers: list[int] = []

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, number: int) -> dict[str, Any]:
        self.numbers.append(int(number))
        drawn = torch.Generator().manual_seed(int(number))
        words = torch.randint(WORDS, (LENGTH + 1,), generator=drawn)
        return {
            "tokens": words[:-1], "labels": words[1:], "loss_mask": torch.ones(LENGTH),
            "position_ids": torch.arange(LENGTH),
            "attention_mask": torch.ones(1, LENGTH, LENGTH).tril() < 0.5,
        }  # fmt: skip


class Data(PreTrainingDataModule):  # type: ignore[misc]
    """NeMo's, of texts that are made."""

    def build(self, *_: Any, **__: Any) -> None:
        self._train_ds = self._validation_ds = self._test_ds = Texts()


class Tokenizer:
    vocab_size, eos_id = WORDS, 0


class Stop(pl.Callback):
    """Before the end of the schedule, as a launch that is cut off."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        trainer.should_stop = trainer.global_step >= self.step


def scheduled(given: dict[str, Any]) -> Any:
    """The schedulers of its recipes."""
    if given["schedule"] == "hold":
        return lr_scheduler.WarmupHoldPolicyScheduler(
            warmup_steps=WARMUP, hold_steps=20, max_steps=END, min_lr=given["min_lr"]
        )
    return lr_scheduler.CosineAnnealingScheduler(
        max_steps=END, warmup_steps=WARMUP, constant_steps=given["constant"],
        min_lr=given["min_lr"],
    )  # fmt: skip


def built(given: dict[str, Any]) -> tuple[Any, Any, Any]:
    """Model, data and strategy of a recipe, in bf16: what NeMo saves in fp32 with the distributed
    optimizer, it can't load."""
    config = GPTConfig(
        num_layers=1, hidden_size=16, num_attention_heads=4, num_query_groups=2, kv_channels=4,
        ffn_hidden_size=32, seq_length=LENGTH, vocab_size=WORDS, attention_dropout=0.0,
        hidden_dropout=0.0, transformer_layer_spec=local_layer_spec, use_cpu_initialization=True,
        cross_entropy_loss_fusion=False, gradient_accumulation_fusion=False,
        masked_softmax_fusion=False, bias_dropout_fusion=False,
    )  # fmt: skip
    optim = nl.MegatronOptimizerModule(
        config=OptimizerConfig(
            optimizer="adam", lr=given["lr"], weight_decay=0.1, adam_beta1=0.9, adam_beta2=0.95,
            adam_eps=1e-8, clip_grad=given["clip_grad"], use_distributed_optimizer=True, bf16=True,
        ),
        lr_scheduler=scheduled(given),
    )  # fmt: skip
    prefix = Path(tempfile.mkdtemp()) / "texts"
    for end in ("bin", "idx"):  # which it asks for, and `Data` does not read
        prefix.with_suffix(f".{end}").touch()
    kinds = ("train", "validation", "test")
    data = Data(
        paths={kind: [str(prefix)] for kind in kinds}, seq_length=LENGTH, tokenizer=Tokenizer(),
        micro_batch_size=MICRO, global_batch_size=given["batch"], num_workers=0, pin_memory=False,
        split=None,
    )  # fmt: skip
    ddp = DistributedDataParallelConfig(use_distributed_optimizer=True)
    strategy = nl.MegatronStrategy(
        ckpt_async_save=False, ckpt_load_optimizer=given["load_optimizer"], ddp=ddp
    )
    return GPTModel(config, optim=optim, tokenizer=Tokenizer()), data, strategy


def run(root: Path, stop: int, given: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """As `llm.train` does, from where AutoResume begins: what each update used."""
    model, data, strategy = built({**SETTINGS, **given})
    trainer = nl.Trainer(
        accelerator="cpu", devices=1, max_steps=END, strategy=strategy, callbacks=[Stop(stop)],
        plugins=nl.MegatronMixedPrecision(precision="bf16-mixed"), limit_val_batches=0,
        num_sanity_val_steps=0, log_every_n_steps=1, logger=False, enable_progress_bar=False,
        enable_model_summary=False, use_distributed_sampler=False,
    )  # fmt: skip
    saver = nl.ModelCheckpoint(
        monitor=None, save_last=True, save_top_k=-1, every_n_train_steps=EVERY,
        filename="model--{step}-{consumed_samples}", always_save_context=False,
        save_context_on_train_end=False,
    )  # fmt: skip
    log = nl.NeMoLogger(name="run", log_dir=str(root), ckpt=saver)
    configure_no_restart_validation_training_loop(trainer)
    log.setup(trainer, resume_if_exists=True)
    resume = nl.AutoResume(resume_if_exists=True, resume_ignore_no_checkpoint=True)
    resume.setup(trainer, model)
    used: dict[int, dict[str, Any]] = {}
    by_itself = McoreDistributedOptimizer.step

    def step(self: Any, closure: Any = None) -> Any:
        def watched() -> Any:
            out = closure()
            used[trainer.global_step + 1] = seen(self, data._train_ds)
            return out

        return by_itself(self, watched)

    McoreDistributedOptimizer.step = step
    trainer.fit(model, data)
    return used


def seen(optimizer: Any, texts: Texts) -> dict[str, Any]:
    """What the live optimizer uses at an update, when its gradients are there."""
    inner = optimizer.mcore_optimizer
    states = [s for each in inner.chained_optimizers for s in each.optimizer.state.values()]
    groups = optimizer.param_groups
    numbers, texts.numbers = texts.numbers, []
    return {
        **{key: [group[key] for group in groups]
           for key in ("lr", "betas", "eps", "weight_decay")},
        "adam_step": [group.get("step", 0) for group in groups],
        "exp_avg": total(state["exp_avg"] for state in states if "exp_avg" in state),
        "exp_avg_sq": total(state["exp_avg_sq"] for state in states if "exp_avg_sq" in state),
        "masters": total(p for group in groups for p in group["params"]),
        "numbers": numbers,
    }  # fmt: skip


def total(tensors: Any) -> float:
    return float(sum(tensor.detach().double().abs().sum() for tensor in tensors))
