"""A file that a command writes for its user is new, and its hint makes it anew."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from ckptsurgeon.cli.build import build
from ckptsurgeon.cli.commands import commands
from tests.cli.conftest import Surgeon


def a_recipe(root: Path) -> list[object]:
    (root / "recipe.yaml").write_text("set: {lr: 5e-4}\n")
    return ["plan", root / "recipe.yaml"]


WRITERS: dict[str, Callable[[Path], list[object]]] = {
    "advise": lambda root: ["advise"],
    "draft-format": lambda root: ["draft-format"],
    "check-optimizer": lambda root: ["check-optimizer", "torch.optim.NAdam"],
    "plan": a_recipe,
    "relaunch": lambda root: ["relaunch", "--slurm", "--nodes", 1],
    "report": lambda root: ["report"],
}
"""Each command with -o FILE, as it is typed for a run."""


def test_every_command_that_writes_a_file_is_among_them() -> None:
    writers = {
        name
        for name, row in commands().items()
        for item in build(row).params
        if "-o" in item.opts and item.metavar == "FILE"
    }
    assert writers == {*WRITERS}


SECONDS = pytest.param("check-optimizer", marks=pytest.mark.slow)


@pytest.mark.parametrize("name", [SECONDS if n == "check-optimizer" else n for n in WRITERS])
@pytest.mark.long
def test_what_lies_there_stays_until_the_hint_is_typed(
    surgeon: Surgeon, diverged: Path, tmp_path: Path, name: str
) -> None:
    root, file = diverged, tmp_path / ("a picture.svg" if name == "report" else "a file")
    typed = [*WRITERS[name](root), "-o", file]
    typed += () if name == "check-optimizer" else ("-C", root)
    file.write_text("of somebody else")
    refused = surgeon(*typed)
    assert (refused.exit_code, file.read_text()) == (2, "of somebody else")
    assert f"error: {file} already exists\n" in refused.stderr
    remove, anew = refused.stderr.split("next: ")[1].partition("    ")[0].split(" && ")
    subprocess.run(["sh", "-c", remove], check=True)
    assert surgeon(*shlex.split(anew)[1:]).exit_code == (3 if name == "advise" else 0)
    assert file.read_text() not in ("", "of somebody else")


@pytest.mark.parametrize("name", sorted({*WRITERS} - {"check-optimizer"}))
def test_a_file_that_can_not_be_written_is_no_crash(
    surgeon: Surgeon, diverged: Path, tmp_path: Path, name: str
) -> None:
    root = diverged
    words = [*WRITERS[name](root), "-o", tmp_path / "no folder" / "run.svg"]
    refused = surgeon(*words, "-C", root)
    assert refused.exit_code == 2
    assert "No such file or directory" in refused.stderr
    assert "next: choose a FILE in a folder that can be written" in refused.stderr
