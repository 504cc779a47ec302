"""Megatron-Bridge's own loop on a CPU: a GPT of one layer, which its checkpoint manager saves and
resumes. `bridge_trainer.py` is the program.

`setup` and `pretrain` ask for a GPU at their first line: what they do is done here in their order,
by their functions."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from omegaconf import OmegaConf

from tests.support import bridge_library

bridge_library.load()

from megatron.bridge.data.base import DatasetProvider  # noqa: E402
from megatron.bridge.data.loaders import setup_data_iterators  # noqa: E402
from megatron.bridge.models.gpt_provider import GPTModelProvider  # noqa: E402
from megatron.bridge.training import config as configs  # noqa: E402
from megatron.bridge.training.callbacks import CallbackContext, CallbackManager  # noqa: E402
from megatron.bridge.training.checkpointing import (  # noqa: E402
    CheckpointLoadContext,
    create_checkpoint_manager,
    maybe_load_dataloader_state,
)
from megatron.bridge.training.initialize import init_rerun_state, torch_dist_init  # noqa: E402
from megatron.bridge.training.losses import masked_next_token_loss  # noqa: E402
from megatron.bridge.training.optim import setup_optimizer  # noqa: E402
from megatron.bridge.training.setup import (  # noqa: E402
    _build_distributed_model,
    _should_load_checkpoint,
    _update_model_config_funcs,
)
from megatron.bridge.training.state import GlobalState  # noqa: E402
from megatron.bridge.training.tokenizers.config import TokenizerConfig  # noqa: E402
from megatron.bridge.training.train import train  # noqa: E402
from megatron.core import tensor_parallel  # noqa: E402
from megatron.core.dist_checkpointing.strategies.filesystem_async import (  # noqa: E402
    get_write_results_queue,
)
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.num_microbatches_calculator import (  # noqa: E402
    init_num_microbatches_calculator,
)

WORDS, LENGTH, SAMPLES, BATCH, MICRO = 32, 8, 4096, 8, 4


def begin() -> None:
    """Start the process by which the saver collects results, while this one has no thread."""
    get_write_results_queue("fork")


def layers(_: Any) -> Any:
    return get_gpt_layer_local_spec()


@dataclass(kw_only=True)
class Texts(DatasetProvider):  # type: ignore[misc]
    """Made by their numbers."""

    dataloader_type: str = "single"
    num_workers: int = 0
    pin_memory: bool = False
    seq_length: int = LENGTH

    def build_datasets(self, context: Any) -> Any:
        raise NotImplementedError

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, number: int) -> dict[str, Any]:
        words = torch.randint(
            WORDS, (LENGTH + 1,), generator=torch.Generator().manual_seed(int(number))
        )
        return {"number": int(number), "words": words}


class Place:
    """A loader that keeps its own place, as Energon's does."""

    def __init__(self) -> None:
        self.texts, self.place = Texts(), 0

    def __next__(self) -> dict[str, Any]:
        rows = [self.texts[self.place + i] for i in range(MICRO)]
        self.place += MICRO
        return {
            "number": torch.tensor([row["number"] for row in rows]),
            "words": torch.stack([row["words"] for row in rows]),
        }

    def save_state(self) -> int:
        return self.place

    def restore_state(self, place: int) -> None:
        self.place = place


def config(root: Path, settings: list[str]) -> Any:
    """Of a small run, with `section.key=value` laid over it, as its launchers take them."""
    made = configs.ConfigContainer(
        train=configs.TrainingConfig(
            micro_batch_size=MICRO, global_batch_size=BATCH, train_iters=20
        ),
        validation=configs.ValidationConfig(eval_iters=0),
        model=GPTModelProvider(
            num_layers=1, hidden_size=16, num_attention_heads=4, num_query_groups=2, kv_channels=4,
            ffn_hidden_size=32, seq_length=LENGTH, vocab_size=WORDS, transformer_layer_spec=layers,
            attention_dropout=0.0, hidden_dropout=0.1, cross_entropy_loss_fusion=False,
            gradient_accumulation_fusion=False, masked_softmax_fusion=False,
        ),
        optimizer=configs.OptimizerConfig(
            optimizer="adam", lr=1e-3, min_lr=1e-4, weight_decay=0.1, adam_beta1=0.9,
            adam_beta2=0.95, clip_grad=1.0, use_distributed_optimizer=True,
        ),
        scheduler=configs.SchedulerConfig(
            lr_decay_style="cosine", lr_warmup_iters=2, start_weight_decay=0.1,
            end_weight_decay=0.1,
        ),
        dataset=Texts(),
        logger=configs.LoggerConfig(log_interval=1),
        tokenizer=TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=WORDS - 1),
        checkpoint=configs.CheckpointConfig(
            save=str(root), load=str(root), save_interval=2, save_tokenizer_assets=False,
        ),
        ddp=configs.DistributedDataParallelConfig(use_distributed_optimizer=True),
        dist=configs.DistributedInitConfig(distributed_backend="gloo"),
    )  # fmt: skip
    laid: Any = OmegaConf.to_container(OmegaConf.from_dotlist(settings))
    for section, values in laid.items():
        for key, value in values.items():
            assert hasattr(getattr(made, section), key), f"{section}.{key} is no key of its config"
            setattr(getattr(made, section), key, value)
    configs.runtime_config_update(made)
    return made


