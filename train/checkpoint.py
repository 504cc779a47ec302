"""Checkpoints: DeepSpeed's own, with Megatron-DeepSpeed's client state and both pointer files."""

from __future__ import annotations

import argparse
import random
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .config import Config
from .course import Course
from .device import device_kind
from .errors import RankError, TrainError
from .grid import Grid
from .optimizer import live_clip_grad, live_optimizer, live_scaler, without_prints
from .precision import masters_as_truth, saved_dtype
from .progress import Progress
from .run_folder import LATEST
from .shards import check_sizes, missing, model_states
from .universal import check_target, mend_zero_3, names_as_saved
from .universal_source import is_universal

SHAPE = (
    "num_layers", "hidden_size", "num_attention_heads", "seq_length", "padded_vocab_size",
    "ffn_hidden_size", "embed_layernorm", "untie_embeddings", "zero_stage",
    "optimizer", "split", "position_embedding_type", "normalization", "num_query_groups", "swiglu",
    "add_bias_linear", "normformer",
)  # fmt: skip
"""Arguments that a run can't continue without: its files hold exactly this."""
LAUNCH = (
    "activation_fn", "attention", "hidden_dropout", "attention_dropout", "skip_grad_norm",
    "gradient_predivide_factor", "embedding_dropout", "scale_embeddings", "rotary_base",
    "eod_token", "reset_attention_mask", "reset_position_ids",
)  # fmt: skip
"""Arguments that are free to change at a restart; the checkpoint keeps what it was made with."""


def save_checkpoint(
    engine: Any, config: Config, grid: Grid, progress: Progress, course: Course, folder: str
) -> None:
    """Write every rank's shards into this folder of the run; no pointer names it yet."""
    state = client_state(engine, config, grid, progress, course)
    engine.save_checkpoint(config.save, tag=folder, client_state=state, save_latest=False)


def client_state(
    engine: Any, config: Config, grid: Grid, progress: Progress, course: Course
) -> dict[str, Any]:
    """What the trainer adds, at top level, to every model_states file."""
    state: dict[str, Any] = {
        "trainer": "ckptsurgeon",
        "iteration": progress.iteration,
        "tokens": progress.tokens,
        "updates": progress.updates,
        "clipped_updates": progress.clipped_updates,
        **course.as_saved(),
        "checkpoint_version": 3.0,
        "checkpoint_info": {
            "padded_vocab_size": config.padded_vocab_size,
            "original_vocab_size": config.vocab_size,
        },
        "args": megatron_args(engine, config, grid, progress, course.seed),
        "random_rng_state": random.getstate(),
        "np_rng_state": np.random.get_state(),
        "torch_rng_state": torch.get_rng_state(),
        "rng_tracker_states": {},
    }
    if device_kind() == "cuda":
        state["cuda_rng_state"] = torch.cuda.get_rng_state()
    return state


def megatron_args(
    engine: Any, config: Config, grid: Grid, progress: Progress, seed: int
) -> argparse.Namespace:
    """Megatron's argument names with the values that are in force, not those of the config."""
    schedule = engine.lr_scheduler
    group = live_optimizer(engine).param_groups[0]
    beta1, beta2 = group.get("betas", (None, None))
    return argparse.Namespace(
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_attention_heads,
        seq_length=config.seq_length,
        max_position_embeddings=config.seq_length,
        padded_vocab_size=config.padded_vocab_size,
        make_vocab_size_divisible_by=config.make_vocab_size_divisible_by,
        tokenizer_type=config.tokenizer_type,
        untie_embeddings=config.untie_embeddings,
        ffn_hidden_size=config.ffn_size,
        init_method_std=config.init_std,
        position_init=config.position_init,
        embed_layernorm=config.embed_layernorm,
        position_embedding_type=config.position_embedding_type,
        normalization=config.normalization,
        num_query_groups=config.num_query_groups,
        swiglu=config.swiglu,
        normformer=config.normformer,
        add_bias_linear=config.add_bias_linear,
        layernorm_epsilon=config.layernorm_epsilon,
        **{key: getattr(config, key) for key in LAUNCH},
        global_batch_size=config.global_batch_size,
        micro_batch_size=config.micro_batch_size,
        rampup_batch_size=config.rampup_batch_size,
        lr=schedule.max_lr,
        min_lr=schedule.min_lr,
        lr_decay_style=schedule.decay_style,
        lr_warmup_samples=schedule.warmup_steps,
        lr_decay_samples=schedule.decay_steps,
        lr_wsd_decay_samples=schedule.wsd_decay_steps,
        lr_wsd_decay_style=schedule.lr_wsd_decay_style,
        optimizer=config.optimizer,
        sgd_momentum=group.get("momentum"),
        adam_beta1=beta1,
        adam_beta2=beta2,
        adam_eps=group.get("eps"),
        weight_decay=float(group["weight_decay"]),
        clip_grad=live_clip_grad(engine),
        seed=seed,
        train_iters=config.train_iters,
        save_interval=config.save_interval,
        log_interval=config.log_interval,
        eval_interval=config.eval_interval,
        eval_iters=config.eval_iters,
        split=config.split,
        iteration=progress.iteration,
        consumed_train_samples=progress.samples,
        consumed_valid_samples=progress.valid_samples,
        consumed_train_tokens=progress.tokens,
        gigaflos_no_embeds=float(progress.gigaflos),
        zero_stage=config.zero_stage,
        bf16=config.dtype == "bf16",
        fp16=config.dtype == "fp16",
        grad_accum_dtype=config.grad_accum_dtype if config.dtype == "bf16" else config.dtype,
        initial_loss_scale=config.initial_loss_scale,
        **live_scaler(engine),
        tensor_model_parallel_size=grid.tensor_size,
        pipeline_model_parallel_size=grid.pipeline_size,
        data_parallel_size=grid.data_size,
        checkpoint_activations=config.checkpoint_activations,
        save=config.save,
        data_path=config.data,
    )


