"""--help, start-up, and what every command has in common."""

from __future__ import annotations

import subprocess
import sys

import pytest

from ckptsurgeon.cli.commands import commands
from tests.cli.conftest import Surgeon

NAMES = list(commands())
SHARED = ("-C, --run", "-n, --dry-run", "-y, --yes", "--json", "-q, --quiet")
EDITING = NAMES[NAMES.index("rollback") : NAMES.index("ready")]
HEAVY = ("torch", "deepspeed", "tensorboard", "numpy", "omegaconf", "yaml")


def test_every_command_of_the_design_is_there() -> None:
    assert NAMES == [
        "status", "show", "log", "verify", "doctor", "diff", "advise", "report",
        "plan", "apply", "undo", "redo", "recover",
        "rollback", "repair-latest", "set-lr", "set", "cooldown", "reset", "skip",
        "swap-optimizer", "average", "graft", "transplant", "clip-moments", "scale",
        "precision", "sync-replicas",
        "truncate-tb-events", "rename-tb-events", "truncate-logs", "rename-logs",
        "ready", "relaunch", "watch", "fork", "export", "draft-format", "check-format",
        "check-optimizer",
        "compact", "shrink", "prune", "unlock",
    ]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.long
def test_help_has_the_shared_options_and_ends_with_the_exit_codes(
    surgeon: Surgeon, name: str
) -> None:
    result = surgeon(name, "-h")
    assert result.exit_code == 0
    assert surgeon(name, "--help").stdout == result.stdout
    for option in SHARED:
        assert f"  {option} " in result.stdout
    _, _, end = result.stdout.partition("Exit codes:\n")
    codes, _, _ = end.partition("Examples:\n")
    lines = [line.split()[0] for line in codes.strip().splitlines()]
    assert lines[:3] == ["0", "1", "2"]
    assert all(line.isdigit() or line == "otherwise" for line in lines)


@pytest.mark.parametrize("name", [*EDITING, "apply", "undo"])
def test_a_command_that_edits_takes_a_reason_and_relaunches(surgeon: Surgeon, name: str) -> None:
    text = surgeon(name, "-h").stdout
    assert "--why TEXT" in text
    assert "--relaunch " in text
    assert ("--print-recipe" in text) == (name in EDITING)
    assert "  130  Ctrl-C" in text


def test_no_help_has_two_empty_lines_in_a_row(surgeon: Surgeon) -> None:
    for name in commands():
        assert "\n\n\n" not in surgeon(name, "--help").stdout, name


def test_no_argument_is_help(surgeon: Surgeon) -> None:
    result = surgeon()
    assert result.exit_code == 0
    assert all(f"  {name} " in result.stdout for name in NAMES)
    assert "..." not in result.stdout.partition("Commands:")[2]


def test_the_command_line_starts_without_heavy_imports() -> None:
    code = f"import sys, ckptsurgeon.cli\nprint([name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_the_module_and_its_version_run_as_a_script() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ckptsurgeon", "--version"], capture_output=True, text=True
    )
    assert done.returncode == 0
    assert done.stdout.startswith("ckptsurgeon")


def test_a_terminal_without_unicode_gets_no_traceback() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ckptsurgeon", "set-lr", "1", "--why", "→", "--print-recipe"],
        capture_output=True,
        env={"PYTHONIOENCODING": "ascii"},
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"why: '?'" in done.stdout or b"why: ?" in done.stdout


@pytest.mark.parametrize("name", NAMES)
def test_no_option_has_two_meanings(name: str) -> None:
    from ckptsurgeon.cli.build import build

    options = [word for item in build(commands()[name]).params for word in item.opts]
    options += [word for item in build(commands()[name]).params for word in item.secondary_opts]
    assert len(options) == len(set(options))
