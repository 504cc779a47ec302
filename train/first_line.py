"""The first line: what the live engine will use at its next step, as one JSON object."""

from __future__ import annotations

import json
from typing import Any

from .course import Course
from .distributed import gather
from .errors import RankError, TrainError
from .optimizer import live_adam_step, live_clip_grad, live_loss_scale, live_optimizer
from .progress import Progress
from .rewarm import factor


def read_live(engine: Any, progress: Progress, course: Course) -> dict[str, Any]:
    """This rank's values, from its param groups, optimizer state, scaler and clipping."""
    groups = live_optimizer(engine).param_groups
    for key in ("lr", "betas", "eps"):
        values = [group.get(key) for group in groups]  # SGDW has neither betas nor eps
        if any(value != values[0] for value in values):
            raise RankError(
                f"the param groups of rank {engine.global_rank} disagree on {key}: {values}",
                next="edit the checkpoint so that every group of every shard has one value",
                untouched="the checkpoint is as it was",
            )
    return {
        "step": progress.iteration + 1,
        "lr": float(groups[0]["lr"]) * factor(engine, course.rewarm),
        "betas": [float(beta) for beta in groups[0]["betas"]] if "betas" in groups[0] else None,
        "eps": float(groups[0]["eps"]) if "eps" in groups[0] else None,
        "weight_decay": [float(group["weight_decay"]) for group in groups],
        "adam_step": live_adam_step(engine),
        "loss_scale": live_loss_scale(engine),
        "clip_grad": live_clip_grad(engine),
        "consumed_samples": progress.samples,
        "skip": [list(pair) for pair in course.skip],
        "seed": course.seed,
        "rewarm": [] if course.rewarm is None else course.rewarm.as_saved(),
    }


def agreed_line(live: dict[str, Any]) -> str:
    """The JSON text when all ranks hold the same values. Raises TrainError with the difference."""
    by_rank = gather(live)
    for key in live:
        values = [values[key] for values in by_rank]
        if any(value != values[0] for value in values):
            listed = ", ".join(f"rank {rank} {value}" for rank, value in enumerate(values))
            raise TrainError(
                f"the ranks disagree on {key}: {listed}",
                next="edit the checkpoint so that every shard has one value",
                untouched="the checkpoint is as it was",
            )
    return json.dumps(by_rank[0])
