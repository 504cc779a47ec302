"""What the trainer's process tests share: reading its output, stepping a run back, editing."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.train.in_process import InProcess, one_rank


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


def snapshot(run: Path) -> dict[str, bytes]:
    """Every file of the run and its bytes."""
    return {str(p.relative_to(run)): p.read_bytes() for p in run.rglob("*") if p.is_file()}


@pytest.fixture
def in_process(corpus: Path) -> Iterator[InProcess]:
    """A trainer in the test's own process."""
    with one_rank() as device:
        yield InProcess(corpus, device)
