"""Makes DeepSpeed's step read the gradients twice: once for norm and overflow, once to step.

DeepSpeed looks for overflow, takes the norm, converts, unscales, clips, steps and copies to 16 bit
in passes of their own. Here its step is replaced on the live engine, where it is one that this
module knows; in every other case DeepSpeed's own runs, on the same optimizer, with the same result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.utils import all_gather_dp_groups
from deepspeed.runtime.zero.stage_1_and_2 import INITIAL_MICRO_STEP_ID, DeepSpeedZeroOptimizer
from torch import Tensor

from .feed import Feed, joined
from .fused_adamw import FusedAdamW
from .grad_norm import norm_check
from .grid import Grid
from .wide_gradients import widen

KNOWN = "0.19."  # the DeepSpeed whose steps these are
EPSILON = 1e-6  # what DeepSpeed adds to a norm before it divides by it


def fuse(engine: Any, grid: Grid) -> bool:
    """Replace the step of this engine, which has a FusedAdamW; False if DeepSpeed's own stays."""
    if not deepspeed.__version__.startswith(KNOWN):
        return False
    wrapper = engine.optimizer
    if type(wrapper) is DeepSpeedZeroOptimizer and _plain_zero(wrapper):
        _replace(wrapper, lambda: _zero_step(wrapper, grid))
    elif type(wrapper) is BF16_Optimizer and _plain_bf16(wrapper):
        runs = [_runs(wrapper, group, grid) for group in range(len(wrapper.bf16_groups))]
        _replace(wrapper, lambda: _bf16_step(wrapper, runs))
        widen(engine)
    elif type(wrapper) is FP16_UnfusedOptimizer and wrapper.mpu is None:
        _replace(wrapper, lambda: _unfused_step(wrapper))
    elif type(wrapper) is FusedAdamW:
        wrapper.counts = grid.counts
        engine.clip_fp32_gradients = lambda: _clip(engine)
    else:
        return False
    return True


def _replace(wrapper: Any, fused: Callable[[], bool]) -> None:
    stock, without_grad = wrapper.step, torch.no_grad()(fused)

    def step(closure: None = None) -> Any:
        return wrapper.overflow if without_grad() else stock(closure)

    wrapper.step = step


def _plain_zero(zero: Any) -> bool:
    return (
        not (zero.cpu_offload or zero.has_moe_layers or zero.zenflow)
        and getattr(zero, "compute_grad_norm", True)  # 0.19.6 always does
        and hasattr(zero, "_release_preflattened_grad_buffers")  # 0.19.0 has none
        and zero.torch_autocast_gradscaler is None
        and all(flat.dtype == torch.float32 for flat in zero.single_partition_of_fp32_groups)
    )


def _zero_step(zero: Any, grid: Grid) -> bool:
    """ZeRO 1 and 2: `deepspeed/runtime/zero/stage_1_and_2.py`, `step`. False: nothing was done,
    because a gradient is not finite; then DeepSpeed decides what that means."""
    groups = range(len(zero.bit16_groups))
    feeds = [_zero_feed(zero, i, grid) for i in groups]
    check = _check(feeds, zero.single_partition_of_fp32_groups[0].device)
    dist.all_reduce(check, group=zero.dp_process_group)
    zero._model_parallel_all_reduce(tensor=check, op=dist.ReduceOp.SUM)
    norm = _norm(zero.optimizer, check, zero.dtype == torch.float16)
    if norm is None:
        return False
    optimizer = zero.optimizer
    zero.micro_step_id = INITIAL_MICRO_STEP_ID
    zero.overflow = False
    zero._global_grad_norm = norm / zero.loss_scale
    zero._update_scale(False)
    # As DeepSpeed does: from here on with the scale of the next step.
    optimizer.grad_mul = _multiplier(norm, zero.loss_scale, zero.clip_grad)
    optimizer.feeds = dict(zip(zero.single_partition_of_fp32_groups, feeds, strict=True))
    optimizer.step()
    optimizer.forget_feeds()  # for when a wrapper of its step has left it out
    zero._lazy_init_hp_params_optimizer_state()
    for i in groups:
        zero.free_grad_in_param_list(zero.params_not_in_partition[i])
        zero.free_grad_in_param_list(zero.params_in_partition[i])
        zero._release_preflattened_grad_buffers(i)
        zero.averaged_gradients[i] = None
        zero.all_grad_tensors[i] = None
    all_gather_dp_groups(
        groups_flat=zero.bit16_groups_flat,
        partitioned_param_groups=zero.parallel_partitioned_bit16_groups,
        dp_process_group=zero.real_dp_process_group,
        start_alignment_factor=zero.nccl_start_alignment_factor,
        allgather_bucket_size=zero.allgather_bucket_size,
    )
    return True


