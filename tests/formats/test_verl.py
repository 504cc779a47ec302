"""verl: its own checkpoint manager saves on two ranks, and loads what was edited."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ckptsurgeon import look, surgery
from ckptsurgeon.cli import app
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.recipe.file import from_data
from ckptsurgeon.run.run import Run
from tests.support.launch import by_step
from tests.support.newest_megatron import beside
from tests.support.snapshot import snapshot
from tests.support.surgeries import operate, take_back

pytestmark = [
    pytest.mark.formats,
    pytest.mark.skipif(not beside("verl").is_dir(), reason="make test-formats installs verl"),
]
VALUES = {"lr": 3e-4, "beta2": 0.98, "eps": 1e-6, "weight_decay": 0.3}


def train(root: Path, stop: int, *words: object) -> dict[int, Any]:
    """Two ranks to step `stop`, from where the manager resumes: what each update used."""
    return by_step("tests.support.verl_trainer", root, stop, *words, ranks=2)


@pytest.fixture(scope="module", params=["FSDP2", "FSDP1"])
def how(request: pytest.FixtureRequest) -> list[str]:
    return ["--one"] if request.param == "FSDP1" else []


@pytest.fixture(scope="module")
def original(how: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("verl") / "run"
    root.mkdir()
    (root.parent / "used.json").write_text(json.dumps(train(root, 6, *how)))
    return root


@pytest.fixture
def run(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "run"))


def test_the_promise_is_what_the_next_update_uses(how: list[str], run: Path) -> None:
    before = snapshot(run)
    opened = Run.open(run)
    assert (opened.format.name, opened.steps(), opened.latest()) == ("verl", [2, 4, 6], 6)
    assert look.verify(opened, level=4).findings == ()
    plan = operate(run, {"rollback": {"to": 4}, "set": VALUES})
    assert plan.promise is not None and plan.promise.step == 5
    used = train(Path(shutil.copytree(run, run.with_name("twin"))), 6, *how)
    assert sorted(used) == [5, 6]
    assert used[5]["lr"] == [pytest.approx(plan.promise.lr, rel=1e-12)]
    assert used[6]["lr"][0] < used[5]["lr"][0] < 3e-4
    for update in used.values():
        assert update["betas"] == [[0.9, 0.98]] and update["eps"] == [1e-6]
        assert update["weight_decay"] == [0.3]
    assert used[5]["adam_step"] == plan.promise.adam_step == 4
    take_back(run, before)


def test_moments_that_are_reset_are_zero_at_the_next_update(how: list[str], run: Path) -> None:
    plan = operate(run, {"reset": ["moments"]})
    assert plan.promise is not None and plan.promise.adam_step == 0
    used = train(run, 7, *how)
    assert (used[7]["adam_step"], used[7]["moments"]) == (0, 0)
    assert used[7]["lr"] == [pytest.approx(plan.promise.lr, rel=1e-12)]


def test_a_rollback_alone_is_followed_by_the_same_updates(
    how: list[str], run: Path, original: Path
) -> None:
    first = json.loads((original.parent / "used.json").read_text())
    operate(run, {"rollback": {"to": 4}})
    assert train(run, 6, *how) == {int(step): first[step] for step in ("5", "6")}


def test_another_optimizer_is_taken_as_it_is_said(how: list[str], run: Path) -> None:
    with pytest.raises(SurgeryError) as refused:
        surgery.plan(Run.open(run), from_data({"swap_optimizer": {"to": "sgdw"}}))
    assert "load without 'optimizer' in checkpoint.load_contents" in refused.value.next[0]
    assert train(run, 7, *how, "--load", "model", "extra")[7]["adam_step"] == 0


def test_what_it_prints_is_compared_with_the_promise(
    how: list[str], run: Path, tmp_path: Path
) -> None:
    old, new = tmp_path / "old.txt", tmp_path / "new.txt"
    train(Path(shutil.copytree(run, run.with_name("twin"))), 8, *how, "--log", old)
    operate(run, {"rollback": {"to": 4}, "set": {"lr": 3e-4}})
    train(run, 8, *how, "--log", new)
    old.touch()  # what was not written to since the surgery is refused
    said = [
        CliRunner().invoke(app, ["verify", "--log", str(log), "-C", str(run)]) for log in (new, old)
    ]
    assert [each.exit_code for each in said] == [0, 4], said[0].output
    assert "as before the surgery" in said[1].stdout
