"""The word of the real Hugging Face Trainer: printed, in its state, and in TensorBoard."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ckptsurgeon import Run
from ckptsurgeon.look.listen import listen
from tests.support.launch import REPO
from tests.support.surgeries import operate

pytestmark = [
    pytest.mark.formats,
    pytest.mark.filterwarnings("ignore"),  # of the libraries' own making
]
TRAINER = "tests.support.hugging_face"


@pytest.fixture(autouse=True)
def _of_this_repository(accelerate_on_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(REPO))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 6 steps, of 12, with the cosine schedule: a step of its warm-up is behind it."""
    root = tmp_path_factory.mktemp("hf") / "run"
    subprocess.run(arguments(root, 6), check=True, cwd=REPO, capture_output=True)
    return root


def arguments(root: Path, stop: int, *more: str) -> list[str]:
    return [sys.executable, "-m", TRAINER, str(root), str(stop), *more]


def operated(saved: Path, tmp_path: Path, *more: str, **recipe: Any) -> Path:
    """A copy of the run after a surgery, whose relaunch goes on to step 9."""
    root = Path(shutil.copytree(saved, tmp_path / "run"))
    operate(root, recipe)
    command = {"relaunch": {"command": arguments(root, 9, *more)}}
    (root / "ckptsurgeon.yaml").write_text(json.dumps(command))
    return root


def relaunched(root: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ckptsurgeon", "relaunch", "-C", str(root)],
        cwd=REPO, capture_output=True, text=True,
    )  # fmt: skip


def test_a_relaunch_keeps_its_word_in_all_that_it_writes(saved: Path, tmp_path: Path) -> None:
    root = operated(saved, tmp_path, set={"lr": 4e-4, "beta2": 0.95})
    done = relaunched(root)
    assert done.returncode == 0, done.stderr[-2000:]
    (tmp_path / "out").write_text(done.stdout)
    run = Run.open(root)
    for sources in (
        {"log": tmp_path / "out"},
        {"log": root / "checkpoint-8" / "trainer_state.json"},
        {"folder": root / "runs"},
    ):
        word = listen(run, **sources)
        assert word.differs == [] and word.not_compared == []
        rates = [item.partition(":")[0] for item in word.agrees if item.startswith("lr")]
        assert rates == ["lr of update 7", "lr of update 8"]
        assert {"betas", "eps", "weight decay", "step of Adam"} <= set(word.not_said)
    assert "note: the trainer's output agrees with the promise of step 7" in done.stderr


def test_other_max_steps_bend_the_schedule_and_are_caught(saved: Path, tmp_path: Path) -> None:
    """The first update has the promised rate: the second one is of another cosine."""
    root = operated(saved, tmp_path, "--max-steps", "40", set={"lr": 4e-4})
    done = relaunched(root)
    assert done.returncode == 4
    assert "error: the trainer does not use what was promised: lr of update 8" in done.stderr
    assert "in its line: {'loss': " in done.stderr
    assert "next: relaunch with the arguments that" in done.stderr
    assert not (root / "checkpoint-10").exists()


def test_a_trainer_that_was_not_told_to_resume_is_caught(saved: Path, tmp_path: Path) -> None:
    root = operated(saved, tmp_path, "--anew", set={"lr": 4e-4})
    done = relaunched(root)
    assert done.returncode == 4
    assert "step: promised 7, says 1, in its line: {'loss': " in done.stderr
