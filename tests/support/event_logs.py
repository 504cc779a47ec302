"""Event files of a loss, by torch's own writer."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

LOSS = "lm-loss-training/lm loss"


def write_log(
    folder: Path,
    losses: Iterable[float],
    first: int = 1,
    tag: str = LOSS,
    more: Mapping[str, Sequence[float]] | None = None,
    at: Iterable[int] | None = None,
    wall: float = 1.7e9,
) -> Path:
    """An event file by torch's own writer, of each step from the `first` on or of those in `at`;
    `more` has further tags. Step N is logged N seconds after `wall`."""
    from torch.utils.tensorboard import SummaryWriter

    writer: Any = SummaryWriter(str(folder))  # type: ignore[no-untyped-call]
    for i, (step, value) in enumerate(zip(at or count(first), losses, strict=False)):
        writer.add_scalar(tag, value, step, walltime=wall + step)
        for other, values in (more or {}).items():
            writer.add_scalar(other, values[i], step, walltime=wall + step)
    writer.close()
    return max(folder.glob("*tfevents*"))


def spiked(points: int = 400, at: int = 250, height: float = 3.0) -> list[float]:
    """A loss that falls, and leaves its course at one of its points."""
    dice = random.Random(1)
    return [
        2 + 2 / math.sqrt(k) + dice.gauss(0, 0.05) + (height if k >= at else 0.0)
        for k in range(1, points + 1)
    ]
