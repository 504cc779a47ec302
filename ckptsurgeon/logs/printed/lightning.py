"""Lightning's `metrics.csv` and the tags of its LearningRateMonitor: `lr-AdamW`, `lr-Adam/pg1`.

Source: `pytorch/callbacks/lr_monitor.py` (`on_train_batch_start`), `fabric/loggers/csv_logs.py`,
2.6.6. The rate is logged before a batch, at the number of updates made so far: a row of step N has
the rate of update N + 1. Lightning prints no rate, and without that callback logs none.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator

from ckptsurgeon.logs.printed.stated import LoggedUpdate, exact

NAME = "Lightning"
POINTS: dict[str, str] = {}
PREFIXES = {"lr-": "lr"}
LATE = 1
"""What is added to the step of a row or a point: it was logged before its update."""


def is_metrics(header: str) -> bool:
    """Whether the first line of a file is that of a `metrics.csv`."""
    columns = header.strip().split(",")
    return "step" in columns and len(columns) > 1


def rows(lines: Iterable[str]) -> Iterator[LoggedUpdate]:
    """What each row says that has a rate; of several columns the first one."""
    for row in csv.DictReader(lines):
        rates = [name for name in row if isinstance(name, str) and name.startswith("lr-")]
        filled = [(name, row[name]) for name in rates if row[name]]
        if not filled:
            continue
        (name, rate), step = filled[0], row["step"]
        try:
            number = exact(rate)
            yield LoggedUpdate(
                NAME, f"step {step}: {name} {rate}", step=int(step) + LATE, lr=number
            )
        except ValueError:
            continue
