"""Every command's help ends with examples, and each one does what it says on a real run."""

from __future__ import annotations

import inspect
import shlex
from pathlib import Path

import pytest

from ckptsurgeon.cli.commands import Command, commands, examples
from tests.cli.conftest import Surgeon
from tests.conftest import Trained
from tests.support.launch import launch

CASES = [
    pytest.param(line, id=line.removeprefix("ckptsurgeon "))
    for command in commands().values()
    for line in examples(command.function())
]
RECIPE = "why: 'spike at step 7'\nrollback: {to: 6}\nset: {lr: 3e-5}\n"


@pytest.fixture(scope="module")
def tensor_run(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    """Two tensor ranks, which both keep the layer norms."""
    root = tmp_path_factory.mktemp("tensor") / "run"
    launch(
        "--config=train/configs/tiny.yaml", "--from-scratch", f"save={root}", f"data={corpus}",
        "tensor_model_parallel_size=2", "train_iters=2", "save_interval=2", ranks=2,
    )  # fmt: skip
    return root


@pytest.mark.parametrize("line", CASES)
def test_an_example_works_as_it_stands(
    surgeon: Surgeon,
    trained: Trained,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
    line: str,
) -> None:
    tensor = "sync-replicas" in line
    monkeypatch.chdir(request.getfixturevalue("tensor_run") if tensor else trained())
    if not tensor:
        Path("recipe.yaml").write_text(RECIPE)
        assert surgeon("set", "eps=2e-8", "--yes").exit_code == 0
    name, *words = shlex.split(line)
    assert name == "ckptsurgeon"
    more = ["--yes", "--run", "."]  # nobody answers here
    if words[0] == "relaunch":
        words.insert(1, "--dry-run")  # the trainer itself is started in test_relaunch.py
        more = []
    done = surgeon(*words, *more)
    assert (done.exit_code, done.stderr) == (0, "")
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
