"""A run made by a given function, in a folder of its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

Make = Callable[[Callable[[Path], Path]], Path]


@pytest.fixture
def made(tmp_path: Path) -> Make:
    def make(maker: Callable[[Path], Path]) -> Path:
        (tmp_path / "run").mkdir()
        return maker(tmp_path / "run")

    return make
