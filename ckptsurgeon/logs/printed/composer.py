"""Composer's console: a line `[batch=5/100]:`, and indented lines of metrics below it.

Source: `loggers/console_logger.py` and `callbacks/lr_monitor.py` of mosaicml 0.32.1. A block is
printed after update N and the scheduler's step, so that its rate is that of update N + 1; in
TensorBoard the rate has the number N, and the loss of update N the number N - 1. Blocks of a run
whose length is in samples or tokens do not say their update and are not read.
"""

from __future__ import annotations

import re

from ckptsurgeon.logs.printed.stated import COLORS, LoggedUpdate, quoted, rounded

HEAD = re.compile(r"^(?:\[epoch=(?P<epoch>\d+)\])?\[batch=(?P<batch>\d+)/(?P<of>\d+)\]:$")
METRIC = re.compile(
    r"^\s+Train (?P<name>lr-[^/\s]+/group0|loss/train/total|l2_norm/grad/global):"
    r" (?P<value>[-+0-9.e]+|nan|inf)$"
)
NAME = "Composer"
POINTS: dict[str, str] = {}
PREFIXES = {"lr-": "lr"}
LATE = 1
"""What is added to the step of a point: see above."""


def read(line: str) -> LoggedUpdate | None:
    """The update, or a metric of the one named above it; None for any other line. Counted in
    epochs, it is known where all have as many batches."""
    plain = COLORS.sub("", line).rstrip()
    if head := HEAD.match(plain):
        before = (int(head["epoch"] or 1) - 1) * int(head["of"])
        step = before + int(head["batch"])
        return LoggedUpdate(NAME, quoted(line), step=step, begins=True)
    if metric := METRIC.match(plain):
        number = rounded(metric["value"])
        if metric["name"].startswith("lr-"):
            return LoggedUpdate(NAME, quoted(line), next_lr=number, continues=True)
        if metric["name"].startswith("loss"):
            return LoggedUpdate(NAME, quoted(line), loss=number, continues=True)
        return LoggedUpdate(NAME, quoted(line), grad_norm=number, continues=True)
    return None
