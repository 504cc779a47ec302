"""One global batch: forward and backward over its micro-batches, then the step."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist

from . import distributed
from .loader import MicroBatch, Part
from .training import Training


class Outcome(NamedTuple):
    """What a global batch was like: its mean loss, the norm of its gradients before clipping, and
    that of the last layer's activations (`ActivationNorm`)."""

    loss: float
    grad_norm: float
    activation_norm: float


def run_batch(training: Training, size: int) -> Outcome:
    """Train on the next `size` samples."""
    if training.grid.pipeline_size > 1:
        return _in_pipeline(training, size)
    engine, progress = training.engine, training.progress
    count = training.sizes.micro_batches(size)
    loss = torch.zeros((), device=training.device)
    norm: float | torch.Tensor = 0.0
    for micro_batch in range(count):
        _seed_dropout(training, micro_batch)
        tokens, targets = _micro_batch(training, micro_batch, size)
        # DeepSpeed's own count of micro-batches goes astray when the batch size ramps up.
        engine.set_gradient_accumulation_boundary(micro_batch == count - 1)
        micro_loss = engine(tokens, targets)
        training.step.backward(micro_loss)
        loss += micro_loss.detach().float() / count
        tokens_after = progress.tokens + size * training.length()
        norm = training.step.take(increment=size, token_num=tokens_after)
    sums = torch.stack([loss, training.activations.take() / count])
    dist.all_reduce(sums)
    # The host waits here, once for the loss and the norm together.
    told = torch.cat([sums.double(), torch.as_tensor(norm, device=sums.device).double().view(1)])
    loss_sum, activation_sum, told_norm = told.tolist()
    ranks = distributed.world_size()
    return Outcome(loss_sum / ranks, training.step.settle(told_norm), activation_sum / ranks)


def _in_pipeline(training: Training, size: int) -> Outcome:
    count = training.sizes.micro_batches(size)
    if training.course.curriculum is not None:
        training.engine.reset_activation_shape()  # what the stages send each other has changed
    loss, norm = training.step.run_pipeline(
        (_micro_batch(training, number, size) for number in range(count)),
        lambda number: _seed_dropout(training, number),
        increment=size,
        token_num=training.progress.tokens + size * training.length(),
    )
    activation = training.activations.take() / count
    dist.all_reduce(activation)  # only the last stages have any
    stages = training.grid.pipeline_size
    return Outcome(loss, norm, float(activation) * stages / distributed.world_size())


def _seed_dropout(training: Training, micro_batch: int) -> None:
    """Make what is dropped a function of the sample and the pipeline stage."""
    config, grid = training.config, training.grid
    if config.hidden_dropout or config.attention_dropout or config.dropout_of_embeddings:
        samples = training.progress.samples
        first = training.sizes.first_sample(samples, micro_batch, grid.data_rank)
        seed = training.stream.random_seed(first) + 100 * grid.pipeline_rank
        torch.manual_seed(seed % 2**64)


def _micro_batch(training: Training, micro_batch: int, size: int) -> MicroBatch:
    """One micro-batch of the global batch; the guess is that the next has the same size."""
    following = (
        _part(training, micro_batch + 1, 0)
        if micro_batch + 1 < training.sizes.micro_batches(size)
        else _part(training, 0, size)
    )
    return training.loader.take(_part(training, micro_batch, 0), following)


def _part(training: Training, micro_batch: int, later: int) -> Part:
    """The samples of this rank's micro-batch, of the batch that begins `later` samples from now."""
    config, progress, sizes = training.config, training.progress, training.sizes
    first = sizes.first_sample(progress.samples + later, micro_batch, training.grid.data_rank)
    iteration, poison = progress.iteration + (2 if later else 1), config.poison
    poisoned = poison is not None and poison[0] <= iteration <= poison[1]
    length = training.course.length(iteration, config.seq_length)
    return Part(first, config.micro_batch_size, length, poisoned)
