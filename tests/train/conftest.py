"""What the trainer's process tests share: reading its output, stepping a run back, editing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.in_process import InProcess, one_rank


@pytest.fixture
def in_process(corpus: Path) -> Iterator[InProcess]:
    """A trainer in the test's own process."""
    with one_rank() as device:
        yield InProcess(corpus, device)
