"""Accelerate with DeepSpeed: its own `load_state` resumes what was edited in the engine's files."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from ckptsurgeon import Run, look
from ckptsurgeon.look.doctor import diagnose
from tests.support.launch import by_step
from tests.support.snapshot import snapshot
from tests.support.surgeries import operate, take_back

pytestmark = [
    pytest.mark.formats,
    pytest.mark.filterwarnings("ignore"),  # of the libraries' own making
]


def train(root: Path, stop: int) -> dict[int, Any]:
    return by_step("tests.support.accelerate_deepspeed", root, stop)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("accelerate") / "run"
    train(root, 8)
    return root


@pytest.fixture
def run(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "run"))


def test_a_number_that_counts_saves_is_no_damage(run: Path) -> None:
    opened = Run.open(run)
    assert (opened.format.name, opened.steps(), opened.latest()) == ("accelerate", [0, 1, 2, 3], 3)
    assert look.inspect(opened).step == 8
    assert look.verify(opened, level=4).findings == ()
    assert diagnose(opened) == []


def test_a_resume_uses_all_that_was_set(run: Path) -> None:
    before = snapshot(run)
    values = {"lr": 5e-4, "beta2": 0.97, "eps": 1e-6, "weight_decay": 0.3}
    plan = operate(run, {"rollback": {"to": 1}, "set": values})
    assert plan.promise is not None and plan.promise.step == 5
    seen = train(Path(shutil.copytree(run, run.with_name("resumed"))), 6)
    assert sorted(seen) == [5, 6]
    assert seen[5]["lr"] == [plan.promise.lr] * 2
    for step in (5, 6):
        assert seen[step]["lr"] == pytest.approx([5e-4 * 0.9 ** (step - 1)] * 2)
        assert seen[step]["betas"] == [[0.9, 0.97]] * 2 and seen[step]["eps"] == [1e-6] * 2
        assert seen[step]["weight_decay"] == [0.3, 0.0]
    assert seen[5]["adam_step"] == plan.promise.adam_step == 4 and seen[5]["moments"] > 0
    take_back(run, before)


def test_moments_that_are_reset_are_zero_at_the_next_update(run: Path) -> None:
    before = snapshot(run)
    operate(run, {"reset": ["moments"]})
    used = train(Path(shutil.copytree(run, run.with_name("resumed"))), 10)[9]
    assert (used["adam_step"], used["moments"]) == (0, 0)
    take_back(run, before)
