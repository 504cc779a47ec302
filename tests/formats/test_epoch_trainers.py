"""timm's and open_clip's own code trains, is edited by its page, and resumes. Run by `make
test-formats`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ckptsurgeon import Run, surgery
from ckptsurgeon.cli import app
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.logs.rows import of_file
from ckptsurgeon.recipe.file import from_data
from tests.support.epoch_trainers import FOLDER, UPDATES
from tests.support.launch import run_module
from tests.support.own_runs import left
from tests.support.snapshot import snapshot
from tests.support.surgeries import operate, take_back

pytestmark = pytest.mark.formats
LATEST = "--save-most-recent"
TRAINERS = {"timm": [], "open_clip": [], "open_clip latest": [LATEST]}


@pytest.fixture(scope="module")
def began(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not (FOLDER / "timm").is_dir():
        pytest.skip("make test-formats installs these trainers")
    folder = tmp_path_factory.mktemp("began")
    for name in TRAINERS:
        program(name, root_of(folder, name))
    return folder


def root_of(folder: Path, name: str) -> Path:
    root = folder / name.replace(" ", "-")
    root = root / "checkpoints" if name.startswith("open_clip") else root
    root.mkdir(parents=True, exist_ok=True)
    return root


def program(name: str, root: Path, *words: str) -> str:
    library = name.partition(" ")[0]
    return run_module("tests.support.epoch_trainers", library, root, *TRAINERS[name], *words).stdout


def resumed(name: str, root: Path, *words: str) -> dict[str, Any]:
    """What the first update after a resume uses, in a copy: the library trains on there."""
    top = root.parent if root.name == "checkpoints" else root
    copy = top.with_name("copy") / "run"
    shutil.copytree(top, copy, symlinks=True)
    printed = program(name, copy / root.relative_to(top), "--resume", *words)
    shutil.rmtree(copy.parent)
    line = next(line for line in printed.splitlines() if line.startswith("{"))
    said: dict[str, Any] = json.loads(line)
    return said


@pytest.fixture(params=TRAINERS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def root(began: Path, name: str, tmp_path: Path) -> Path:
    top = root_of(began, name)
    top = top.parent if top.name == "checkpoints" else top
    shutil.copytree(top, tmp_path / top.name, symlinks=True)
    return root_of(tmp_path, name)


def test_it_is_known_and_resumes_what_was_promised(root: Path, name: str) -> None:
    run = Run.open(root)
    assert run.format.name == ("timm" if name == "timm" else "open-clip")
    assert run.latest() == run.steps()[-1]
    before, to = snapshot(root), run.steps()[-2]
    plan = operate(root, {"rollback": {"to": to}, "set": {"beta2": 0.9, "eps": 1e-6}})
    used = resumed(name, root)
    assert plan.promise is not None
    if name == "timm":
        assert left(root / "summary.csv") == list(range(to + 1))
    assert used["betas"] == [0.9, 0.9] and used["eps"] == 1e-6
    updates = (to + (name == "timm")) * UPDATES
    assert used["adam_step"] == plan.promise.adam_step == updates
    assert used["norm"] > 0 or name != "timm"  # open_clip's synthetic pairs have no gradient
    take_back(root, before)
    operate(root, {"reset": ["moments"], "set": {"weight_decay": 0.3}})
    used = resumed(name, root)
    assert (used["adam_step"], used["norm"]) == (0, 0)
    assert set(used["weight_decay"]) == {0, 0.3}
    take_back(root, before)


def test_a_rate_is_what_the_library_makes_of_it(root: Path, name: str) -> None:
    before, plain = snapshot(root), resumed(name, root)
    if name == "timm":
        run = Run.open(root)
        saved = run.state(run.latest()).promise.lr
        assert saved is not None
        plan = operate(root, {"set": {"lr": saved / 2}})
        assert plan.promise is not None and "lr" in plan.promise.not_known
        assert resumed(name, root, "7e-3")["lr"] == pytest.approx(plain["lr"] / 2, rel=1e-12)
        take_back(root, before)
        return
    with pytest.raises(SurgeryError, match="does not decide lr") as refused:
        surgery.plan(Run.open(root), from_data({"set": {"lr": 1e-4}}))
    assert refused.value.next == ("start with --lr 0.0001",)
    used = resumed(name, root, "--lr", "1e-4")["lr"]
    assert used == pytest.approx(plain["lr"] / 10, rel=1e-12)


def test_what_open_clip_says_is_compared(root: Path, name: str) -> None:
    """Its own lines and points, of the epochs after the one that it went back to."""
    if name != "open_clip latest":
        pytest.skip("timm's lines are those of a script that its package does not have")
    top = root.parent
    operate(root, {"rollback": {"to": 2}})
    (top / "out.log").unlink()
    program(name, root, "--resume", "--report-to", "tensorboard")
    step = f"agrees: step {2 * UPDATES + 1}"
    for words in (("--log", top / "out.log"), ("--tb", top / "tensorboard")):
        told = CliRunner().invoke(app, ["verify", "2", *map(str, words), "-C", str(root)])
        assert told.exit_code == 0 and step in told.stdout, told.output
        assert "lr: the trainer computes it again" in told.stdout
    kept = of_file(top / "out.log", {}).kept
    assert kept["loss"].steps.tolist() == list(range(2 * UPDATES + 1, 8 * UPDATES + 1))
