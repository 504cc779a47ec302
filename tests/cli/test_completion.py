"""The shell completes a step with the saved ones."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

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
