"""The shell completes a step with the saved ones."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.cli.conftest import Surgeon
from tests.conftest import Trained
from tests.support.launch import REPO


def complete(line: str, folder: Path) -> list[str]:
    environment = {
        **os.environ,
        "PYTHONPATH": str(REPO),
        "_CKPTSURGEON_COMPLETE": "complete_bash",
        "COMP_WORDS": line,
        "COMP_CWORD": str(line.count(" ")),
    }
    done = subprocess.run(
        [sys.executable, "-m", "ckptsurgeon"],
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
    )
    return done.stdout.split()


@pytest.mark.long
def test_a_step_is_completed_with_the_saved_ones(trained: Trained, tmp_path: Path) -> None:
    root = trained()
    assert complete("ckptsurgeon rollback --to ", root) == ["2", "4", "6", "8"]
    assert complete(f"ckptsurgeon rollback -C {root} --to ", tmp_path) == ["2", "4", "6", "8"]
    assert complete(f"ckptsurgeon -C {root} show ", tmp_path) == ["2", "4", "6", "8"]
    assert complete("ckptsurgeon rollback --to ", tmp_path) == []


@pytest.mark.long
def test_a_step_of_a_format_that_is_given(tmp_path: Path) -> None:
    """By a page in the settings of the run, on either side of the command, or not at all."""
    for step in (10, 20):
        torch.save({"state": {}, "param_groups": []}, tmp_path / f"{step}.pt")
    page = tmp_path / "mine.yaml"
    page.write_text('name: mine\nfiles: {"{step}.pt": {optimizers: [[]]}}\n')
    assert complete("ckptsurgeon rollback --to ", tmp_path) == []
    assert complete(f"ckptsurgeon rollback --format {page} --to ", tmp_path) == ["10", "20"]
    assert complete(f"ckptsurgeon --format {page} show ", tmp_path) == ["10", "20"]
    (tmp_path / "ckptsurgeon.yaml").write_text("format: mine.yaml\n")
    assert complete("ckptsurgeon rollback --to ", tmp_path) == ["10", "20"]


@pytest.mark.long
def test_values_are_completed_where_they_are_known(trained: Trained) -> None:
    root = trained()
    assert complete("ckptsurgeon reset ", root) == ["moments", "loss-scale"]
    assert complete("ckptsurgeon rollback --reset ", root) == ["moments", "loss-scale"]
    assert complete("ckptsurgeon set-lr --decay-style ", root) == ["constant", "linear", "cosine"]
    assert complete("ckptsurgeon set beta", root) == ["beta1=", "beta2="]
    for option, values in (("--x", ["steps", "tokens", "samples", "time"]),
                           ("--order", ["wall", "mtime", "name"])):  # fmt: skip
        assert complete(f"ckptsurgeon report {option} ", root) == values
    assert complete("ckptsurgeon advise --rule olmo", root) == ["olmo2", "olmo-core"]
    assert complete("ckptsurgeon undo ", root) == []
    for step in (6, 4):
        surgeon = [sys.executable, "-m", "ckptsurgeon", "rollback", "--to", str(step), "--yes"]
        subprocess.run(surgeon, cwd=root, check=True, capture_output=True)
    assert complete("ckptsurgeon undo ", root) == ["0002", "0001"]
    marker = root / ".ckptsurgeon" / "receipts" / "0001" / "pruned"  # as prune --keep 1 leaves it
    marker.touch()
    assert complete("ckptsurgeon undo ", root) == ["0002"]
    marker.unlink()
    assert complete("ckptsurgeon redo ", root) == []
    subprocess.run([*surgeon[:3], "undo", "--yes"], cwd=root, check=True, capture_output=True)
    assert complete("ckptsurgeon undo ", root) == ["0001"]
    assert complete("ckptsurgeon redo ", root) == ["0002"]


def test_set_takes_each_key_that_is_completed(surgeon: Surgeon, trained: Trained) -> None:
    root = trained()
    offered = complete("ckptsurgeon set ", root)
    assert {"lr=", "weight_decay="} <= {*offered}
    for pair in offered:
        assert "unknown key" not in surgeon("set", f"{pair}1", "-n", "-C", root).stderr, pair


def test_bash_keeps_the_order_of_numbers() -> None:
    """It sorts what it is given, unless it is told not to: 100 came before 50."""
    words = [sys.executable, "-m", "ckptsurgeon", "--show-completion", "bash"]
    script = subprocess.run(
        words,
        capture_output=True,
        text=True,
        env={**os.environ, "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"},
    ).stdout
    assert "complete -o default -o nosort -F " in script
