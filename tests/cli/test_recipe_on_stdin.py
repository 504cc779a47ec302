"""A recipe on stdin is what it is in a file."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.cli.conftest import invoke, on_terminal
from tests.support.tiny_run import make_run

LINES = (
    "set: {lr: 5e-4}", "set: {lr: }", "set: {lrr: 1}", "lr: 5e-4", "rollback: {to: 4}",
    "rollback: {to: 5}", "reset: moments", "why: 'a: b'", "why: a: b", "skip: [5-6]", "- 1", "}",
    "version: 2", "# nothing", "\t", "set: &a {lr: 5e-4}", "12", "\udcff",
)  # fmt: skip


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lines=st.lists(st.sampled_from(LINES), max_size=3))
def test_a_plan_of_stdin_is_that_of_the_file(
    tmp_path_factory: pytest.TempPathFactory, lines: list[str]
) -> None:
    folder = tmp_path_factory.mktemp("recipe")
    root, recipe = make_run(folder / "run", (4, 8)), folder / "recipe.yaml"
    text = "\n".join(lines).encode(errors="surrogateescape")
    recipe.write_bytes(text)
    for command in ("plan", "apply"):
        filed = invoke(command, recipe, "-n", "-C", root)
        piped = invoke(command, "-", "-n", "-C", root, input=text)
        assert piped.exit_code == filed.exit_code
        assert _shown(piped.stdout, "-") == _shown(filed.stdout, str(recipe))
        assert piped.stderr == filed.stderr.replace(str(recipe), "stdin")


def _shown(text: str, name: str) -> str:
    """Up to the command that applies it, which names the recipe."""
    shown, label, command = text.partition("  apply    ")
    assert not label or f" {name}" in command
    return shown


def test_it_is_applied_and_on_a_terminal_asked_for(tmp_path: Path) -> None:
    root = make_run(tmp_path / "run", (4, 8))
    refused = invoke("apply", "-", "-C", root, input="set: {lr: 5e-4}\n")
    assert refused.exit_code == 1 and "apply - " in refused.stderr and "--yes" in refused.stderr
    assert invoke("apply", "-", "--yes", "-C", root, input="set: {lr: 5e-4}\n").exit_code == 0
    typed = {"the recipe, then Ctrl-D:": "set: {lr: 4e-4}\n\x04", "[y/N]": "y\n"}
    code, shown = on_terminal(typed, "apply", "-", "-C", root)
    assert code == 0 and "the recipe, then Ctrl-D:" in shown and "lr 4.000e-04" in shown, shown


@pytest.mark.parametrize("name", ["pipe", "/dev/stdin"])
def test_another_pipe_is_refused_with_what_reads_it(tmp_path: Path, name: str) -> None:
    """Nobody knows whether anything comes from it: a process substitution is one, too."""
    root = make_run(tmp_path / "run")
    os.mkfifo(tmp_path / "pipe")
    words = [sys.executable, "-m", "ckptsurgeon", "plan", name, "-C", str(root)]
    done = subprocess.run(words, cwd=tmp_path, input="{}", capture_output=True, text=True)
    assert done.returncode == 2 and f"error: {name}: a pipe, not a file" in done.stderr
    assert f"next: ckptsurgeon plan - -C {root}    reads" in done.stderr


@pytest.mark.parametrize("words", ["plan recipe.yaml -o -", "export -o -", "report -o -"])
def test_no_file_is_called_as_a_stream(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str
) -> None:
    make_run(tmp_path / "run")
    (tmp_path / "recipe.yaml").write_text("set: {lr: 5e-4}\n")
    monkeypatch.chdir(tmp_path)
    done = invoke(*words.split(), "-C", "run")
    assert done.exit_code in (1, 2) and not Path("-").exists(), done.stdout
