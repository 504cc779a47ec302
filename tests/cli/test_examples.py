"""Every command's help ends with examples, and each one does what it says on a real run."""

from __future__ import annotations

import inspect
import random
import shlex
import shutil
from pathlib import Path

import pytest

from ckptsurgeon import Hyperparameters, Recipe, Run, apply, plan
from ckptsurgeon.cli.commands import Command, commands, examples
from tests.cli.conftest import Surgeon
from tests.support.event_logs import write_log
from tests.support.launch import launch

CASES = [
    pytest.param(
        line,
        id=line.removeprefix("ckptsurgeon "),
        marks=[pytest.mark.slow] if " check-optimizer " in line else [],  # seconds each
    )
    for command in commands().values()
    for line in examples(command.function())
]
RECIPE = "why: 'spike at step 7'\nrollback: {to: 6}\nset: {lr: 3e-5}\n"


@pytest.fixture(scope="module")
def small_run(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    """Steps 2, 4, 6 and 8, on a schedule that ends as low as those of large models; one surgery,
    and what a trainer says that goes on from it."""
    root = tmp_path_factory.mktemp("small") / "run"
    run = Run.open(train(root, corpus, "min_lr=1e-6", "train_iters=8"))
    apply(run, plan(run, Recipe(Hyperparameters(eps=2e-8))))
    resumed = shutil.copytree(root, root.with_name("resumed"), symlinks=True)
    said = launch(f"--config={root / 'train.yaml'}", f"save={resumed}", "train_iters=10").stdout
    (root / "slurm-4711.out").write_text(said)
    (root / "recipe.yaml").write_text(RECIPE)
    (root / "night.yaml").write_text("watch: {do: apply}\n")
    return root


@pytest.fixture(scope="module")
def tensor_run(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    """Two tensor ranks, which both keep the layer norms."""
    root = tmp_path_factory.mktemp("tensor") / "run"
    return train(root, corpus, "tensor_model_parallel_size=2", "train_iters=2", ranks=2)


@pytest.fixture(scope="module")
def fresh_run(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    """One step of another layout: what a transplant fills."""
    root = tmp_path_factory.mktemp("fresh") / "run"
    return train(root, corpus, "zero_stage=2", "seed=5", "train_iters=2")


def train(root: Path, corpus: Path, *settings: str, ranks: int = 1) -> Path:
    launch(
        "--config=train/configs/tiny.yaml", "--from-scratch", f"save={root}", f"data={corpus}",
        "save_interval=2", *settings, ranks=ranks,
    )  # fmt: skip
    return root


def diverge(run: Path) -> None:
    """Replace its logs with those of a loss that leaves its course at step 200, and no recipe."""
    for path in [*run.glob("tensorboard/*tfevents*"), *run.glob("slurm*"), run / "recipe.yaml"]:
        path.unlink()
    dice = random.Random(2)
    write_log(run / "tensorboard", [2 + dice.gauss(0, 0.05) for _ in range(200)] + [9.0] * 200)


@pytest.mark.thinned(3)
@pytest.mark.parametrize("line", CASES)
@pytest.mark.long
def test_an_example_works_as_it_stands(
    surgeon: Surgeon,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
    line: str,
) -> None:
    name, *words = shlex.split(line)
    assert name == "ckptsurgeon"
    kinds = {"sync-replicas": "tensor_run", "transplant": "fresh_run"}
    made = request.getfixturevalue(kinds.get(words[0], "small_run"))
    monkeypatch.chdir(shutil.copytree(made, tmp_path / "run", symlinks=True))
    if "../old" in words:
        (tmp_path / "old").symlink_to(request.getfixturevalue("small_run"))
    more = ["--yes", "--run", "."]  # nobody answers here
    if words[0] in ("relaunch", "watch") or "--" in words:
        words.insert(1, "--dry-run")  # they are tested in test_relaunch.py, test_ready.py, guard/
        more = []
    if words[0] == "redo":
        assert surgeon("undo", *more).exit_code == 0
    if "--recipe" in words:
        diverge(tmp_path / "run")
    done = surgeon(*words, *more)
    differs = words[0] == "diff" or "--recipe" in words
    assert (done.exit_code, done.stderr) == (3 if differs else 0, "")
    assert done.stdout


@pytest.mark.parametrize("command", commands().values(), ids=list(commands()))
def test_help_teaches(surgeon: Surgeon, command: Command) -> None:
    function = command.function()
    lines = examples(function)
    assert 1 <= len(lines) <= 3
    assert all(shlex.split(line)[:2] == ["ckptsurgeon", command.name] for line in lines)
    shown = surgeon(command.name, "--help").stdout
    assert shown.endswith("\n".join(["Examples:", *(f"    {line}" for line in lines), ""]))
    assert inspect.cleandoc(function.__doc__ or "").startswith(command.help)
