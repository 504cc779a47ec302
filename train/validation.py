"""The loss on held-out text."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from .training import Training


def evaluate(training: Training) -> float:
    """The mean loss over eval_iters global batches, from sample `progress.valid_samples` on.

    Like Megatron it goes on through the held-out samples from one validation to the next; the
    counter is in the checkpoint, so that a resumed run sees the same ones. Samples have their
    full length under a curriculum. Every rank must call it."""
    config, engine = training.config, training.engine
    if training.grid.pipeline_size > 1:
        return _in_pipeline(training)
    count = training.sizes.micro_batches(config.global_batch_size)
    total = torch.zeros((), device=training.device)
    engine.eval()
    with torch.no_grad():
        for _ in range(config.eval_iters):
            for tokens, targets in _micro_batches(training):
                total += engine(tokens, targets).float() / (config.eval_iters * count)
            training.progress.valid_samples += config.global_batch_size
    engine.train()
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


def _in_pipeline(training: Training) -> float:
    config, engine = training.config, training.engine
    count = training.sizes.micro_batches(config.global_batch_size)
    total = 0.0
    for _ in range(config.eval_iters):
        engine.reset_activation_shape()  # samples were shorter under a curriculum
        loss = engine.eval_batch(_micro_batches(training), num_micro_batches=count)
        total += float(loss) / config.eval_iters
        training.progress.valid_samples += config.global_batch_size
    engine.reset_activation_shape()
    return total


def _micro_batches(training: Training) -> Iterator[tuple[Tensor, Tensor]]:
    """This rank's part of the next global batch of held-out samples."""
    config, sizes, done = training.config, training.sizes, training.progress.valid_samples
    for micro_batch in range(sizes.micro_batches(config.global_batch_size)):
        first = sizes.first_sample(done, micro_batch, training.grid.data_rank)
        parts = training.held_out.batch(first, config.micro_batch_size)
        tokens, targets = (torch.from_numpy(part).to(training.device) for part in parts)
        yield tokens, targets
