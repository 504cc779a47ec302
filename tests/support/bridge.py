"""Starts Megatron-Bridge's own loop (`bridge_trainer.py`) and reads what its updates used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.launch import run_module, said_by_step
from tests.support.newest_megatron import FOLDER, beside

needed = pytest.mark.skipif(
    not (FOLDER.is_dir() and (beside("sources") / "megatron/bridge").is_dir()),
    reason="make test-formats installs Megatron-Bridge and the newest megatron-core",
)


def start(root: Path, stop: int, *settings: object, ranks: int = 1, status: int = 0) -> Any:
    """The ended process. `settings` are keys of its config with values."""
    return run_module(
        "tests.support.bridge_trainer", root, stop, *settings, ranks=ranks, status=status,
        environment={"PYTHONWARNINGS": "ignore"},
        warm="tests.support.bridge_loop",
    )  # fmt: skip


def train(root: Path, stop: int, *settings: object, ranks: int = 1) -> dict[int, Any]:
    """To iteration `stop`, from where it resumes by itself: what each update used."""
    return said_by_step(start(root, stop, *settings, ranks=ranks).stdout)
