"""A law: after any restarts, kills, cuts and rollbacks, however quickly, what a plan
says of events that are missing is so, and none that is missing goes unsaid."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from hypothesis import HealthCheck, event, example, given, settings
from hypothesis import strategies as st

from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.logs import cut
from ckptsurgeon.logs.marks import Marks
from tests.support.training_log import START, Job, all_points, apply, points, write

GAP = re.compile(r"^no events from (\d+) to (\d+) (?:after|before) ")
BOOT = 0.3
"""Seconds from the start of a job to its first step, and from a rollback to the next start."""


def losses(job: Job, iteration: int) -> Iterator[tuple[str, int, float]]:
    if iteration % job.interval == 0:
        yield "loss", iteration, 1 / iteration


@dataclass
class Quick(Job):
    """A job that may take less than a second, and stamp its events with whole ones."""

    number: int = 0
    whole: bool = False

    @property
    def name(self) -> str:
        return f"events.out.tfevents.{int(self.began)}.node.{100 + self.number}.0"

    def ended(self, iteration: int) -> float:
        return self.began + BOOT + self.pace * (iteration - self.first + 1)

    def wall(self, iteration: int) -> float:
        return float(int(self.ended(iteration))) if self.whole else self.ended(iteration)


@dataclass(frozen=True)
class Life:
    """One job and what comes after it: `lost` of its last steps never reach the disk, and the next
    one loads one of the steps that are there, after a `rollback` or without one."""

    steps: int
    pace: float = 0.1
    pause: float = 0.2
    lost: int = 0
    loads: int = -1
    rollback: bool = True
    edited: bool = False
    """The rollback changes the step, and so the time at which its files were written."""


@dataclass
class Training:
    logs: Path
    interval: int = 1
    every: int = 2
    whole: bool = False
    now: float = START
    saved: dict[int, tuple[float, dict[int, int]]] = field(default_factory=dict)
    """Of each step on disk, when it was saved and the job that did each iteration up to it."""
    did: dict[int, int] = field(default_factory=dict)
    jobs: list[Quick] = field(default_factory=list)

    def run(self, life: Life) -> None:
        first = max(self.did, default=0) + 1
        last = first + life.steps - 1
        job = Quick(
            first, last, self.now, life.pace, interval=self.interval, logged=losses,
            number=len(self.jobs), whole=self.whole,
        )  # fmt: skip
        self.jobs.append(job)
        for step in range(first, last + 1):
            self.did[step] = job.number
            if step % self.every == 0:
                self.saved[step] = (job.ended(step) + 0.005, dict(self.did))
        self.now = job.ended(last) + 0.01
        job.last = max(first - 1, last - life.lost)
        if any(step % self.interval == 0 for step in range(first, job.last + 1)):
            os.utime(write(self.logs, job), (self.now, self.now))
        self.now += life.pause

    def go_back(self, life: Life) -> None:
        step = sorted(self.saved)[life.loads % len(self.saved)]
        when, self.did = self.saved[step]
        if life.rollback:
            alone = any(len(points(path)) == 1 for path in self.logs.glob("*tfevents*"))
            changes, warnings = cut.truncate(
                self.logs, self.logs, Marks(step, saved_at=when), keep_as=None
            )
            apply(changes, self.logs)
            self.holds(step, warnings, alone)
            self.now += BOOT
            self.saved[step] = (self.now if life.edited else when, self.did)
        self.did = dict(self.did)
        self.saved = {other: saved for other, saved in self.saved.items() if other <= step}

    def holds(self, step: int, warnings: list[str], alone: bool) -> None:
        left = {x for _, x, _ in all_points(self.logs)}
        gaps = [(int(gap[1]), int(gap[2])) for line in warnings if (gap := GAP.match(line))]
        for first, last in gaps:
            event("a gap is named")
            assert not left & set(range(first, last + 1)), warnings
            due = any(i % self.interval == 0 for i in range(first, last + 1))
            assert due or alone, warnings  # how often one event is logged is not known
        for iteration in range(self.interval, step + 1, self.interval):
            if iteration not in left and min(left, default=step) < iteration:
                event("an event is missing")
                assert any(a <= iteration <= b for a, b in gaps) or any(
                    line.startswith("the logs end at step") for line in warnings
                ), (iteration, warnings)
        assert not any("were lost" in line for line in warnings)


lives = st.lists(
    st.builds(
        Life,
        steps=st.integers(1, 12),
        pace=st.sampled_from([0.01, 0.1, 0.5, 3.0]),
        pause=st.sampled_from([0.0, 0.2, 1.0, 5.0]),
        lost=st.sampled_from([0, 0, 1, 3, 99]),
        loads=st.integers(0, 9),
        rollback=st.booleans(),
        edited=st.booleans(),
    ),
    min_size=1,
    max_size=5,
)


@settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)
@given(lives, st.sampled_from([1, 1, 2, 5]), st.sampled_from([1, 2, 3]), st.booleans())
@example([Life(12, loads=1), Life(4, loads=2)], 1, 2, True)  # back to 4, and at once to 6
@example([Life(12, loads=1), Life(2, lost=99)], 1, 2, True)  # 6 was saved, nothing was logged
@example([Life(9, loads=2)], 2, 3, False)  # saved at 9, logged at 8
def test_what_a_plan_says_of_missing_events_is_so(
    lives: list[Life], interval: int, every: int, whole: bool
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        training = Training(Path(folder), interval, every, whole)
        for life in lives:
            training.run(life)
            if not training.saved:
                return
            try:
                training.go_back(life)
            except SurgeryError:
                event("refused")
                return
