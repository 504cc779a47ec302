"""Invented histories: restarts, crashes, killed writers, rollbacks cleaned or not, wrong clocks.

The answer is the truth or a refusal, never something else.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.logs import cut
from tests.support.training_log import (
    START,
    Job,
    Point,
    all_points,
    apply,
    marks,
    samples,
    truth,
    write,
)

HISTORIES = 20
HOUR = 3600.0
Parts = list[tuple[Job, int]]


def few(job: Job, iteration: int) -> Iterator[tuple[str, int, float]]:
    """Tags on two axes, one of them before its iteration is told, one of them now and then."""
    if iteration % job.interval == 0:
        yield "y=steps,x=samples", samples(iteration), iteration
        yield "loss", iteration, 1 / iteration
        yield "loss vs samples", samples(iteration), 1 / iteration
    if iteration % job.evaluate == 0:
        yield "validation", iteration, 1.0
        yield "validation vs samples", samples(iteration), 1.0


def invent(seed: int, logs: Path, skewed: bool, sparse: bool) -> tuple[int, float, list[Point]]:
    """Write a history to `logs`; the step to go back to, when it was saved, and what is left."""
    dice = random.Random(seed)
    saved: dict[int, tuple[float, Parts]] = {}  # the checkpoints on disk, and their histories
    resumed: Parts = []
    began, first = START, 1
    interval = dice.choice((1, 10)) if sparse else 1
    for _ in range(dice.randint(1, 6)):
        last = first + dice.randint(5, 80)
        job = Job(first, last, began, logged=few, evaluate=7, interval=interval)
        job.pace = dice.choice((2, 30))
        job.torn = dice.choice((0, 0, 7))
        if skewed:
            job.skew = dice.choice((0, 0, 0, 30, -2 * HOUR, 55 * HOUR, -55 * HOUR))
        every = dice.choice((5, 10, 15))
        for step in range(first, last + 1):
            if step % every == 0:
                saved[step] = (job.wall(step) + 1, [*resumed, (job, step)])
        if dice.random() < 0.3:  # killed: the events of the last seconds never reach the disk
            job.last = max(min(first + interval, last), last - int(60 / job.pace))
        write(logs, job)
        began = job.wall(last) + dice.choice((20, 300, 4000))
        if not saved:
            first, resumed = 1, []
            continue
        step = max(saved) if dice.random() < 0.5 else dice.choice(sorted(saved))
        when, resumed = saved[step]
        if dice.random() < 0.4:
            changes, _ = cut.truncate(logs, logs, marks(step, when), keep_as=None)
            apply(changes, logs)
        for newer in [other for other in saved if other > step]:
            del saved[newer]
        first = step + 1
    if not saved:
        return 0, START, []
    step = dice.choice(sorted(saved))
    when, parts = saved[step]
    return step, when, truth(*parts)


@pytest.mark.parametrize(
    ("skewed", "sparse", "alone"),
    [(False, False, False), (True, False, False), (True, True, False), (False, False, True)],
    ids=["restarts", "wrong clocks", "wrong clocks, sparse logs", "without the time of the save"],
)
@pytest.mark.long
def test_invented_histories_come_out_right_or_are_refused(
    skewed: bool, sparse: bool, alone: bool, tmp_path: Path
) -> None:
    refused = 0
    for seed in range(HISTORIES):
        logs = tmp_path / str(seed)
        try:
            step, when, expected = invent(seed, logs, skewed, sparse)
            wanted = marks(step, None if alone else when)
            changes, _ = cut.truncate(logs, logs, wanted, keep_as=None)
        except SurgeryError:
            refused += 1
            continue
        apply(changes, logs)
        assert all_points(logs) == expected, f"history {seed}"
    assert refused < HISTORIES // 5
