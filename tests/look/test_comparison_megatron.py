"""Megatron's line and points with a real DeepSpeed pipeline, whose scheduler flags may override."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ckptsurgeon import Run, plan, surgery
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.logs.printed.comparison import Comparison
from ckptsurgeon.look.listen import listen
from ckptsurgeon.recipe.file import from_data
from tests.support.megatron_engine import BATCH, arguments, build, make, megatron, train
from train.log import Report, loss_line
from train.progress import Progress

USE = {"use_checkpoint_lr_scheduler": True}
OVERRIDE = {"override_lr_scheduler": True}


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    with megatron():
        yield


def operated(root: Path, **recipe: Any) -> Path:
    make(root)
    run = Run.open(root)
    surgery.apply(run, plan(run, from_data(recipe)))
    return root


def relaunched(root: Path, steps: int = 3, tb: bool = False, **command_line: Any) -> Path:
    """What Megatron prints of each iteration, or its event files: the rate after the scheduler's
    step, as `training_log` is given it."""
    from torch.utils.tensorboard import SummaryWriter

    args = arguments(**command_line)
    engine = build(args)
    _, state = engine.load_checkpoint(str(root))
    args.iteration, args.consumed_train_tokens = state["iteration"], state["tokens"]
    args.consumed_train_samples = state["args"].consumed_train_samples
    lines = ["loading checkpoint", f" validation loss at iteration {args.iteration} | x"]
    writer = SummaryWriter(str(root.parent / "logs"))
    for _ in range(steps):
        train(engine, args, 1)
        rate = engine.optimizer.optimizer.param_groups[0]["lr"]
        report = Report(2.5, rate, BATCH, 1.0, 1.0, 0, 0.1)
        progress = Progress(iteration=args.iteration, samples=args.consumed_train_samples)
        lines.append(loss_line(report, progress, 100))
        samples = args.consumed_train_samples
        writer.add_scalar("learning-rate/learning-rate", rate, args.iteration)
        writer.add_scalar("learning-rate/learning-rate vs samples", rate, samples)
        writer.add_scalar("steps-vs-samples/y=samples,x=steps", samples, args.iteration)
        writer.add_scalar("batch-size/batch-size", BATCH, args.iteration)
    writer.close()
    log = root.parent / "trainer.out"
    log.write_text("\n".join(lines) + "\n")
    return root.parent / "logs" if tb else log


def compared(root: Path, path: Path) -> Comparison:
    run = Run.open(root)
    return listen(run, folder=path) if path.is_dir() else listen(run, log=path)


@pytest.mark.parametrize("tb", [False, True])
def test_a_relaunch_by_the_checkpoint_keeps_its_word(tmp_path: Path, tb: bool) -> None:
    root = operated(tmp_path / "run", set={"lr": 3e-5, "min_lr": 1e-6})
    comparison = compared(root, relaunched(root, tb=tb, **USE))
    assert comparison.differs == []
    rates = [item for item in comparison.agrees if item.startswith("lr of update ")]
    assert [item.partition(":")[0] for item in rates] == ["lr of update 8", "lr of update 9"]
    assert {"step 7", "consumed samples 14", "global batch size 2"} <= set(comparison.agrees)
    assert {"lr of update 7", "betas", "eps"} <= set(comparison.not_said)


@pytest.mark.parametrize("tb", [False, True])
def test_override_lr_scheduler_is_caught(tmp_path: Path, tb: bool) -> None:
    """With it the command line of before the surgery wins from the second update on."""
    root = operated(tmp_path / "run", set={"lr": 3e-5, "min_lr": 1e-6})
    comparison = compared(root, relaunched(root, tb=tb, **OVERRIDE))
    assert comparison.differs[0].startswith("lr of update 8: promised 2.9")
    assert "says 5.9" in comparison.differs[0]
    assert any("--use-checkpoint-lr-scheduler" in hint for hint in comparison.expected.remedy)


def test_a_position_that_the_trainer_does_not_take_is_caught(tmp_path: Path) -> None:
    root = operated(tmp_path / "run", set={"consumed_samples": 100})
    log = relaunched(root, **USE)
    assert compared(root, log).differs == []
    log.write_text(log.read_text().replace("102 |", " 14 |"))
    (difference,) = compared(root, log).differs
    assert difference.startswith(
        "consumed samples: promised 100 and 1 x 2 after it, so 102, says 14"
    )


def test_a_trainer_that_starts_from_nothing_is_caught(tmp_path: Path) -> None:
    root = operated(tmp_path / "run", rollback={"to": 4})
    log = relaunched(root, **USE)
    before = log.read_text()
    log.write_text(before + before.replace("iteration        5/", "iteration        1/"))
    (difference,) = compared(root, log).differs
    assert difference.startswith("step: promised 5, says 1, in its line: iteration 1/ 100 |")


def test_the_line_of_before_a_rollback_is_not_taken_for_the_new_one(tmp_path: Path) -> None:
    """One file for all starts, as a shell that appends makes it: iteration 5 is in it twice."""
    make(tmp_path / "run", steps=8)
    root = tmp_path / "run"
    (tmp_path / "old").mkdir()
    old = (
        relaunched(root, steps=1, **USE)
        .read_text()
        .replace("iteration        9/", "iteration        7/")
    )
    run = Run.open(root)
    surgery.apply(run, plan(run, from_data({"rollback": {"to": 6}, "set": {"lr": 3e-5}})))
    log = relaunched(root, **USE)
    log.write_text(old + log.read_text())
    comparison = compared(root, log)
    assert comparison.differs == [] and "step 7" in comparison.agrees


def test_a_file_that_says_nothing_is_no_agreement(tmp_path: Path) -> None:
    root = operated(tmp_path / "run", set={"lr": 3e-5})
    (tmp_path / "empty.out").write_text("hello\n")
    with pytest.raises(SurgeryError, match="nothing in it is of an update after step 6"):
        compared(root, tmp_path / "empty.out")
