"""Runs of OLMo-core's own Trainer, loader, optimizer and checkpointer: one layer, on a CPU; where
there are several ranks, FSDP shares it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from olmo_core.config import Config
from olmo_core.data import NumpyDataLoaderConfig, NumpyFSLDatasetConfig, TokenizerConfig
from olmo_core.distributed.parallel import DataParallelType
from olmo_core.distributed.utils import get_world_size
from olmo_core.nn.transformer import TransformerConfig
from olmo_core.optim import AdamWConfig, OptimGroupOverride
from olmo_core.optim.scheduler import CosWithWarmup, Scheduler
from olmo_core.train import Duration, TrainerConfig
from olmo_core.train.callbacks import Callback, CheckpointerCallback, ConfigSaverCallback
from olmo_core.train.common import StepSkipRange
from olmo_core.train.train_module import (
    TransformerDataParallelConfig,
    TransformerTrainModuleConfig,
)
from olmo_core.utils import seed_all

BATCH, LENGTH, STEPS = 32, 16, 20
"""Tokens of a batch and of an instance, and the steps of the whole run."""
COSINE = CosWithWarmup(warmup=2)


@dataclass
class Start:
    """What a run is started with."""

    scheduler: Scheduler | None = field(default_factory=lambda: COSINE)
    lr: float = 1e-3
    seed: int = 7
    save_interval: int = 2
    ephemeral: int | None = None
    skip: list[tuple[int, int]] = field(default_factory=list)
    end: Duration = field(default_factory=lambda: Duration.steps(STEPS))


@dataclass
class Experiment(Config):
    """The config as OLMo-core's scripts save it."""

    train_module: TransformerTrainModuleConfig
    data_loader: NumpyDataLoaderConfig
    trainer: TrainerConfig
    init_seed: int = 12536


@dataclass
class Watch(Callback):
    """What the live optimizer uses at each update, and the first tokens of each batch."""

    def __post_init__(self) -> None:
        self.used: dict[int, dict[str, Any]] = {}
        self.batches: dict[int, list[int]] = {}

    def pre_train(self) -> None:
        module: Any = self.trainer.train_module
        module.optim.register_step_pre_hook(self._note)

    def pre_step(self, batch: dict[str, Any]) -> None:
        self.batches[self.step] = batch["input_ids"][:, :4].flatten().tolist()

    def _note(self, optim: Any, *_: Any) -> None:
        states = [optim.state.get(p, {}) for g in optim.param_groups for p in g["params"]]
        self.used[self.step] = {
            **{key: [group[key] for group in optim.param_groups]
               for key in ("lr", "betas", "eps", "weight_decay")},
            "adam_step": max((int(state["step"]) for state in states if state), default=0),
            "moments": sum(float(s["exp_avg"].abs().sum()) for s in states if s),
        }  # fmt: skip


def trainer(root: Path, stop: int, start: Start, folder: str = "") -> tuple[Any, Watch]:
    """A Trainer that saves to `folder`, or to `root`, beside which its data lies, and stops after
    step `stop`."""
    seed_all(0)
    data = root.parent / "data.npy"
    if not data.exists():
        rng = np.random.default_rng(0)
        rng.integers(2, 64, LENGTH * 400, dtype=np.uint16).tofile(data)
    tokenizer = TokenizerConfig(vocab_size=64, eos_token_id=0, pad_token_id=1)
    model = TransformerConfig.llama_like(vocab_size=64, d_model=16, n_layers=1, n_heads=2)
    bare = OptimGroupOverride(params=["embeddings.weight"], opts={"weight_decay": 0.0})
    ranks = get_world_size()
    sharded = TransformerDataParallelConfig(name=DataParallelType.fsdp) if ranks > 1 else None
    module = TransformerTrainModuleConfig(
        rank_microbatch_size=BATCH // ranks, max_sequence_length=LENGTH, dp_config=sharded,
        scheduler=start.scheduler,
        optim=AdamWConfig(lr=start.lr, weight_decay=0.1, group_overrides=[bare]),
    )  # fmt: skip
    loader = NumpyDataLoaderConfig(global_batch_size=BATCH, seed=start.seed, num_workers=0)
    dataset = NumpyFSLDatasetConfig(
        paths=[str(data)], sequence_length=LENGTH, tokenizer=tokenizer,
        work_dir=str(root.parent / "work"),
    )  # fmt: skip
    watch = Watch()
    checkpointer = CheckpointerCallback(
        save_interval=start.save_interval, ephemeral_save_interval=start.ephemeral,
        save_async=False, pre_train_checkpoint=False, max_checkpoints=None,
    )  # fmt: skip
    config = TrainerConfig(
        save_folder=folder or str(root), work_dir=str(root.parent / "work"), save_overwrite=True,
        max_duration=start.end, hard_stop=Duration.steps(stop),
        steps_to_skip=[StepSkipRange(start=a, stop=b) for a, b in start.skip] or None,
        callbacks={"checkpointer": checkpointer, "config_saver": ConfigSaverCallback()},
    )  # fmt: skip
    saved = Experiment(module, loader, config).as_config_dict()
    live = config.with_callback("watch", watch).build(
        module.build(model.build(init_device="cpu")), loader.build(dataset.build())
    )
    live.callbacks["config_saver"].config = saved
    return live, live.callbacks["watch"]


def train(root: Path, stop: int, start: Start | None = None, folder: str = "") -> Watch:
    """Train to step `stop`, from where the Trainer itself resumes."""
    live, watch = trainer(root, stop, start or Start(), folder)
    live.fit()
    return watch
