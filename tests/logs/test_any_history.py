"""A law: whatever a training went through, a rollback leaves one clean curve in each of its logs, and
every undo is bit for bit."""

from __future__ import annotations

import json
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
from tests.support.snapshot import Snapshot, snapshot
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
        rows = "".join(f"{step},{loss}\n" for step, loss in points)
        head = "" if (self.root / "metrics.csv").exists() else "step,loss\n"
        with (self.root / "metrics.csv").open("a") as file:
            file.write(head + rows)
        with (self.root / "metrics.jsonl").open("a") as file:
            for step, loss in points:
                file.write(json.dumps({"step": step, "loss": loss}) + "\n")
        self._to_wandb(points, int(time))
        write_log(
            self.root / "tensorboard", [loss for _, loss in points],
            first=points[0][0], wall=time, tag="loss", name=f"events.out.tfevents.{int(time)}.h.1.0",
        )  # fmt: skip
        self.curve = [*self.curve, *points]
        self.step += steps
        for step, _ in points:
            if step % EVERY == 0:
                shutil.rmtree(self.root / f"checkpoint-{step}", ignore_errors=True)
                make_run(self.root, (step,))

    def _to_wandb(self, points: Curve, time: int) -> None:
        folder = self.root / "wandb" / f"offline-run-{time}-abc"
        folder.mkdir(parents=True)
        values = [
            {"global_step": step, "loss": loss, "_timestamp": float(time + i), "_step": i}
            for i, (step, loss) in enumerate(points)
        ]
        records = [bytes_field(21, b""), of_run("abc"), *map(history, values)]
        (folder / "run-abc.wandb").write_bytes(framed([*records, bytes_field(18, b"")]))

    def saved(self) -> list[int]:
        return [step for step in range(EVERY, self.step + 1, EVERY)]

    def back(self, step: int) -> None:
        """What a log without what was left would have."""
        self.step = step
        self.curve = [point for point in self.curve if point[0] <= step]


def _table(root: Path) -> Curve:
    rows = (line.split(",") for line in (root / "metrics.csv").read_text().splitlines()[1:])
    return [(int(step), float(loss)) for step, loss in rows]


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
    """Train, crash and resume from a checkpoint, or go back to one; then undo all."""
    training = Training(root)
    training.train(EVERY + 1)
    before: list[Snapshot] = []
    for act, number in [*acts, ("rollback", 0)]:
        if act == "train":
            training.train(number)
            continue
        saved = training.saved()
        if not saved:
            continue
        to = saved[number % len(saved)]
        if act == "crash":  # and its next start loads an older step
            training.back(saved[-1])
            continue
        state = snapshot(root)
        run = Run.open(root)
        recipe = {"rollback": {"to": to}, "tensorboard": {"note": False}}
        plan = surgery.plan(run, from_data(recipe))
        training.back(to)
        if not plan.edits:
            continue
        surgery.apply(run, plan)
        before.append(state)
        for name, read in LOGS.items():
            assert read(root) == training.curve, name
    while before:
        run = Run.open(root)
        surgery.apply(run, surgery.plan_undo(run))
        state = before.pop()
        now = snapshot(root)
        assert {name: now.get(name) for name in state} == state
        if before:
            break  # what was trained between two surgeries is not there to compare with


def law(examples: int) -> Callable[[Path], None]:
    @settings(
        max_examples=examples,
        deadline=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
        derandomize=True,
    )
    @given(acts)
    def holds(acts: list[Act]) -> None:
        with tempfile.TemporaryDirectory() as folder:
            root = Path(folder, "run")
            root.mkdir()
            live_through(acts, root)

    return lambda _: holds()


def test_a_rollback_leaves_one_curve_in_every_log(tmp_path: Path) -> None:
    law(12)(tmp_path)


@pytest.mark.slow
def test_a_rollback_leaves_one_curve_after_any_history(tmp_path: Path) -> None:
    law(300)(tmp_path)
