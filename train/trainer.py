"""The training run: load, say what will be used, train, save."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from . import distributed
from .batch import run_batch
from .checkpoint import LAUNCH, load_checkpoint, read_client_state, restore_rng, save_checkpoint
from .config import Config
from .data import SampleStream
from .first_line import agreed_line, read_live
from .grid import Grid, arrange
from .indexed_dataset import IndexedDataset
from .log import EventLog, Report, loss_line, skipped_line
from .microbatches import BatchSizes
from .model import GPT
from .optimizer import (
    build_engine,
    live_clip_grad,
    live_loss_scale,
    live_optimizer,
    set_clip_grad,
)
from .parameter_count import count, counted_line, shape_warnings
from .pipeline import build_pipeline
from .progress import Progress, skip_range
from .rewarm import Rewarm, factor, open_window, rewarmed
from .step import Step


@dataclass
class Training:
    """One process's part of a run, ready for the iteration after `progress`."""

    config: Config
    grid: Grid
    engine: Any
    step: Step
    device: Any
    stream: SampleStream
    sizes: BatchSizes
    progress: Progress
    skip: list[list[int]]
    seed: int
    rewarm: Rewarm | None
    flops_per_token: int
    parameters: int
    saved_args: argparse.Namespace | None = None


def prepare(config: Config, checkpoint: Path | None, device: Any) -> Training:
    """Build the engine and, with a checkpoint, let it win over the config. Raises TrainError."""
    grid = arrange(config, distributed.world_size())
    sizes = BatchSizes(
        config.global_batch_size, config.micro_batch_size, grid.data_size, config.rampup_batch_size
    )
    dataset = IndexedDataset(config.data)
    state = None if checkpoint is None else read_client_state(checkpoint, config, grid)
    torch.manual_seed(config.seed)
    model = build_pipeline(config, grid) if grid.pipeline_size > 1 else GPT(config, grid)
    parameters, without_embeddings = count(model, grid)
    engine = build_engine(config, model, sizes, grid)
    progress, skip, seed = Progress(), config.skip_train_iteration_range, config.seed
    rewarm = None
    if checkpoint is not None and state is not None:
        load_checkpoint(engine, checkpoint)
        restore_rng(state)
        args = state["args"]
        if config.zero_stage in (0, 3):  # ZeRO 1 and 2 restore it from their shards
            set_clip_grad(engine, float(args.clip_grad))
        skip = [[int(a), int(b)] for a, b in state["skip_train_iteration_range"]]
        seed = int(args.seed)
        rewarm = open_window(state.get("rewarm") or [], engine.lr_scheduler.num_steps)
        progress = Progress(
            iteration=int(state["iteration"]),
            samples=int(args.consumed_train_samples),
            tokens=int(state["tokens"]),
            gigaflos=float(args.gigaflos_no_embeds),
        )
    stream = SampleStream(dataset, config.seq_length, seed, config.vocab_size)
    return Training(
        config, grid, engine, Step(engine, config, grid), device, stream, sizes, progress, skip,
        seed, rewarm, 6 * without_embeddings, parameters,
        None if state is None else state["args"],
    )  # fmt: skip


def differences(training: Training) -> list[str]:
    """One sentence per field in which the loaded state differs from the config."""
    config, engine = training.config, training.engine
    schedule, groups = engine.lr_scheduler, live_optimizer(engine).param_groups
    betas = groups[0].get("betas", (config.adam_beta1, config.adam_beta2))
    decay = next((g["weight_decay"] for g in groups if g["weight_decay"]), 0.0)
    pairs = (
        ("lr", config.lr, schedule.max_lr),
        ("min_lr", config.min_lr, schedule.min_lr),
        ("lr_decay_style", config.lr_decay_style, schedule.decay_style),
        ("lr_warmup_samples", config.lr_warmup_samples, schedule.warmup_steps),
        ("lr_decay_samples", config.decay_samples, schedule.decay_steps),
        ("sgd_momentum", config.sgd_momentum, groups[0].get("momentum", config.sgd_momentum)),
        ("adam_beta1", config.adam_beta1, betas[0]),
        ("adam_beta2", config.adam_beta2, betas[1]),
        ("adam_eps", config.adam_eps, groups[0].get("eps", config.adam_eps)),
        ("weight_decay", config.weight_decay, decay),
        ("clip_grad", config.clip_grad, live_clip_grad(engine)),
        ("seed", config.seed, training.seed),
        ("skip_train_iteration_range", config.skip_train_iteration_range, training.skip),
    )
    wins = [
        f"{name}: config {ours}, checkpoint {theirs}: the checkpoint wins"
        for name, ours, theirs in pairs
        if ours != theirs
    ]
    free = ((key, getattr(config, key), getattr(training.saved_args, key, None)) for key in LAUNCH)
    return wins + [
        f"{name}: config {ours}, checkpoint {theirs}: the config wins"
        for name, ours, theirs in free
        if theirs is not None and ours != theirs
    ]


