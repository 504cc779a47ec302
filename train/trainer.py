"""The training run: load, say what will be used, train, save."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from . import distributed
from .activation_norm import ActivationNorm
from .batch import run_batch
from .blend import open_streams
from .checkpoint import LAUNCH, load_checkpoint, read_client_state, restore_rng
from .config import Config
from .course import course_of, saved_course
from .errors import TrainError
from .first_line import agreed_line, read_live
from .grid import arrange
from .kernels import choose, load
from .loader import Loader
from .log import EventLog, Report, loss_line, mean, skipped_line, validation_line
from .microbatches import BatchSizes
from .model import GPT
from .optimizer import (
    build_engine,
    keep_implementation,
    live_clip_grad,
    live_loss_scale,
    live_optimizer,
    live_scaler,
    set_clip_grad,
)
from .padding import clear_padding
from .parameter_count import count, counted_line, shape_warnings
from .pipeline import build_pipeline, final_norm
from .precision import gradient_dtype, saved_dtype
from .progress import Progress, skip_range
from .progress_bar import ProgressBar
from .rewarm import factor, rewarmed
from .saves import Saves
from .step import Step, take_statistics
from .stop import StopRequest
from .throughput import throughput_line
from .trace import Trace
from .training import Training
from .universal import describe
from .universal_source import is_universal
from .validation import evaluate
from .watchdog import Watchdog


def prepare(config: Config, checkpoint: Path | None, device: Any) -> Training:
    """Build the engine and, with a checkpoint, let it win over the config. Raises TrainError."""
    _same_kernels()
    choose(config.kernels)
    grid = arrange(config, distributed.world_size())
    sizes = BatchSizes(
        config.global_batch_size, config.micro_batch_size, grid.data_size, config.rampup_batch_size
    )
    state = None if checkpoint is None else read_client_state(checkpoint, config, grid)
    config = replace(
        config, grad_accum_dtype=gradient_dtype(config, None if state is None else state["args"])
    )
    torch.manual_seed(config.seed)
    model = build_pipeline(config, grid) if grid.pipeline_size > 1 else GPT(config, grid)
    parameters, without_embeddings = count(model, grid)
    norm = final_norm(model, grid) if grid.pipeline_size > 1 else model.final_layernorm
    describe(model, config)
    if config.compile:
        # The forward alone: DeepSpeed's hooks around it are not for tracing.
        model.forward = torch.compile(model.forward, backend="inductor")  # type: ignore[method-assign]
    universal = checkpoint is not None and is_universal(checkpoint)
    engine = build_engine(config, model, sizes, grid, universal)
    fused = live_optimizer(engine).param_groups[0].get("fused")
    progress, course = Progress(), course_of(config)
    if checkpoint is not None and state is not None:
        load_checkpoint(engine, checkpoint, state)
        keep_implementation(live_optimizer(engine), fused)
        restore_rng(state)
        args = state["args"]
        if config.zero_stage in (0, 3):  # ZeRO 1 and 2 restore it from their shards
            set_clip_grad(engine, float(args.clip_grad))
        course = saved_course(state, engine.lr_scheduler.num_steps)
        progress = Progress(
            iteration=int(state["iteration"]),
            samples=int(args.consumed_train_samples),
            tokens=int(state["tokens"]),
            gigaflos=float(args.gigaflos_no_embeds),
            valid_samples=int(args.consumed_valid_samples),
            updates=int(state.get("updates", 0)),  # older ones lack both
            clipped_updates=int(state.get("clipped_updates", 0)),
        )
    if config.zero_stage == 3:
        clear_padding(engine)
    stream, held_out = open_streams(
        config.data, config.seq_length, course.seed, config.vocab_size, config.shares,
        held_out=config.eval_interval is not None,
    )  # fmt: skip
    return Training(
        config, grid, engine, Step(engine, config, grid), ActivationNorm(norm, device), device,
        stream, Loader(stream, device), held_out, sizes, progress, course,
        6 * without_embeddings, parameters, None if state is None else state["args"],
    )  # fmt: skip


def _same_kernels() -> None:
    """Refuse ranks with another torch, or of which only some have native kernels: each kind of step
    waits for messages that the other does not send."""
    told = distributed.gather((torch.__version__, load()))
    other = next((r for r, (version, _) in enumerate(told) if version != told[0][0]), None)
    if other is not None:
        raise TrainError(
            f"rank {other} runs torch {told[other][0]}, rank 0 torch {told[0][0]}",
            next="install the same torch for all ranks",
        )
    reasons = [reason for _, reason in told]
    rank, reason = next(((r, why) for r, why in enumerate(reasons) if why is not None), (0, None))
    if reason is not None and None in reasons:
        raise TrainError(
            f"rank {rank} has no native kernels and others have: {reason}",
            next=("install there what it lacks", "or CKPTSURGEON_KERNELS=off for all ranks"),
        )


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
        ("lr_wsd_decay_samples", config.lr_wsd_decay_samples, schedule.wsd_decay_steps),
        ("lr_wsd_decay_style", config.lr_wsd_decay_style, schedule.lr_wsd_decay_style),
        ("sgd_momentum", config.sgd_momentum, groups[0].get("momentum", config.sgd_momentum)),
        ("adam_beta1", config.adam_beta1, betas[0]),
        ("adam_beta2", config.adam_beta2, betas[1]),
        ("adam_eps", config.adam_eps, groups[0].get("eps", config.adam_eps)),
        ("weight_decay", config.weight_decay, decay),
        ("clip_grad", config.clip_grad, live_clip_grad(engine)),
        ("seed", config.seed, training.course.seed),
        ("skip_train_iteration_range", config.skip_train_iteration_range, training.course.skip),
        ("curriculum", config.curriculum, training.course.curriculum),
        *((name, getattr(config, name), value) for name, value in live_scaler(engine).items()),
    )
    wins = [
        f"{name}: config {ours}, checkpoint {theirs}: the checkpoint wins"
        for name, ours, theirs in pairs
        if ours != theirs
    ]
    saved = training.saved_args
    free = [(key, getattr(config, key), getattr(saved, key, None)) for key in LAUNCH]
    if saved is not None:
        free.append(("dtype", config.dtype, saved_dtype(saved)))
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
    return agreed_line(read_live(training.engine, training.progress, training.course))


def train(training: Training, say: Callable[[str], None]) -> None:
    """Run to train_iters, or until a signal or the kill switch ends it; what was trained is saved.

    Every save_interval a checkpoint is saved, every eval_interval the held-out loss is logged."""
    last_rank = distributed.rank() == distributed.world_size() - 1
    events = EventLog(Path(training.config.save)) if last_rank else None
    progress, stop = (
        training.progress,
        StopRequest(training.config.kill_switch_path, training.device),
    )
    bar = ProgressBar(
        sys.stderr if distributed.rank() == 0 else None,
        progress.iteration,
        training.config.train_iters,
    )
    stop.listen()
    watchdog = Watchdog(training.config.watchdog, Path(training.config.save))
    watchdog.start()
    try:
        if events is not None:
            events.restart(progress.iteration, distributed.world_size())
        _iterate(training, bar.above(say), events, stop, bar, watchdog)
    finally:
        watchdog.stop()
        bar.clear()
        if events is not None:
            events.close()


def _iterate(
    training: Training,
    say: Callable[[str], None],
    events: EventLog | None,
    stop: StopRequest,
    bar: ProgressBar,
    watchdog: Watchdog,
) -> None:
    config, progress, course = training.config, training.progress, training.course
    saved, saves = progress.iteration, Saves(training)
    announced: object = None
    interval: list[Report] = []
    traced = config.profile if distributed.rank() == 0 else None
    trace = Trace(traced, Path(config.save))
    if course.rewarm is not None:
        kind, start, end = course.rewarm.as_saved()
        say(f" re-warm ({kind}) from sample {start} to {end} of the schedule")
    if saved >= config.train_iters:
        say(f" nothing to train: step {saved} is saved, and train_iters={config.train_iters}")
    while progress.iteration < config.train_iters:
        watchdog.alive()
        saves.poll()
        reason = stop.agreed()
        if reason is not None:
            say(f" {reason}: stopping after iteration {progress.iteration}")
            break
        size = training.sizes.at(progress.samples)
        skipped = skip_range(course.skip, progress.iteration + 1)
        if skipped is not None:
            if skipped is not announced:
                say(f" iterations {skipped[0]}-{skipped[1]} are skipped: data passed over")
                announced = skipped
            progress.advance(size, training.length(), flops_per_token=0)
        else:
            trace.before(progress.iteration + 1)
            report = iteration(training, size)
            trace.after(progress.iteration)
            interval.append(report)
            if report.skipped:
                say(skipped_line(report, progress.iteration))
            _end_rewarm(training, say)
            if progress.iteration % config.log_interval == 0:
                say(loss_line(mean(interval), progress, config.train_iters))
                if config.log_throughput:
                    say(throughput_line(mean(interval), training, distributed.world_size()))
                interval.clear()
            if events is not None:
                events.iteration(report, progress)
            if config.eval_interval and progress.iteration % config.eval_interval == 0:
                _validate(training, say, events)
            bar.draw(progress.iteration, report.loss)
        if progress.iteration % config.save_interval == 0:
            saves.save(events)
            saved = progress.iteration
    trace.close()
    if saved != progress.iteration:
        saves.save(events)
    saves.finish()


def _end_rewarm(training: Training, say: Callable[[str], None]) -> None:
    window = training.course.rewarm
    if window is not None and factor(training.engine, window) == 1.0:
        say(f" re-warm ended after iteration {training.progress.iteration}: back on the schedule")
        training.course.rewarm = None


def _validate(training: Training, say: Callable[[str], None], events: EventLog | None) -> None:
    loss = evaluate(training)
    say(validation_line(loss, training.progress.iteration))
    if events is not None:
        events.validation(loss, training.progress)


def iteration(training: Training, size: int) -> Report:
    """Train on one global batch and advance the counters."""
    engine, progress = training.engine, training.progress
    began = time.perf_counter()
    if engine.train_batch_size() != size:
        engine.set_train_batch_size(size)
    window = training.course.rewarm
    lr = live_optimizer(engine).param_groups[0]["lr"] * factor(engine, window)
    skipped_before = engine.skipped_steps
    length = training.length()
    with rewarmed(engine, window):
        outcome = run_batch(training, size)
    progress.advance(size, length, training.flops_per_token)
    skipped = engine.skipped_steps - skipped_before
    statistics = take_statistics(engine, training.grid, training.parameters)
    clip_grad = live_clip_grad(engine)
    if not skipped:
        progress.updated(outcome.grad_norm, clip_grad)
    return Report(
        loss=outcome.loss,
        lr=lr,
        batch_size=size,
        grad_norm=outcome.grad_norm,
        loss_scale=live_loss_scale(engine),
        skipped=skipped,
        seconds=time.perf_counter() - began,
        curriculum_seqlen=None if training.course.curriculum is None else length,
        statistics=None if skipped else statistics,
        activation_norm=outcome.activation_norm,
        clipped=progress.clipped_share() if clip_grad else None,
    )


def warn(lines: list[str]) -> None:
    for line in lines:
        print(line, file=sys.stderr)
