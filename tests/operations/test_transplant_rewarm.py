"""The re-warm window in a transplant: one that is open in the source goes on where it stood, and
one that is opened in the filled step begins there. Rates are those that the live optimizer of the
trainer has as it steps, to the last bit."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ckptsurgeon import Plan, Run, look, plan, surgery
from ckptsurgeon.launch.relaunch import compare
from ckptsurgeon.recipe.file import from_data
from tests.conftest import Trained
from tests.support.in_process import InProcess, one_rank
from tests.support.trained_run import edit
from train import trainer
from train.optimizer import live_optimizer

STEP, END = 5, 10
WINDOW = {"rollback": {"to": 4}, "reset": ["moments"], "tensorboard": {"note": False}}
OWN = ("save_interval=1", "fused_optimizer=never")


@pytest.fixture
def alone(corpus: Path) -> Iterator[InProcess]:
    with one_rank() as device:
        yield InProcess(corpus, device)


def gone_on(alone: InProcess, root: Path, stop: int, *words: str) -> tuple[str, dict[int, float]]:
    """The first line of the trainer, and the rate of each update up to `stop`; every step is
    saved."""
    training = alone.prepare(root, f"train_iters={stop}", *OWN, *words)
    used: dict[int, float] = {}

    def note(optimizer: Any, *_: Any) -> None:
        used[training.progress.iteration + 1] = float(optimizer.param_groups[0]["lr"])

    live_optimizer(training.engine).register_step_pre_hook(note)
    line = trainer.first_line(training)
    trainer.train(training, lambda text: None)
    return line, used


def operated(root: Path, **recipe: Any) -> Plan:
    made = plan(Run.open(root), from_data(recipe))
    surgery.apply(Run.open(root), made)
    assert look.verify(Run.open(root), level=4).findings == ()
    return made


def copied(root: Path, name: str) -> Path:
    return Path(shutil.copytree(root, root.with_name(name)))


@pytest.mark.parametrize(("kind", "stage"), [
    ("ramp", 3), ("hold", 2), pytest.param("ramp", 2, marks=pytest.mark.slow),
    pytest.param("ramp", 0, marks=pytest.mark.slow),
])  # fmt: skip
@pytest.mark.long
def test_a_window_of_the_source_goes_on_where_it_stood(
    trained: Trained, alone: InProcess, tmp_path: Path, kind: str, stage: int
) -> None:
    """Of a ramp over 4 updates one is made before the transplant, and 3 after it."""
    source = trained(zero=1).rename(tmp_path / "source")
    operated(source, **WINDOW, rewarm={"iterations": 4, "kind": kind})
    gone_on(alone, source, STEP)
    layout = f"zero_stage={stage}"
    gone_on(alone, tmp_path / "new", 1, layout, "seed=77")
    _, wanted = gone_on(alone, copied(source, "on"), END)
    made = operated(tmp_path / "new", transplant={"source": str(source), "step": STEP})
    promise = made.promise
    assert promise is not None and promise == look.inspect(Run.open(source), STEP).promise
    assert promise.rewarm == (kind, 32, 64)
    line, used = gone_on(alone, tmp_path / "new", END, layout)
    assert compare(promise, line) == []
    assert used == wanted and [*used] == [*range(STEP + 1, END + 1)]
    run = Run.open(tmp_path / "new")
    promised = {step + 1: look.inspect(run, step).promise.lr for step in range(STEP, END)}
    assert promised == used
    rises = [used[step] / used[END] for step in range(STEP + 1, END)]
    known = [0.25, 0.5, 0.75, 1] if kind == "ramp" else [0, 0, 0, 1]
    assert rises == pytest.approx(known, rel=0.02)


def test_a_window_that_is_opened_in_the_filled_step_begins_there(
    trained: Trained, alone: InProcess, tmp_path: Path
) -> None:
    """The rate rises over so many updates from 0 to the schedule of the source."""
    source = trained(zero=1).rename(tmp_path / "source")
    root = tmp_path / "new"
    gone_on(alone, root, 1, "zero_stage=2", "seed=77")
    operated(root, transplant={"source": str(source), "step": 4})
    _, schedule = gone_on(alone, copied(root, "without"), END, "zero_stage=2")
    made = operated(root, rewarm={"iterations": 3, "kind": "ramp"})
    assert made.promise is not None and made.promise.rewarm == ("ramp", 32, 56)
    line, used = gone_on(alone, root, END, "zero_stage=2")
    assert compare(made.promise, line) == []
    shares = {5: 0.0, 6: 1 / 3, 7: 2 / 3}
    assert used == {step: rate * shares.get(step, 1.0) for step, rate in schedule.items()}


def test_a_window_that_the_new_trainer_can_not_keep_is_named(
    trained: Trained, alone: InProcess, tmp_path: Path
) -> None:
    """With the rate that its next update has instead, which no launch option mends."""
    source = trained(zero=1).rename(tmp_path / "source")
    root = tmp_path / "new"
    gone_on(alone, root, 1, "zero_stage=2", "seed=77")
    section = {"source": str(source), "step": 4}

    def of_another_trainer(content: dict[str, Any]) -> None:
        del content["trainer"], content["rewarm"]

    edit(root / "global_step1" / "mp_rank_00_model_states.pt", of_another_trainer)
    known = plan(Run.open(root), from_data({"transplant": section})).warnings
    operated(source, **WINDOW, rewarm={"iterations": 4})
    made = plan(Run.open(root), from_data({"transplant": section}))
    assert made.promise is not None
    assert {*made.warnings} - {*known} == {
        "rewarm is ('hold', 32, 64) in the source and is not kept here: the next rate is "
        f"{made.promise.lr}; transplant a step whose schedule is at 64 samples or beyond, or hold "
        "the rate back in the new trainer"
    }