def _zero_feed(zero: Any, group: int, grid: Grid) -> Feed:
    """This rank's partition of one param group; padding, which is zero, is counted nowhere."""
    pieces = list(zero.averaged_gradients[group])
    parameters = iter(zero.params_in_partition[group])
    counted = []
    for piece in pieces:
        padding = getattr(piece, "_zero_padding", False)
        # Padding that is not marked lies behind the last parameter.
        parameter = None if padding else next(parameters, None)
        counted.append(parameter is not None and grid.counts(parameter))
    rank = dist.get_rank(group=zero.real_dp_process_group[group])
    return joined(pieces, counted, zero.parallel_partitioned_bit16_groups[group][rank])


def _check(feeds: Sequence[Feed], device: torch.device) -> Tensor:
    """[sum of squares of what is counted here, number of inf and nan in all] of this rank."""
    pieces = [pair for feed in feeds for pair in zip(feed.pieces, feed.counted, strict=True)]
    check = norm_check([piece for piece, counted in pieces if counted], device)
    others = [piece for piece, counted in pieces if not counted]
    if others:
        check[1] += norm_check(others, device)[1]
    return check


def _plain_bf16(wrapper: Any) -> bool:
    return (
        wrapper.using_real_optimizer
        and not wrapper.has_moe_layers
        and wrapper.grad_acc_dtype == torch.float32
        and not wrapper.immediate_grad_update
    )


def _runs(wrapper: Any, group: int, grid: Grid) -> list[tuple[int, int, bool]]:
    """[start, end) in this rank's partition of one group, and whether it is counted here."""
    size = wrapper.fp32_groups_flat_partition[group].numel()
    first = size * dist.get_rank(group=wrapper.real_dp_process_group[group])
    runs: list[tuple[int, int, bool]] = []
    end = 0
    for parameter in wrapper.bf16_groups[group]:
        begin, end = end, end + parameter.numel()
        start, stop, counted = max(begin - first, 0), min(end - first, size), grid.counts(parameter)
        if start < stop:
            if runs and runs[-1][2] == counted:
                start = runs.pop()[0]
            runs.append((start, stop, counted))
    done = runs[-1][1] if runs else 0
    return [*runs, (done, size, False)] if done < size else runs  # padding


