"""A law: whatever a training went through, a rollback leaves one clean curve in each of its logs,
and every undo is bit for bit."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from ckptsurgeon import Run, surgery
from ckptsurgeon.recipe.file import from_data
from tests.support.event_logs import write_log
from tests.support.mlruns import log_to_mlruns, mlruns_curves
from tests.support.snapshot import snapshot
from tests.support.tiny_run import make_run
from tests.support.tracker_databases import (
    START,
    log_to_mlflow,
    log_to_trackio,
    mlflow_curves,
    trackio_curves,
)
from tests.support.wandb_files import bytes_field, framed, history, of_run, unframed

EVERY = 4
"""Steps from one checkpoint to the next."""
Curve = list[tuple[int, float]]


@dataclass
class Training:
    """A trainer that logs each step everywhere, and what a perfect log of it would have. No two of
    its losses are alike."""

    root: Path
    step: int = 0
    starts: int = 0
    losses: int = 0
    curve: Curve = field(default_factory=list)
    at: dict[int, Curve] = field(default_factory=dict)
    """The curve that led to each checkpoint that is there."""

    def train(self, steps: int) -> None:
        """One process: so many steps, with a checkpoint after each few."""
        points = []
        for step in range(self.step + 1, self.step + steps + 1):
            self.losses += 1
            points.append((step, float(self.losses)))
        self.starts += 1
        time = START + 10_000 * self.starts
        values = [(step, {"loss": loss}) for step, loss in points]
        log_to_mlflow(self.root / "mlflow.db", values, time=time)
        log_to_trackio(self.root / "p.db", values, time=time)
        log_to_mlruns(self.root / "mlruns", values, time=time)
        rows = "".join(f"{step},{loss},{time + i}\n" for i, (step, loss) in enumerate(points))
        head = "" if (self.root / "metrics.csv").exists() else "step,loss,timestamp\n"
        with (self.root / "metrics.csv").open("a") as file:
            file.write(head + rows)
        with (self.root / "metrics.jsonl").open("a") as file:
            for i, (step, loss) in enumerate(points):
                file.write(json.dumps({"step": step, "loss": loss, "time": time + i}) + "\n")
        self._to_wandb(points, int(time))
        first = points[0][0]
        folder, losses = self.root / "tensorboard", [loss for _, loss in points]
        log = write_log(folder, losses, first=first, tag="loss", wall=time - first)
        log.rename(log.with_name(f"events.out.tfevents.{int(time)}.elsewhere.1.0"))
        os.utime(folder / f"events.out.tfevents.{int(time)}.elsewhere.1.0", (time, time))
        self.step += steps
        for i, point in enumerate(points):
            self.curve = [*self.curve, point]
            if point[0] % EVERY == 0:
                self._save(point[0], time + i + 0.1)

    def _save(self, step: int, time: float) -> None:
        folder = self.root / f"checkpoint-{step}"
        shutil.rmtree(folder, ignore_errors=True)
        make_run(self.root, (step,))
        for path in [*folder.iterdir(), folder]:
            os.utime(path, (time, time))
        self.at[step] = self.curve

    def _to_wandb(self, points: Curve, time: int) -> None:
        folder = self.root / "wandb" / f"offline-run-{time}-abc"
        folder.mkdir(parents=True)
        values = [
            {"global_step": step, "loss": loss, "_timestamp": float(time + i), "_step": i}
            for i, (step, loss) in enumerate(points)
        ]
        records = [bytes_field(21, b""), of_run("abc"), *map(history, values)]
        (folder / "run-abc.wandb").write_bytes(framed([*records, bytes_field(18, b"")]))

    def load(self, step: int) -> None:
        """The next process goes on from a checkpoint."""
        self.step, self.curve = step, self.at[step]

    def leave(self) -> None:
        """The checkpoints after the one that was loaded are gone."""
        self.at = {step: curve for step, curve in self.at.items() if step <= self.step}


def _table(root: Path) -> Curve:
    rows = (line.split(",") for line in (root / "metrics.csv").read_text().splitlines()[1:])
    return [(int(row[0]), float(row[1])) for row in rows]


def _lines(root: Path) -> Curve:
    rows = map(json.loads, (root / "metrics.jsonl").read_text().splitlines())
    return [(row["step"], row["loss"]) for row in rows]


def _offline(root: Path) -> Curve:
    curve = []
    for path in sorted(root.glob("wandb/*/run-abc.wandb")):
        for record in unframed(path.read_bytes()):
            if record[0] == 2 << 3 | 2:
                words = record.split(b"\x82\x01")
                numbers = [word[1 : 1 + word[0]] for word in words[1:3]]
                curve.append((int(numbers[0]), float(numbers[1])))
    return curve


def _events(root: Path) -> Curve:
    log = EventAccumulator(str(root / "tensorboard"), size_guidance={"scalars": 0})
    log.Reload()
    return [(event.step, event.value) for event in log.Scalars("loss")]


LOGS: dict[str, Callable[[Path], Curve]] = {
    "MLflow": lambda root: mlflow_curves(root / "mlflow.db")["train"],
    "MLflow's files": lambda root: mlruns_curves(root / "mlruns")["train"],
    "Trackio": lambda root: trackio_curves(root / "p.db")["train"],
    "table": _table,
    "JSON lines": _lines,
    "W&B": _offline,
    "TensorBoard": _events,
}

Act = tuple[str, int]
acts = st.lists(
    st.one_of(
        st.tuples(st.just("train"), st.integers(1, 9)),
        st.tuples(st.just("crash"), st.integers(0, 9)),
        st.tuples(st.just("rollback"), st.integers(0, 9)),
    ),
    min_size=2,
    max_size=7,
)


def live_through(acts: list[Act], root: Path) -> None:
    """Train, crash and resume from a checkpoint, or go back to one, which is undone and done
    again."""
    training = Training(root)
    training.train(EVERY + 1)
    for act, number in [*acts, ("rollback", 0)]:
        if act == "train":
            training.train(number)
            continue
        saved = sorted(training.at)
        to = saved[number % len(saved)]
        training.load(to)
        if act == "crash":  # and whoever starts it again loads a step that may be older
            continue
        state = snapshot(root)
        run = Run.open(root)
        recipe = {"rollback": {"to": to}, "tensorboard": {"note": False}}
        plan = surgery.plan(run, from_data(recipe))
        if plan.edits:
            surgery.apply(run, plan)
        training.leave()
        for name, read in LOGS.items():
            assert read(root) == training.curve, name
        if plan.edits:
            run = Run.open(root)
            surgery.apply(run, surgery.plan_undo(run))
            assert snapshot(root) == state
            run = Run.open(root)
            surgery.apply(run, surgery.plan_redo(run))


def law(examples: int) -> None:
    @settings(
        max_examples=examples,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
        derandomize=True,
    )
    @given(acts)
    def holds(acts: list[Act]) -> None:
        with tempfile.TemporaryDirectory() as folder:
            root = Path(folder, "run")
            root.mkdir()
            live_through(acts, root)

    holds()


@pytest.mark.long
def test_a_rollback_leaves_one_curve_in_every_log() -> None:
    law(10)


@pytest.mark.slow
def test_a_rollback_leaves_one_curve_after_any_history() -> None:
    law(150)
