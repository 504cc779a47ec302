"""What a user waits for before anything happens: `--help`, and `status` of a small run."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from bench.process import python
from bench.row import Row

TIMES = 20


def measure(folder: Path, quick: bool, say: Callable[[str], None]) -> list[Row]:
    """The best of some starts: the rest is the machine's."""
    root = folder / "three"
    python("bench.layout", "three", root, 3)
    times = 3 if quick else TIMES
    rows = []
    for what, words, target in (
        ("start-up: --help", ("--help",), 0.2),
        ("start-up: status, 3 checkpoints", ("status", "-C", root), 0.4),
    ):
        best = min(python("ckptsurgeon", *words).seconds for _ in range(times))
        rows.append(Row(what, best, "s", target, note=f"best of {times}"))
    shutil.rmtree(root)
    return rows
