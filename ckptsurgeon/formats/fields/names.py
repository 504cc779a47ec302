"""The fields that a checkpoint may keep, by the names that `Checkpoint.locate` takes."""

from __future__ import annotations

from collections.abc import Mapping

FIELDS: Mapping[str, str] = {
    # the schedule
    "lr": "The learning rate of each param group, as the optimizer used it last or will next.",
    "initial_lr": "The rate that torch's schedulers remember in each param group.",
    "max_lr": "The peak of the schedule; `lr` of a recipe sets it.",
    "min_lr": "The rate that the decay ends at.",
    "warmup": "Where the warm-up ends, in samples or in steps of the scheduler.",
    "decay": "Where the decay ends, counted as the warm-up is.",
    "decay_style": "The name of the curve from peak to floor.",
    "position": "Where the schedule stands, counted as the warm-up is.",
    "scheduler": "The whole state of a scheduler, one place for each that is saved.",
    "rewarm": "The window after a reset in which the rate is held or ramped: [kind, start, end].",
    # the optimizer
    "optimizer": "The name of the optimizer whose state this is.",
    "betas": "Adam's two decay rates, a pair for each param group.",
    "eps": "What Adam adds to the denominator, for each param group.",
    "weight_decay": "The decay of the weights, for each param group.",
    "momentum": "SGD's momentum, in each param group.",
    "sgd_momentum": "SGD's momentum, as the trainer's arguments have it.",
    "adam_step": "Adam's count of updates, from which its bias correction comes.",
    "exp_avg": "Adam's mean of the gradients, every tensor of it.",
    "exp_avg_sq": "Adam's mean of the squared gradients, every tensor of it.",
    "max_exp_avg_sq": "AMSGrad's largest mean of the squared gradients so far.",
    "momentum_buffer": "SGD's or Muon's running sum of the gradients.",
    "clip_grad": "The norm that gradients are clipped to.",
    "loss_scale": "What the loss is multiplied by in fp16.",
    # counters and data
    "batch_size": "The samples of an update, as the trainer counts them: of all ranks, or of one.",
    "rampup": "How the batch size grows: start, increment, samples.",
    "iteration": "The updates that the trainer has counted.",
    "skipped_steps": "The updates that an overflow has kept from being made.",
    "consumed_samples": "The samples that were trained on: where the data goes on.",
    "tokens": "The tokens that were trained on.",
    "data_epoch": "The pass through the data, from 1, as its loader counts.",
    "data_batches": "The batches of this epoch that its loader has given out.",
    "data_tokens": "The tokens in those batches.",
    "skip": "The ranges of iterations whose data is skipped, both ends included.",
    "seed": "What the random numbers begin with.",
}
"""Field → what it means."""
