"""A run of Megatron's own scheduler, and a process group of one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import megatron_engine
from tests.support.deepspeed_engine import process_group


@pytest.fixture(scope="module")
def annealed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("annealed") / "run"
    with megatron_engine.megatron():
        megatron_engine.make(root, steps=14)
    return root


@pytest.fixture
def alone() -> Iterator[None]:
    with process_group():
        yield