def announce(training: Training, say: Callable[[str], None]) -> None:
    """Say how many parameters there are, and warn when they are not those of the formula."""
    say(counted_line(training.config, training.parameters))
    if distributed.rank() == 0:
        warn(shape_warnings(training.config, training.parameters))


def first_line(training: Training) -> str:
    """The JSON text of what all ranks will use at the next step. Raises TrainError."""
    live = read_live(
        training.engine, training.progress, training.skip, training.seed, training.rewarm
    )
    return agreed_line(live)


def train(training: Training, say: Callable[[str], None]) -> None:
    """Run to train_iters, saving every save_interval and at the end."""
    last_rank = distributed.rank() == distributed.world_size() - 1
    events = EventLog(Path(training.config.save)) if last_rank else None
    try:
        if events is not None:
            events.restart(training.progress.iteration, distributed.world_size())
        _iterate(training, say, events)
    finally:
        if events is not None:
            events.close()


def _iterate(training: Training, say: Callable[[str], None], events: EventLog | None) -> None:
    config, progress = training.config, training.progress
    saved = progress.iteration
    announced: object = None
    if training.rewarm is not None:
        kind, start, end = training.rewarm.as_saved()
        say(f" re-warm ({kind}) from sample {start} to {end} of the schedule")
    while progress.iteration < config.train_iters:
        size = training.sizes.at(progress.samples)
        skipped = skip_range(training.skip, progress.iteration + 1)
        if skipped is not None:
            if skipped is not announced:
                say(f" iterations {skipped[0]}-{skipped[1]} are skipped: data passed over")
                announced = skipped
            progress.advance(size, config.seq_length, flops_per_token=0)
        else:
            report = _iteration(training, size)
            if report.skipped:
                say(skipped_line(report, progress.iteration))
            _end_rewarm(training, say)
            if progress.iteration % config.log_interval == 0:
                say(loss_line(report, progress, config.train_iters))
            if events is not None:
                events.iteration(report, progress)
        if progress.iteration % config.save_interval == 0:
            _save(training, events)
            saved = progress.iteration
    if saved != progress.iteration:
        _save(training, events)


def _end_rewarm(training: Training, say: Callable[[str], None]) -> None:
    if training.rewarm is not None and factor(training.engine, training.rewarm) == 1.0:
        say(f" re-warm ended after iteration {training.progress.iteration}: back on the schedule")
        training.rewarm = None


def _iteration(training: Training, size: int) -> Report:
    """Train on one global batch and advance the counters."""
    config, engine, progress = training.config, training.engine, training.progress
    began = time.perf_counter()
    if engine.train_batch_size() != size:
        engine.set_train_batch_size(size)
    lr = live_optimizer(engine).param_groups[0]["lr"] * factor(engine, training.rewarm)
    skipped_before = engine.skipped_steps
    with rewarmed(engine, training.rewarm):
        loss, norm = run_batch(training, size)
    progress.advance(size, config.seq_length, training.flops_per_token)
    return Report(
        loss=loss,
        lr=lr,
        batch_size=size,
        grad_norm=norm,
        loss_scale=live_loss_scale(engine),
        skipped=engine.skipped_steps - skipped_before,
        seconds=time.perf_counter() - began,
    )


def _save(training: Training, events: EventLog | None) -> None:
    if events is not None:
        events.flush()
    save_checkpoint(
        training.engine,
        training.config,
        training.grid,
        training.progress,
        training.skip,
        training.seed,
        training.rewarm,
    )


def warn(lines: list[str]) -> None:
    for line in lines:
        print(line, file=sys.stderr)
