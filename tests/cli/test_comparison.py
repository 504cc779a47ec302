"""verify --log and --tb: the trainer's word, as text, as JSON, and as an exit code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ckptsurgeon import Run, look
from tests.cli.conftest import Surgeon
from tests.conftest import Trained
from train.log import Report, loss_line
from train.progress import Progress


@pytest.fixture
def log(trained: Trained, request: pytest.FixtureRequest) -> tuple[Path, Path]:
    """A run, and the bundled trainer's line of the promised update, its rate times a factor."""
    root = trained()
    promise = look.inspect(Run.open(root)).promise
    assert promise.lr is not None and promise.consumed_samples is not None
    report = Report(2.5, promise.lr * request.param, 8, 1.0, 1.0, 0, 0.1)
    progress = Progress(iteration=promise.step, samples=promise.consumed_samples + 8)
    (root / "out").write_text(loss_line(report, progress, 20) + "\n")
    return root, root / "out"


@pytest.mark.parametrize("log", [1.0], indirect=True)
def test_a_word_that_was_kept(surgeon: Surgeon, log: tuple[Path, Path]) -> None:
    root, file = log
    result = surgeon("verify", "--log", file, "-C", root)
    assert result.exit_code == 0
    assert "verified: the trainer matches the promise of step 9" in result.stdout
    assert "  agrees: step 9, lr of update 9: " in result.stdout
    assert "  not said: betas, eps, weight decay, step of Adam" in result.stdout
    word = json.loads(surgeon("verify", "--log", file, "-C", root, "--json").stdout)["word"]
    assert (word["step"], word["differs"], len(word["lines"])) == (9, [], 1)
    assert "betas" in word["not_said"]


@pytest.mark.parametrize("log", [2.0], indirect=True)
def test_a_word_that_was_broken(surgeon: Surgeon, log: tuple[Path, Path]) -> None:
    root, file = log
    result = surgeon("verify", "--log", file, "-C", root)
    assert result.exit_code == 4
    assert "mismatch: the trainer differs from the promise of step 9" in result.stdout
    assert "in its line: iteration 9/ 20 | consumed samples: 72 |" in result.stdout
    document = json.loads(surgeon("verify", "--log", file, "-C", root, "--json").stdout)
    assert document["sound"] and document["word"]["differs"]


def test_a_word_about_a_number_that_was_set(surgeon: Surgeon, trained: Trained) -> None:
    """The trainer goes on from the number that it has now, whatever the folder is called."""
    root = trained()
    assert surgeon("set", "iteration=30", "-y", "-C", root).exit_code == 0
    promise = look.inspect(Run.open(root)).promise
    assert promise.step == 31 and promise.lr is not None and promise.consumed_samples is not None
    report = Report(2.5, promise.lr, 8, 1.0, 1.0, 0, 0.1)
    progress = Progress(iteration=31, samples=promise.consumed_samples + 8)
    (root / "out").write_text(loss_line(report, progress, 40) + "\n")
    result = surgeon("verify", "--log", root / "out", "-C", root)
    assert result.exit_code == 0, result.output
    assert "  agrees: step 31, lr of update 31: " in result.stdout


@pytest.mark.parametrize("log", [1.0], indirect=True)
def test_files_that_say_nothing(surgeon: Surgeon, log: tuple[Path, Path]) -> None:
    root, file = log
    assert json.loads(surgeon("verify", "-C", root, "--json").stdout)["word"] is None
    file.write_text("Traceback (most recent call last):\n")
    for words, code in (
        (("--log", file), 1),
        (("--tb", root / "global_step8"), 1),
        (("--log", root / "missing"), 2),
        (("--tb", root / "missing"), 2),
    ):
        result = surgeon("verify", *words, "-C", root)
        assert (result.exit_code, result.stdout) == (code, ""), words
        assert result.stderr.count("next: ") == 1