def forward(state: GlobalState, data: Any, model: Any) -> Any:
    """Bridge's loss of one micro-batch."""
    batch = next(data)
    state.numbers += batch["number"].tolist()  # type: ignore[attr-defined]
    words = batch["words"]
    positions = torch.arange(LENGTH).expand(len(words), LENGTH)
    losses = model(words[:, :-1], positions, None, labels=words[:, 1:])
    return losses, partial(masked_next_token_loss, torch.ones_like(losses))


class Watch:
    """What the live optimizer uses at each update, by its number, and the samples of it."""

    def __init__(self) -> None:
        self.used: dict[int, dict[str, Any]] = {}

    def before(self, now: CallbackContext) -> None:
        """Called when nothing of the iteration has been done."""
        groups, scheduler = now.optimizer.param_groups, now.scheduler
        inner = [each.optimizer for each in now.optimizer.chained_optimizers]
        states = [state for each in inner for state in each.state.values()]
        now.state.numbers = []
        self.used[now.state.train_state.step + 1] = {
            **{key: [group[key] for group in groups]
               for key in ("lr", "betas", "eps", "weight_decay")},
            "adam_step": [group.get("step", 0) for group in groups],
            "exp_avg": _sum(state["exp_avg"] for state in states),
            "exp_avg_sq": _sum(state["exp_avg_sq"] for state in states),
            "weights": _sum(p.data for chunk in now.model for p in chunk.parameters()),
            "position": scheduler.num_steps,
            "consumed_samples": now.state.train_state.consumed_train_samples,
            "clip_grad": now.optimizer.config.clip_grad,
            "seed": torch.initial_seed(),
            "numbers": now.state.numbers,
        }  # fmt: skip


def _sum(tensors: Any) -> float:
    return float(sum(tensor.double().abs().sum() for tensor in tensors))


def run(root: Path, settings: list[str]) -> dict[int, dict[str, Any]]:
    """As `setup` and `pretrain` do, from where the manager resumes: what each update used."""
    cfg = config(root, settings)
    state = GlobalState()
    state.cfg = cfg
    init_num_microbatches_calculator(
        dist.get_rank(), cfg.train.rampup_batch_size, cfg.train.global_batch_size,
        cfg.train.micro_batch_size, cfg.data_parallel_size, cfg.train.decrease_batch_size_if_needed,
    )  # fmt: skip
    init_rerun_state(cfg.rerun_state_machine)
    groups = torch_dist_init(
        cfg.model, cfg.dist, cfg.rng, cfg.train.micro_batch_size, 1, None, None, False
    )
    tensor_parallel.model_parallel_cuda_manual_seed(cfg.rng.seed)  # it does where GPUs are
    manager = create_checkpoint_manager(cfg.checkpoint)
    model = _build_distributed_model(cfg, groups)
    cfg.model.timers = cfg.optimizer.timers = state.timers
    optimizer, scheduler = setup_optimizer(
        cfg.optimizer, cfg.scheduler, model, cfg.dist.use_gloo_process_groups, None,
        cfg.optimizer_config_override_provider,
    )  # fmt: skip
    if _should_load_checkpoint(cfg, manager):
        manager.load(CheckpointLoadContext(state, model, optimizer, scheduler))
    _update_model_config_funcs(model, cfg.model, cfg.ddp, optimizer, pg_collection=groups)
    made = Place() if cfg.dataset.dataloader_type == "external" else cfg.dataset
    data, _, _ = setup_data_iterators(
        cfg, state.train_state, len(model), lambda *_: (made, None, None), groups.dp
    )
    if state.train_state.step > 0:
        saved = manager.checkpointing_context.get("dataloader_state_dir")
        maybe_load_dataloader_state(data, state.train_state.step, saved, pg_collection=groups)
    watch, calls = Watch(), CallbackManager()
    calls.register("on_train_step_start", watch.before)
    with suppress(SystemExit):  # which is how it ends at exit_interval
        train(
            forward, model, optimizer, scheduler, data, None, state, manager, groups,
            callback_manager=calls,
        )  # fmt: skip
    return watch.used
