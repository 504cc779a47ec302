"""Runs of the bundled trainer: read what it printed, step it back, edit a file of it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


def first_line(stdout: str) -> dict[str, Any]:
    """The JSON object of the first line; fails when anything stands before it."""
    return dict(json.loads(stdout.splitlines()[0]))


def losses(stdout: str) -> dict[int, str]:
    """Iteration -> lm loss, in the digits that were printed."""
    found = re.findall(r"^ iteration +(\d+)/.*\| lm loss: (\S+) \|", stdout, re.MULTILINE)
    return {int(iteration): loss for iteration, loss in found}


def step_back(run: Path, step: int) -> Path:
    """Point the run at an earlier checkpoint, as a rollback does, and return that checkpoint."""
    tag = f"global_step{step}"
    (run / "latest").write_text(tag)
    return run / tag


def edit(file: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Load a checkpoint file, change it, save it: what a surgeon does, done bluntly."""
    content = torch.load(file, weights_only=False)
    change(content)
    torch.save(content, file)
