"""The shell completes a step with the saved ones."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch

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


def test_a_step_is_completed_with_the_saved_ones(trained: Trained, tmp_path: Path) -> None:
    root = trained()
    assert complete("ckptsurgeon rollback --to ", root) == ["2", "4", "6", "8"]
    assert complete(f"ckptsurgeon rollback -C {root} --to ", tmp_path) == ["2", "4", "6", "8"]
    assert complete(f"ckptsurgeon -C {root} show ", tmp_path) == ["2", "4", "6", "8"]
    assert complete("ckptsurgeon rollback --to ", tmp_path) == []


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
