"""The optimizer with Megatron's two param groups, inside a DeepSpeed engine."""

from __future__ import annotations

import io
import math
from contextlib import redirect_stdout
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.utils import logger
from torch import nn

from .adam_8bit import adamw_8bit
from .config import Config
from .device import device_kind
from .errors import TrainError
from .fused_adamw import FusedAdamW
from .fused_step import fuse
from .grid import Grid
from .kernels import load
from .lamb import LAMB, Fragment
from .microbatches import BatchSizes
from .schedule import AnnealingLR
from .sgdw import SGDW

BUCKET = 500_000_000
"""DeepSpeed's own size of the buckets in which gradients are reduced, in elements."""

logger.addFilter(lambda record: "untested optimizer" not in record.getMessage())
"""DeepSpeed warns of every optimizer that is not on its list; the tests hold ours at each stage."""


def param_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Matrices decay; biases and LayerNorm parameters do not."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    return [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]


def make_optimizer(config: Config, model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of this config, at lr 0: the scheduler sets the rate, and the step that
    DeepSpeed takes at construction must change nothing."""
    groups = param_groups(model, config.weight_decay)
    betas = (config.adam_beta1, config.adam_beta2)
    if config.optimizer == "sgdw":
        return SGDW(groups, lr=0.0, momentum=config.sgd_momentum)
    if config.optimizer == "lamb":
        groups[1]["layer_adaptation"] = False
        return LAMB(groups, lr=0.0, betas=betas, eps=config.adam_eps)
    if config.optimizer == "adamw8bit":
        return adamw_8bit(groups, betas, config.adam_eps)
    native = config.fused_optimizer == "auto" and load() is None
    if native or config.fused_optimizer == "always":
        return FusedAdamW(groups, lr=0.0, betas=betas, eps=config.adam_eps)
    # On a GPU whose kernels can't be compiled, torch's own fused one is the next best.
    fused = True if config.fused_optimizer == "auto" and device_kind() == "cuda" else None
    return torch.optim.AdamW(groups, lr=0.0, betas=betas, eps=config.adam_eps, fused=fused)


def keep_implementation(optimizer: torch.optim.Optimizer, fused: bool | None) -> None:
    """After a load: a param group that was saved elsewhere must not choose how this one steps."""
    if type(optimizer) is torch.optim.AdamW:
        for group in optimizer.param_groups:
            group["fused"] = fused


def build_engine(
    config: Config, model: nn.Module, sizes: BatchSizes, grid: Grid, universal: bool = False
) -> Any:
    """The DeepSpeed engine with a fresh optimizer (no moments, Adam step 0) and scheduler.

    It loads ordinary checkpoints or, with `universal`, universal ones."""
    optimizer = make_optimizer(config, model)
    if config.dtype == "fp16":
        allow_fp16()

    def scheduler(inner: Any) -> AnnealingLR:
        return AnnealingLR(
            inner,
            max_lr=config.lr,
            min_lr=config.min_lr,
            warmup_steps=config.lr_warmup_samples,
            decay_steps=config.decay_samples,
            decay_style=config.lr_decay_style,
            wsd_decay_steps=config.lr_wsd_decay_samples,
            lr_wsd_decay_style=config.lr_wsd_decay_style,
        )

    with without_prints():
        engine, _, _, _ = deepspeed.initialize(
            model=model,
            optimizer=optimizer,
            lr_scheduler=scheduler,
            mpu=grid.mpu if grid.pipeline_size == 1 else None,  # a pipeline has its own
            config={
                **deepspeed_config(config, sizes, sum(p.numel() for p in model.parameters())),
                "checkpoint": {"load_universal": universal},
            },
        )
    # Without ZeRO, DeepSpeed's 16-bit wrapper runs one step on zero gradients to allocate its
    # state, which would count as Adam step 1.
    optimizer.state.clear()
    if isinstance(optimizer, FusedAdamW):
        optimizer.take_sums()
        fuse(engine, grid)
    if isinstance(optimizer, LAMB):
        tell_partitions(optimizer, engine, grid)
    return engine


def without_prints() -> redirect_stdout[io.StringIO]:
    """Inside, nothing is printed: the wrapper for bf16 tells its use of memory in 20 lines. What is
    wrong is logged or raised."""
    return redirect_stdout(io.StringIO())


def allow_fp16() -> None:
    """Let DeepSpeed train in fp16 on a CPU whose instruction set lacks it: torch computes in fp32
    there and rounds, so every overflow and underflow is fp16's."""
    accelerator = get_accelerator()
    if not accelerator.is_fp16_supported():
        accelerator.is_fp16_supported = lambda: True


def tell_partitions(optimizer: LAMB, engine: Any, grid: Grid) -> None:
    """Tell LAMB which parameters lie where in the tensors that DeepSpeed gives it, and whose
    squares it must sum over which ranks. Raises TrainError when this DeepSpeed does not know."""
    wrapper = engine.optimizer
    tensor = [grid.tensor_group] if grid.tensor_size > 1 else []

    def counted(parameter: nn.Parameter) -> bool:
        return grid.tensor_rank == 0 or hasattr(parameter, "partition_dim")

    try:
        if engine.zero_optimization():
            # `deepspeed/runtime/zero/stage_1_and_2.py` links these for its own checkpoints.
            if isinstance(wrapper, BF16_Optimizer):
                flats, groups_of = wrapper.fp32_groups_flat_partition, wrapper.bf16_groups
            else:
                flats, groups_of = wrapper.single_partition_of_fp32_groups, wrapper.bit16_groups
            for i, flat in enumerate(flats):
                parameters = groups_of[i]
                fragments = [
                    Fragment(index, address.start, address.numel, counted(parameter))
                    for index, parameter in enumerate(parameters)
                    if parameter._hp_mapping is not None
                    for address in [parameter._hp_mapping.get_hp_fragment_address()]
                ]
                groups = [wrapper.real_dp_process_group[i], *tensor]
                optimizer.set_partition(flat, fragments, len(parameters), groups)
        elif tensor:
            own = getattr(wrapper, "fp16_groups", [g["params"] for g in optimizer.param_groups])
            for group, models in zip(optimizer.param_groups, own, strict=True):
                for p, model in zip(group["params"], models, strict=True):
                    whole = Fragment(0, 0, p.numel(), counted(model))
                    optimizer.set_partition(p, [whole], 1, tensor)
    except AttributeError as e:
        raise TrainError(
            f"DeepSpeed {deepspeed.__version__} does not tell LAMB its partitions: {e}",
            next="zero_stage=0, optimizer=adamw, or DeepSpeed 0.19",
        ) from None


def deepspeed_config(config: Config, sizes: BatchSizes, parameters: int) -> dict[str, Any]:
    """What DeepSpeed is told of a model of so many parameters on this rank."""
    first = sizes.at(0)
    # DeepSpeed obeys the factor only where it reduces whole gradients: with reduce_scatter it
    # ignores it at stage 1 and asserts at 2 and 3.
    whole = config.gradient_predivide_factor != 1.0
    settings: dict[str, Any] = {
        "train_batch_size": first,
        "train_micro_batch_size_per_gpu": sizes.micro_batch_size,
        "gradient_accumulation_steps": sizes.micro_batches(first),
        "zero_optimization": {
            "stage": config.zero_stage,
            # On one data rank DeepSpeed would look for each parameter's owner in vain.
            "reduce_scatter": not whole and (sizes.ranks > 1 or config.zero_stage == 3),
            # DeepSpeed allocates a bucket whole; a small model needs one of its own size.
            "reduce_bucket_size": min(BUCKET, parameters),
            "overlap_comm": overlaps(config, sizes.ranks),
        },
        "gradient_predivide_factor": config.gradient_predivide_factor,
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": config.clip_grad,
        "bf16": {"enabled": config.dtype == "bf16"},
        "fp16": {
            "enabled": config.dtype == "fp16",
            "loss_scale": config.loss_scale or 0,  # DeepSpeed's 0 is dynamic
            "initial_scale_power": round(math.log2(config.initial_loss_scale)),
            "loss_scale_window": config.loss_scale_window,
            "hysteresis": config.hysteresis,
            "min_loss_scale": config.min_loss_scale,
        },
        "steps_per_print": None,
        # It would wait for the GPU in each forward pass and each step.
        "timers": {"throughput": {"enabled": False, "synchronized": False}},
    }
    if config.dtype == "bf16" and config.grad_accum_dtype == "fp32":
        settings["data_types"] = {"grad_accum_dtype": "fp32"}
        settings["communication_data_type"] = "fp32"  # else it rounds before it reduces
    return settings


def overlaps(config: Config, data_ranks: int) -> bool:
    """Whether DeepSpeed reduces gradients while the backward pass goes on."""
    if config.zero_stage not in (1, 2) or config.pipeline_model_parallel_size > 1:
        return False
    if config.overlap_comm is not None:
        return config.overlap_comm
    return data_ranks > 1 and device_kind() == "cuda"


def live_clip_grad(engine: Any) -> float:
    """The clipping norm that the next step will use: the wrapper's own, else the engine's."""
    return float(getattr(engine.optimizer, "clip_grad", engine.gradient_clipping()))


def set_clip_grad(engine: Any, value: float) -> None:
    """Change the clipping of a live engine, for checkpoints whose shards do not carry it."""
    engine._config.gradient_clipping = value
    if hasattr(engine.optimizer, "clip_grad"):
        engine.optimizer.clip_grad = value


def live_loss_scale(engine: Any) -> float:
    """The scale the loss is multiplied by at the next step; 1.0 without loss scaling."""
    optimizer = engine.optimizer
    scale = getattr(optimizer, "loss_scale", None)
    if scale is None:
        scaler = getattr(optimizer, "loss_scale_config", None)
        scale = 1.0 if scaler is None else scaler.cur_scale
    return float(scale)


def live_scaler(engine: Any) -> dict[str, float | None]:
    """The fp16 loss scaler's settings in force, by their names in the config; {} without one.

    `loss_scale` is None when it is dynamic. Without ZeRO there is no hysteresis."""
    optimizer = engine.optimizer
    scaler = getattr(optimizer, "loss_scaler", None) or getattr(
        optimizer, "loss_scale_config", None
    )
    if not engine.fp16_enabled() or scaler is None:
        return {}
    if not getattr(scaler, "dynamic", False) and not getattr(scaler, "dynamic_loss_scale", False):
        return {"loss_scale": float(scaler.cur_scale)}
    least = scaler.min_scale if hasattr(scaler, "min_scale") else scaler.min_loss_scale
    settings = {
        "loss_scale": None,
        "min_loss_scale": least,
        "loss_scale_window": scaler.scale_window,
    }
    if hasattr(scaler, "delayed_shift"):
        settings["hysteresis"] = scaler.delayed_shift
    return settings


def live_adam_step(engine: Any) -> int:
    """The largest step counter in this rank's live optimizer state; 0 when there is none."""
    states = live_optimizer(engine).state.values()
    return max((int(s["step"]) for s in states if "step" in s), default=0)


def live_optimizer(engine: Any) -> Any:
    """The torch optimizer inside DeepSpeed's wrapper, or itself when there is no wrapper."""
    return getattr(engine.optimizer, "optimizer", engine.optimizer)