def _bf16_step(wrapper: Any, runs: Sequence[Sequence[tuple[int, int, bool]]]) -> bool:
    """bf16 with gradients in float32: `deepspeed/runtime/bf16_optimizer.py`, `step`. False as
    above."""
    masters = wrapper.fp32_groups_flat_partition
    feeds = []
    for group, gradient in enumerate(wrapper.fp32_groups_gradient_flat_partition):
        rank = dist.get_rank(group=wrapper.real_dp_process_group[group])
        out = wrapper.bf16_partitioned_groups[group][rank]
        pieces = [gradient[start:end] for start, end, _ in runs[group]]
        feeds.append(Feed(pieces, [counted for _, _, counted in runs[group]], out))
    check = _check(feeds, masters[0].device)
    dist.all_reduce(check, group=wrapper.dp_process_group)
    if wrapper.mpu is not None:
        dist.all_reduce(check, group=wrapper.mpu.get_model_parallel_group())
    norm = _norm(wrapper.optimizer, check, False)
    if norm is None:
        return False
    optimizer = wrapper.optimizer
    wrapper.overflow = False
    wrapper._global_grad_norm = norm
    optimizer.grad_mul = _multiplier(norm, 1.0, wrapper.clip_grad)
    optimizer.feeds = dict(zip(masters, feeds, strict=True))
    optimizer.step()
    optimizer.forget_feeds()
    wrapper._lazy_init_hp_params_optimizer_state()
    all_gather_dp_groups(
        groups_flat=wrapper.bf16_groups_flat,
        partitioned_param_groups=wrapper.bf16_partitioned_groups,
        dp_process_group=wrapper.real_dp_process_group,
        start_alignment_factor=wrapper.nccl_start_alignment_factor,
        allgather_bucket_size=wrapper.allgather_bucket_size,
    )
    wrapper.clear_hp_grads()
    return True


def _unfused_step(wrapper: Any) -> bool:
    """16 bit without ZeRO: `deepspeed/runtime/fp16/unfused_optimizer.py`, `step`. False as above,
    and for a parameter without a gradient."""
    low = [p for group in wrapper.fp16_groups for p in group]
    masters = [p for group in wrapper.fp32_groups for p in group]
    gradients = [p.grad for p in low if p.grad is not None]
    if len(gradients) < len(low):
        return False
    check = norm_check(gradients, masters[0].device)
    norm = _norm(wrapper.optimizer, check, wrapper.low_precision_dtype == torch.float16)
    if norm is None:
        return False
    optimizer = wrapper.optimizer
    wrapper.overflow = False
    wrapper._global_grad_norm = norm
    wrapper._update_scale(False)
    scale = wrapper.loss_scale_config.cur_scale
    optimizer.grad_mul = _multiplier(norm, scale, wrapper.clip_grad)
    for p, master, gradient in zip(low, masters, gradients, strict=True):
        optimizer.feeds[master] = Feed([gradient], [True], p)
    optimizer.step()
    optimizer.forget_feeds()
    return True


def _norm(optimizer: FusedAdamW, check: Tensor, scaled: bool) -> float | Tensor | None:
    """The norm of gradients with this sum of squares and number of inf and nan.

    The host waits for it only where it must know at once: a loss scale depends on it, and a first
    step, which makes the moments, could not be taken back; None when there are any inf and nan.
    Elsewhere it stays on the device, infinite when there are any, and `Step.settle` looks."""
    optimizer.grad_norm = None
    if scaled or not optimizer.state:
        squared, nonfinite = check.tolist()
        return None if nonfinite else math.sqrt(squared)
    optimizer.grad_norm = torch.where(check[1] > 0, math.inf, check[0].sqrt())
    return optimizer.grad_norm


def _multiplier(norm: float | Tensor, scale: float, clip_grad: float) -> float | Tensor:
    """What unscales the gradients and clips them to the norm `clip_grad`, unless that is 0; where
    they are not to be used it is negative."""
    if isinstance(norm, Tensor):
        ratio = (norm + EPSILON) / clip_grad if clip_grad > 0 else torch.ones_like(norm)
        return torch.where(norm.isinf(), -1.0, 1 / ratio.clamp(min=1.0)).float()
    if clip_grad <= 0:
        return 1 / scale
    return 1 / (max((norm / scale + EPSILON) / clip_grad, 1.0) * scale)


def _clip(engine: Any) -> None:
    """float32 without ZeRO: what the engine does before it steps, with the norm that `Step` has
    taken, and without waiting for it. A norm that is not finite makes the weights nan, as it does
    in DeepSpeed."""
    ratio = engine.gradient_clipping() / (engine.optimizer.grad_norm + EPSILON)
    engine.optimizer.grad_mul = ratio.clamp(max=1.0).float()  # nan stays
