"""One optimizer step of a DeepSpeed engine: its gradient norm, and whether it is left out."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from . import pipeline
from .config import Config
from .errors import TrainError
from .fused_adamw import ZEROS, FusedAdamW, Statistics, merge, statistics
from .grad_norm import raw_grad_norm
from .grid import Grid
from .optimizer import live_loss_scale, live_optimizer
from .padding import padding


class Step:
    """Backward passes and steps of one engine.

    With `skip_grad_norm` a step whose norm (before clipping) is above it changes neither weights
    nor moments nor the schedule, and DeepSpeed counts it among its skipped steps, as it does one
    whose fp16 gradients overflowed. The loss scale takes such a step for a good one.
    """

    def __init__(self, engine: Any, config: Config, grid: Grid) -> None:
        self._engine, self._grid = engine, grid
        self._zero, self._fp16 = config.zero_stage > 0, config.dtype == "fp16"
        self._wrapped = self._zero or config.dtype != "fp32"
        self._norm, self._scale, self._schedule = torch.zeros(()), 1.0, (0, 0)
        if config.skip_grad_norm:
            self._leave_out_above(config.skip_grad_norm)

    def backward(self, loss: Tensor) -> None:
        """Accumulate the gradients of one micro-batch.

        Without ZeRO, DeepSpeed divides fp16 gradients by the loss scale but does not multiply the
        loss (its pull request 8393): the gradient that enters the loss is set here, so that it is
        right with and without that change."""
        if self._fp16 and not self._zero:
            share = live_loss_scale(self._engine) / self._engine.gradient_accumulation_steps()
            loss.register_hook(  # type: ignore[no-untyped-call]
                lambda gradient: torch.full_like(gradient, share)
            )
        self._engine.backward(loss)

    def take(self, **lr_kwargs: Any) -> float | Tensor:
        """After the last micro-batch, update the weights and return the norm of the gradients for
        `settle`, on the device where nothing has waited for it; after the others, return 0.

        Raises TrainError when they overflowed at the smallest loss scale."""
        engine = self._engine
        if not engine.is_gradient_accumulation_boundary():
            engine.step()
            return 0.0
        self._look()
        with self._divergence_told():
            engine.step(lr_kwargs=lr_kwargs)
        return self._norm if not self._wrapped else engine.optimizer._global_grad_norm

    def settle(self, norm: float) -> float:
        """The norm of the last step, infinite when its gradients overflowed. Where only the device
        knew it, and left weights and moments as they were, the host takes back what it counted."""
        if not self._wrapped:
            return norm
        norm = self._as_told(norm)
        engine, optimizer = self._engine, live_optimizer(self._engine)
        late = isinstance(optimizer, FusedAdamW) and optimizer.grad_norm is not None
        if late and math.isinf(norm) and not engine.optimizer.overflow:
            optimizer.untake()
            engine.optimizer.overflow = True
            engine.skipped_steps += 1
            schedule = engine.lr_scheduler
            schedule.num_steps, schedule.num_tokens = self._schedule
            schedule.step(0)
        return norm

    def run_pipeline(
        self,
        micro_batches: Iterable[pipeline.MicroBatch],
        before_forward: Callable[[int], None],
        **lr_kwargs: Any,
    ) -> tuple[float, float]:
        """All micro-batches and the step of a pipeline: the mean loss and the gradient norm.

        `before_forward` is called, on every stage, with the number of each micro-batch. Raises
        TrainError as `take` does."""
        with self._divergence_told():
            loss = pipeline.train_batch(
                self._engine, micro_batches, before_forward, self._look, lr_kwargs
            )
        return float(loss), self.settle(self._live_norm())

    def _look(self) -> None:
        """Note what the step will change: the loss scale, where the schedule stands and, without a
        wrapper, the gradients."""
        self._scale = live_loss_scale(self._engine)
        schedule = self._engine.lr_scheduler
        self._schedule = schedule.num_steps, schedule.num_tokens
        if not self._wrapped:
            self._norm = raw_grad_norm(self._engine.module, self._grid)
            optimizer = live_optimizer(self._engine)
            if isinstance(optimizer, FusedAdamW):
                optimizer.grad_norm = self._norm

    @contextmanager
    def _divergence_told(self) -> Iterator[None]:
        try:
            yield
        except Exception as e:
            # DeepSpeed has no class of its own for it.
            if "loss scale already at minimum" not in str(e):
                raise
            raise TrainError(
                f"the fp16 gradients overflow at the smallest loss scale, {self._scale:g}: "
                "the run has diverged",
                next="ckptsurgeon rollback --to N --set lr=… --reset loss_scale",
                untouched="the checkpoints are as they were",
            ) from e

    def _live_norm(self) -> float:
        """Of the gradients that the step in progress, or the last one, has used."""
        if not self._wrapped:
            return float(self._norm)
        return self._as_told(float(self._engine.optimizer._global_grad_norm))

    def _as_told(self, norm: float) -> float:
        if norm < 0:  # what DeepSpeed makes of NaN
            return math.inf
        return norm if self._zero else norm / self._scale

    def _leave_out_above(self, limit: float) -> None:
        inner, outer = live_optimizer(self._engine), self._engine.optimizer
        update = inner.step

        def limited(*arguments: Any, **keywords: Any) -> Any:
            # The engine counts what has overflowed, and leaves the schedule where it is.
            outer.overflow = not self._live_norm() <= limit
            return None if outer.overflow else update(*arguments, **keywords)

        inner.step = limited


def take_statistics(engine: Any, grid: Grid, parameters: int) -> Statistics | None:
    """Of the last step over all ranks of a model of so many parameters; all must call it. None for
    another optimizer, and with ZeRO 3 on tensor ranks: its flat slices do not tell which weights
    another rank holds too."""
    optimizer = live_optimizer(engine)
    if not isinstance(optimizer, FusedAdamW):
        return None
    sums = optimizer.take_sums().to(engine.device)
    if engine.zero_optimization_stage() == 3:
        if grid.tensor_size > 1:
            return None
        sums[ZEROS] -= padding(engine)
    group = dist.group.WORLD if engine.zero_optimization_stage() else grid.model_group
    if group is not None and dist.get_world_size(group) > 1:
        rows = [torch.empty_like(sums) for _ in range(dist.get_world_size(group))]
        dist.all_gather(rows, sums, group=group)
        sums = merge(rows)
    return statistics(sums, parameters)
