"""What a run reports: Megatron's loss line, and TensorBoard with Megatron-DeepSpeed's tags."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .fused_adamw import Statistics
from .progress import Progress


@dataclass(frozen=True)
class Report:
    """The figures of one trained iteration. `seconds` is the time it took, `curriculum_seqlen` its
    tokens a sample under a curriculum; `statistics` are of its step, None when it was left out or
    the optimizer is not fused; `clipped` is the share of the run's updates so far whose gradients
    were clipped, None without clipping. Of a whole log interval see `mean`."""

    loss: float
    lr: float
    batch_size: int
    grad_norm: float
    loss_scale: float
    skipped: int
    seconds: float
    curriculum_seqlen: int | None = None
    nan: int = 0
    statistics: Statistics | None = None
    activation_norm: float | None = None
    clipped: float | None = None


def mean(reports: Sequence[Report]) -> Report:
    """What one line says of a log interval, as Megatron counts: the mean of the finite losses and
    of the times, the sum of the skipped and of the nan iterations, the rest of the last one."""
    finite = [report.loss for report in reports if math.isfinite(report.loss)]
    return replace(
        reports[-1],
        loss=sum(finite) / len(finite) if finite else reports[-1].loss,
        seconds=sum(report.seconds for report in reports) / len(reports),
        skipped=sum(report.skipped for report in reports),
        nan=len(reports) - len(finite),
    )


def loss_line(report: Report, progress: Progress, train_iters: int) -> str:
    """One line in Megatron's form."""
    curriculum = (
        ""
        if report.curriculum_seqlen is None
        else f" curriculum seqlen: {report.curriculum_seqlen:5d} |"
    )
    found = report.statistics
    counted = (
        ""
        if found is None
        else f" num zeros: {found.zeros:.1f} | params norm: {found.weight_l2:.3f} |"
    )
    line = (
        f" iteration {progress.iteration:8d}/{train_iters:8d} |"
        f" consumed samples: {progress.samples:12d} |"
        f" elapsed time per iteration (ms): {report.seconds * 1000:.1f} |"
        f" learning rate: {report.lr:.3E} |"
        f" global batch size: {report.batch_size:5d} |"
        f" lm loss: {report.loss:.6E} |"
        f" loss scale: {report.loss_scale:.1f} |"
        f" grad norm: {report.grad_norm:.3f} |{counted}{curriculum}"
        f" number of skipped iterations: {report.skipped:3d} |"
        f" number of nan iterations: {report.nan:3d} |"
    )
    if report.activation_norm is not None:
        line += f" activation norm: {report.activation_norm:.3f} |"
    if report.clipped is not None:
        line += f" clipped steps: {report.clipped:.4f} |"
    if found is not None:
        line += f" adam variance l1 norm: {found.variance_l1:.4E} |"
        line += f" adam variance max: {found.variance_max:.4E} |"
        line += f" update rms: {found.update_rms:.4f} |"
    return line


def validation_line(loss: float, iteration: int) -> str:
    """One line in Megatron's form; PPL is perplexity."""
    return (
        f" validation loss at iteration {iteration} | lm loss value: {loss:.6E} |"
        f" lm loss PPL: {perplexity(loss):.6E} | "
    )


def perplexity(loss: float) -> float:
    """exp(loss), capped where Megatron caps it."""
    return math.exp(min(20.0, loss))


def skipped_line(report: Report, iteration: int) -> str:
    """Why the iteration has changed no weight."""
    if math.isfinite(report.grad_norm):
        why = f"grad norm {report.grad_norm:.3f} is above skip_grad_norm"
    else:
        why = f"the gradients overflowed, loss scale now {report.loss_scale:g}"
    return f" iteration {iteration:8d}: {why}: its update is left out"


def _signals(report: Report) -> Iterator[tuple[str, float, str]]:
    """Tag, value and axes beside the iteration of what is not known of each step."""
    found = report.statistics
    if found is not None:
        yield "num-zeros/num-zeros", found.zeros, "samples tokens"
        yield "params-norm/params-norm", found.weight_l2, "samples tokens"
        yield "optimizer/variance_l1", found.variance_l1, "tokens"
        yield "optimizer/variance_abs_max", found.variance_max, "tokens"
        yield "optimizer/weight_l2", found.weight_l2, "tokens"
        yield "optimizer/update_l2", found.update_l2, "tokens"
        yield "optimizer/update_rms", found.update_rms, "tokens"
    if report.activation_norm is not None:
        yield "activation-norm/activation-norm", report.activation_norm, "samples tokens"
    if report.clipped is not None:
        yield "clipped-steps/clipped-steps", report.clipped, "samples tokens"


class EventLog:
    """Scalars in <save>/tensorboard on four x axes: iteration, samples, tokens, gigaflos."""

    def __init__(self, root: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(root / "tensorboard"))

    def restart(self, iteration: int, world_size: int) -> None:
        """Mark the start of a process: the number of ranks, then 0 one iteration later."""
        self._add("iteration-time/world_size", world_size, iteration)
        self._add("iteration-time/world_size", 0, iteration + 1)

    def iteration(self, report: Report, progress: Progress) -> None:
        """All scalars of one trained iteration, at the counters after it."""
        for tag, value, axes in (
            *_signals(report),
            ("lm-loss-training/lm loss", report.loss, "samples tokens gigaflos"),
            ("learning-rate/learning-rate", report.lr, "samples tokens"),
            ("batch-size/batch-size", report.batch_size, "samples"),
            ("loss-scale/loss-scale", report.loss_scale, "samples tokens"),
            ("grad-norm/grad-norm", report.grad_norm, "samples tokens"),
            ("iteration-time/iteration-time", report.seconds, "samples tokens"),
        ):
            self._add(tag, value, progress.iteration)
            if "samples" in axes:
                self._add(f"{tag} vs samples", value, progress.samples)
            if "tokens" in axes:
                self._add(f"{tag} vs tokens", value, progress.tokens)
            if "gigaflos" in axes:
                self._add(f"{tag} vs gigaflos (without embeddings)", value, int(progress.gigaflos))
        if report.curriculum_seqlen is not None:
            self._add("curriculum_seqlen", report.curriculum_seqlen, progress.iteration)
        self._add(
            "iteration-time/samples per second",
            report.batch_size / report.seconds,
            progress.iteration,
        )
        for name, count in (("samples", progress.samples), ("tokens", progress.tokens)):
            group = f"steps-vs-{name}"
            self._add(f"{group}/y=steps,x={name}", progress.iteration, count)
            self._add(f"{group}/y={name},x=steps", count, progress.iteration)

    def validation(self, loss: float, progress: Progress) -> None:
        """The loss on held-out text, and its perplexity."""
        name = "lm-loss-validation/lm loss validation"
        for tag, value in ((name, loss), (f"{name} ppl", perplexity(loss))):
            self._add(tag, value, progress.iteration)
            self._add(f"{tag} vs samples", value, progress.samples)
            self._add(f"{tag} vs tokens", value, progress.tokens)
            self._add(f"{tag} vs gigaflos (without embeddings)", value, int(progress.gigaflos))

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()

    def _add(self, tag: str, value: float, step: int) -> None:
        self._writer.add_scalar(tag, value, step, new_style=True)