def read_client_state(checkpoint: Path, config: Config, grid: Grid) -> dict[str, Any]:
    """The first model_states file without its tensors' bytes (they stay on disk, mapped).

    Raises TrainError, on every rank, when shards are missing, or when config and ranks can't
    continue it.
    """
    path = checkpoint / model_states(config.zero_stage)
    if not path.is_file():
        raise _unusable(checkpoint, f"{path.name} is missing")
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", mmap=True, weights_only=False)
    except Exception as e:
        raise _unusable(checkpoint, f"{path.name} can't be read: {_first_line(e)}") from e
    lacking = [k for k in ("trainer", "args", "iteration", "lr_scheduler") if k not in state]
    if lacking:
        raise _unusable(checkpoint, f"{path.name} has no {', '.join(lacking)}")
    args = state["args"]
    dtype = saved_dtype(args)
    wanted = {key: getattr(config, key) for key in SHAPE} | {"ffn_hidden_size": config.ffn_size}
    saved = {key: getattr(args, key, wanted[key]) for key in SHAPE}  # older ones lack some
    for key in SHAPE:
        if saved[key] != wanted[key]:
            raise _cannot_continue(checkpoint, key, saved[key], wanted[key])
    if is_universal(checkpoint):
        check_target(checkpoint, args, grid)
        return state
    theirs, ours = getattr(args, "grad_accum_dtype", dtype), config.grad_accum_dtype
    if (
        dtype == config.dtype and config.zero_stage == 1 and ours not in ("auto", theirs)
    ):  # another wrapper, other files
        raise _cannot_continue(checkpoint, "grad_accum_dtype", theirs, ours)
    absent = missing(checkpoint, args)
    if absent:
        raise _unusable(checkpoint, f"{', '.join(absent)} missing")
    check_sizes(checkpoint, args, grid)
    return state


def load_checkpoint(engine: Any, checkpoint: Path, state: dict[str, Any]) -> None:
    """Load weights, optimizer and scheduler into the live engine; `state` is what
    `read_client_state` has returned of it. Raises RankError."""
    args = state["args"]
    universal = is_universal(checkpoint)
    names = names_as_saved(engine, checkpoint, args) if universal else nullcontext()
    same = engine.bfloat16_enabled() == args.bf16 and engine.fp16_enabled() == args.fp16
    masters = nullcontext() if same else masters_as_truth(engine, state)
    try:
        with torch.no_grad(), names, without_prints(), masters:
            loaded, _ = engine.load_checkpoint(str(checkpoint.parent), tag=checkpoint.name)
    except Exception as e:
        what = f"rank {engine.global_rank} can't load it: {_first_line(e)}"
        raise _unusable(checkpoint, what, RankError) from e
    if loaded is None:
        raise _unusable(checkpoint, "DeepSpeed found nothing to load")
    if universal and engine.zero_optimization_stage() == 3:
        mend_zero_3(engine, checkpoint)


def restore_rng(state: dict[str, Any]) -> None:
    """Put the random generators where the checkpoint left them."""
    random.setstate(state["random_rng_state"])
    np.random.set_state(state["np_rng_state"])
    torch.set_rng_state(state["torch_rng_state"])
    if device_kind() == "cuda" and "cuda_rng_state" in state:
        torch.cuda.set_rng_state(state["cuda_rng_state"])


def _first_line(error: Exception) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0]


def _cannot_continue(checkpoint: Path, key: str, saved: object, wanted: object) -> TrainError:
    return TrainError(
        f"{checkpoint}: {key} is {saved}, the config says {wanted}",
        next=f"set {key}={saved} to continue this run, or another save=DIR for a new one",
        untouched="the checkpoint is as it was",
    )


def _unusable(checkpoint: Path, what: str, kind: type[TrainError] = TrainError) -> TrainError:
    others = sorted(
        (p.name for p in checkpoint.parent.glob("global_step*") if p != checkpoint),
        key=lambda name: (len(name), name),
    )
    hint = f"point {LATEST} at another one: {', '.join(others[-3:])}" if others else "restore it"
    return kind(f"{checkpoint}: {what}", next=hint, untouched="the checkpoint is as it was")
